"""Graphs that Inductor, left alone, computes wrongly without a word."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.versions import refused_before


class Codebook(nn.Module):
    """Reads a buffer, and then moves it by a product of matrices, as an autoencoder its codes."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 3)
        self.register_buffer("codes", torch.eye(3))

    def forward(self, x):
        z = self.encode(x)
        place = torch.ones(3, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        read = (z * place * self.codes.exp()).tanh().sum()
        with torch.no_grad():
            self.codes.mul_(0.9).add_(z.t() @ z, alpha=0.1)
        return read


class Rows(nn.Module):
    """Takes rows, whose gradients are scattered, and columns."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 8)

    def forward(self, x):
        h = self.encode(x)
        return (h[[0, 0, 1]][:, :4] + torch.einsum("bi,bj->bj", h[:, :4], h[:, 4:])).tanh().sum()


class Highest(nn.Module):
    """Takes the highest of halves, whose gradient is that of the ones which are equal to it."""

    def __init__(self, highest):
        super().__init__()
        self.encode, self.highest = nn.Linear(4, 16), highest

    def forward(self, x):
        return self.highest(F.gelu(self.encode(x))).float().square().sum()


class Shuffled(nn.Linear):
    def forward(self, x):
        return super().forward(0.3 * x + 0.7 * x[torch.randperm(len(x))])


@pytest.mark.long
@pytest.mark.parametrize("make", [Codebook, Rows])
def test_gradients_and_buffers_are_those_of_eager(make):
    torch.manual_seed(0)
    reference, x = make(), torch.randn(3, 4)
    model = apexfx.transform(copy.deepcopy(reference), opt_level="O0", inner="inductor")
    for each in (reference, model):
        each(x).backward()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    torch.testing.assert_close(model.encode.weight.grad, reference.encode.weight.grad)


@pytest.mark.long
@pytest.mark.parametrize("highest", [lambda y: y.amax(1), lambda y: y.norm(torch.inf, 1)])
def test_the_highest_half_is_found_again_in_backward(highest):
    torch.manual_seed(0)
    reference, x = Highest(highest), torch.randn(16, 4)
    model = apexfx.transform(copy.deepcopy(reference), opt_level="O2", dtype=torch.bfloat16, inner="inductor")
    for each in (reference, model):
        each(x).backward()
    torch.testing.assert_close(model.encode.weight.grad, reference.encode.weight.grad, rtol=0.1, atol=0.1)


@pytest.mark.long
def test_a_convolution_of_rows_by_a_mask_trains_as_in_eager():
    reference, x, mask = nn.Conv1d(1, 2, 3, padding=1), torch.randn(4, 8), torch.tensor([True, False, True, True])
    model = copy.deepcopy(reference)

    def objective(model, x, mask):
        return model(x[mask].unsqueeze(1)).square().mean()

    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), 0.0), keep_grads=True,
                             opt_level="O0")
    torch.testing.assert_close(step(x, mask), objective(reference, x, mask).detach())
    objective(reference, x, mask).backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


def test_rows_in_a_random_order_are_refused_with_what_to_write():
    model = apexfx.transform(Shuffled(4, 4), opt_level="O0", inner="inductor")
    with refused_before("2.14", RuntimeError, r"randperm\(n\) takes; take them by torch.rand\(n\).argsort"):
        model(torch.randn(6, 4))
