"""LARC against Apex's formula written out."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from apexfx.parallel import LARC
from apexfx.parallel.LARC import LARC as by_module
from apexfx.testing import assert_close


def expected(p, g, *, lr, decay, trust, clip, eps):
    p_norm, g_norm = p.norm().item(), g.norm().item()
    if p_norm == 0 or g_norm == 0:
        return p - lr * g
    rate = trust * p_norm / (g_norm + p_norm * decay + eps)
    rate = min(rate / lr, 1) if clip else rate
    return p - lr * rate * (g + decay * p)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("decay", "maximize"), [(0.0, False), (0.1, False), (0.1, True)])
def test_step_is_the_formula(clip, decay, maximize):
    values = [torch.randn(4, 3), torch.randn(5) * 1e-4, torch.zeros(3), torch.randn(2)]
    grads = [torch.randn(4, 3), torch.randn(5), torch.randn(3), torch.zeros(2)]
    parameters = [nn.Parameter(v.clone()) for v in values] + [nn.Parameter(torch.ones(2))]
    for p, g in zip(parameters, grads):
        p.grad = -g if maximize else g.clone()
    sgd = torch.optim.SGD(parameters, lr=0.3, weight_decay=decay, maximize=maximize)
    optimizer = LARC(sgd, trust_coefficient=0.02, clip=clip)
    optimizer.step()
    for p, v, g in zip(parameters, values, grads):
        want = expected(v.double(), g.double(), lr=0.3, decay=decay, trust=0.02, clip=clip, eps=1e-8)
        assert_close(p.detach(), want, scale=2)
    assert torch.equal(parameters[-1].detach(), torch.ones(2))
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_norms_of_half_gradients_do_not_overflow():
    p = nn.Parameter(torch.full((4096,), 100.0, dtype=torch.float16))
    p.grad = torch.full_like(p, 2000.0)  # its norm is 128000, out of float16
    LARC(torch.optim.SGD([p], lr=1.0), clip=False).step()
    assert_close(p.detach(), torch.full((4096,), 100 - 0.02 * 100, dtype=torch.float16))


def test_weight_decay_is_restored_when_the_step_fails():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    optimizer = LARC(Failing([p], lr=0.1, weight_decay=0.5))
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_forwards_to_the_optimizer_and_pickles():
    assert by_module is LARC
    p = nn.Parameter(torch.ones(2))
    optimizer = LARC(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 2 and "SGD" in repr(optimizer) and optimizer.defaults["momentum"] == 0.9
    loss = optimizer.step(lambda: (p * p).sum().backward() or torch.tensor(2.0))
    assert loss == 2.0 and len(optimizer.state_dict()["state"]) == 1
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    other.load_state_dict(optimizer.state_dict())
    other.zero_grad()
    assert other.trust_coefficient == 0.02 and len(other.state) == 1
    torch.optim.lr_scheduler.StepLR(optimizer.optim, 1)
