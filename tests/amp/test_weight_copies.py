"""O1's casts of weights: never stale, with the right gradients (APEX_SPEC 1.9)."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx import amp
from apexfx.amp._amp_state import _amp_state
from tests.small_models import Model

B = torch.bfloat16


def shared():
    return Model(lambda m, x: m.fc(m.fc(x)), fc=nn.Linear(4, 4))


def executor_of(model, **options):
    amp.initialize(model, dtype=B, verbosity=0, **options)
    return _amp_state.session.executor


def through_numpy(weight):
    weight.detach().numpy()[:] *= 2


def by_sam(weight):
    weight.data.add_(weight.data)


def by_another_thread(weight):
    thread = threading.Thread(target=by_sam, args=(weight,))
    thread.start()
    thread.join()


WRITES = {
    "data_copy": lambda w: w.data.copy_(2 * w.data), "data_add": by_sam, "data_item": lambda w: w.data[:].mul_(2),
    "data_set": lambda w: setattr(w, "data", 2 * w.data), "numpy": through_numpy,
    "dlpack": lambda w: torch.from_dlpack(w.detach()).mul_(2), "no_grad": lambda w: torch.no_grad()(w.mul_)(2),
    "thread": by_another_thread, "inference": lambda w: torch.inference_mode()(w.mul_)(2),
    "storage": lambda w: torch.tensor([], dtype=w.dtype).set_(w.untyped_storage(), 0, w.shape).mul_(2),
    "foreach": lambda w: torch._foreach_mul_([w.data], 2), "init": lambda w: torch.nn.init.constant_(w, 0.5),
    "swap": lambda w: torch.nn.utils.vector_to_parameters(2 * torch.nn.utils.parameters_to_vector([w]), [w]),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_write_between_two_forwards_is_seen(write, grad):
    """However it is made: SAM moves the weights and computes again, a GAN clips them, an EMA swaps them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    x = torch.randn(2, 4)
    with torch.set_grad_enabled(grad):
        before = model(x)
        WRITES[write](model[1].weight)
        after = model(x)
        expected = x.bfloat16()
        for layer in model:
            expected = F.linear(expected, layer.weight.bfloat16(), layer.bias.bfloat16())
    assert torch.equal(after, expected.float()) and not torch.equal(after, before)
    if grad:
        after.sum().backward()
        assert model[1].weight.grad is not None
    assert len(_amp_state.handle.cache) == 0


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
