"""O1's casts of weights: made once, never stale, with the right gradients; activation checkpoints (APEX_SPEC 1.9)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx import amp
from apexfx.amp._amp_state import _amp_state
from apexfx.amp.eager_ledger import EagerLedger
from tests.small_models import Model

B = torch.bfloat16


def shared():
    return Model(lambda m, x: m.fc(m.fc(x)), fc=nn.Linear(4, 4))


def executor_of(model, **options):
    amp.initialize(model, dtype=B, verbosity=0, **options)
    return _amp_state.session.executor


def test_a_weight_is_cast_once_for_all_its_uses():
    model = shared()
    executor = executor_of(model)
    executor.ledger = EagerLedger()
    for _ in range(2):  # the second forward, before any step, too
        model(torch.randn(2, 4))
    weights = [cast for cast in executor.ledger if cast.op == "linear" and cast.source_dtype == "f32"]
    assert [cast.cached for cast in weights].count(False) == 4  # the inputs, the weight and the bias


def test_shared_weights_get_the_gradient_of_every_use():
    model = shared()
    plain = copy.deepcopy(model)
    executor_of(model)
    x = torch.randn(8, 4)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert torch.allclose(model.fc.weight.grad, plain.fc.weight.grad, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("change", ["step", "load", "data", "storage"])
def test_the_cache_never_serves_stale_weights(change):
    model = shared()
    executor_of(model)
    x = torch.randn(2, 4)
    with torch.set_grad_enabled(change in ("load", "storage")):
        model(x)
        with torch.no_grad():
            if change == "step":
                model.fc.weight.add_(1.0)
            elif change == "load":
                model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
            elif change == "data":
                model.fc.weight.data.add_(1.0)
            else:
                model.fc.weight.data = model.fc.weight.data + 1.0
        fresh = copy.deepcopy(model)
        assert torch.equal(model(x), fresh(x))


def test_evaluation_before_training_does_not_lose_gradients():
    model = shared()
    executor_of(model)
    x = torch.randn(2, 4)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(x)
    model(x).sum().backward()
    assert model.fc.weight.grad is not None


def test_frozen_weights_are_cached_and_get_no_gradient():
    model = shared()
    model.fc.weight.requires_grad_(False)
    executor_of(model)
    model(torch.randn(2, 4)).sum().backward()
    assert model.fc.weight.grad is None and model.fc.bias.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_recompute_in_the_same_dtypes(reentrant):
    def forward(m, x):
        return m.b(torch.utils.checkpoint.checkpoint(lambda z: F.gelu(m.a(z)), x, use_reentrant=reentrant))

    model = Model(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype=B, verbosity=0)
    x = torch.randn(4, 8, requires_grad=True)
    with amp.scale_loss(model(x).square().sum(), optimizer) as loss:
        loss.backward()
    plain(x).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(a.grad, b.grad, rtol=0.05, atol=0.05 * b.grad.abs().max())
