"""Optimizer state whose memory layout is not its parameter's, in the steps of amp."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from apexfx import amp, optimizers
from apexfx.testing import assert_close
from tests.amp.amp_cases import OPTIMIZERS, fresh_state


def in_order(memory_format, name, **options):
    """Train one convolution whose momentum was saved in `memory_format`; return its weight."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3, bias=False)
    x = torch.randn(2, 3, 8, 8)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(x).square().sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = {k: v.to(memory_format=memory_format) if v.dim() else v for k, v in saved["state"][0].items()}
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    optimizer.load_state_dict(saved)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).square().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    return model.weight.detach().clone()


# Fused kernels go through memory, so that a buffer of other strides than its parameter's would be read out of order.
@pytest.mark.parametrize("name", ["momentum", "adam", "fused_adam"])
def test_state_in_another_memory_format_keeps_its_order(name):
    expected = in_order(torch.contiguous_format, name, opt_level="O0", loss_scale="dynamic")
    fresh_state()
    assert_close(in_order(torch.channels_last, name, opt_level="O0", loss_scale="dynamic"), expected)


def state_data_resized(model, optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data[:2] if value.dim() else value.data


@pytest.mark.parametrize("opt_level, make, warns", [
    ("O3", lambda p: torch.optim.SGD(p, lr=0.1, fused=True), True),
    ("O3", lambda p: torch.optim.SGD(p, lr=0.1, fused=False), False),
    ("O3", lambda p: torch.optim.Adam(p, lr=0.1, fused=True), False),
    ("O3", lambda p: optimizers.FusedSGD(p, lr=0.1), False),
    ("O2", lambda p: torch.optim.SGD(p, lr=0.1, fused=True), False),
    ("O1", lambda p: torch.optim.SGD(p, lr=0.1, fused=True), False),
])
def test_fused_sgd_of_half_parameters_on_the_cpu_is_warned_of(opt_level, make, warns):
    model = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.initialize(model, make(model.parameters()), opt_level=opt_level, verbosity=0)
    messages = [str(w.message) for w in caught if "fused=False or take apexfx.optimizers.FusedSGD" in str(w.message)]
    assert len(messages) == warns


def test_state_that_lost_rows_raises_as_in_torch():
    model = torch.nn.Conv2d(3, 4, 3, bias=False)
    model, optimizer = amp.initialize(model, OPTIMIZERS["momentum"](model.parameters()), verbosity=0)
    for i in range(4):
        with amp.scale_loss(model.weight.sum(), optimizer) as loss:
            loss.backward()
        if i == 3:
            state_data_resized(model, optimizer)
            with pytest.raises(RuntimeError, match="size"):
                optimizer.step()
        else:
            optimizer.step()


SOME_STEPS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adam": lambda p: torch.optim.Adam(p, lr=0.1)}


@pytest.mark.parametrize("name", SOME_STEPS)
def test_a_change_of_strides_between_steps_keeps_each_state_with_its_element(name):
    results = []
    for initialised in (True, False):
        torch.manual_seed(0)
        model = nn.Conv2d(2, 2, 2, bias=False)
        optimizer = SOME_STEPS[name](model.parameters())
        if initialised:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
        for step in range(4):
            if step == 2:
                model.to(memory_format=torch.channels_last)
            torch.manual_seed(step)
            loss = (model.weight * torch.randn(2, 2, 2, 2)).sum()
            if initialised:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.weight.detach())
    torch.testing.assert_close(*results)
