"""Model and masters follow each other: copies, loading, edits, checkpoints (APEX_SPEC 1.4, 1.5)."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from apexfx import optimizers
from tests.amp.amp_cases import ConvNet, made, train


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, lr=0.01), lambda p: optimizers.FusedAdam(p, lr=0.01)])
def test_model_and_optimizer_copied_together_train_alike(make):
    model, optimizer = made(make=make)
    train(model, optimizer, 2)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    expected = train(model, optimizer, 2, first=2)
    assert torch.equal(train(model_copy, optimizer_copy, 2, first=2), expected)
    assert optimizer_copy._amp_stash.all_fp16_params[0] is model_copy.conv.weight
    model_loaded, optimizer_loaded = pickle.loads(pickle.dumps((model, optimizer)))
    expected = train(model, optimizer, 1, first=4)
    assert torch.equal(train(model_loaded, optimizer_loaded, 1, first=4), expected)


def test_loading_a_model_after_initialize_reaches_the_masters():
    model, optimizer = made()
    train(model, optimizer, 1)
    source = ConvNet()
    model.load_state_dict(source.state_dict())
    master = optimizer.param_groups[0]["params"][0]
    assert torch.equal(master, source.conv.weight)  # with all of its precision
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.conv.weight, source.conv.weight.bfloat16())


@pytest.mark.parametrize("through_data", [False, True])
def test_edits_of_the_model_before_training_reach_the_masters(through_data):
    model, optimizer = made()
    with torch.no_grad():  # as a broadcast by a parallel wrapper would
        (model.conv.weight.data if through_data else model.conv.weight).fill_(0.25)
    train(model, optimizer, 1)
    assert (model.conv.weight - 0.25).abs().max() < 0.2


def test_edits_of_the_model_during_training_reach_the_masters():
    model, optimizer = made()
    train(model, optimizer, 2)
    master = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        model.conv.weight.clamp_(-0.1, 0.1)
    kept = model.conv.weight.abs() < 0.1
    precise = master[kept].clone()
    assert torch.equal(model.state_dict()["conv.weight"][kept], precise)
    optimizer.zero_grad()
    optimizer.step()
    assert master.abs().max() <= torch.tensor(0.1).bfloat16() and torch.equal(master[kept], precise)


def test_state_dict_of_the_model_has_the_precision_of_the_masters():
    model, optimizer = made(make=lambda p: torch.optim.SGD(p, lr=1e-4))
    train(model, optimizer, 1)
    master = optimizer.param_groups[0]["params"][0]
    assert torch.equal(model.state_dict()["conv.weight"], master) and not torch.equal(master, master.bfloat16().float())
