"""An output that is a written input is that input; torch 2.13's AOTAutograd puts it into the place of another output."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.tables import table


class Net(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.weight, self.returned = nn.Parameter(torch.full((3,), 2.0)), returned
        self.register_buffer("mean", torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        x = F.relu(x, inplace=True)
        returned = self.returned(self, x)
        return x * self.weight, returned, self.weight + 1


def clamped(net, x):
    net.weight.data.clamp_(max=0.5)
    return net.mean.mul_(0.5)


def of_batch_norm(net, x):
    net.norm(x)
    return net.norm.running_mean.to(x.dtype)


def broken(net, x):
    mean = net.mean.mul_(0.5)
    torch._dynamo.graph_break()
    return mean


RETURNED = {"a written buffer": lambda net, x: net.mean.mul_(0.5), "a cast that is none": lambda net, x: net.mean.add_(1).float(),
            "statistics": of_batch_norm, "beside a written parameter": clamped, "before a break": broken,
            "a tensor of the caller": lambda net, x: net.other.sub_(1)}


@table(2, "name", RETURNED)
def test_outputs_and_gradients_are_those_of_eager(name):
    torch.manual_seed(0)
    model = Net(RETURNED[name])
    model.other = torch.ones(3)
    compiled = apexfx.transform(copy.deepcopy(model), opt_level="O0", inner="eager", fullgraph=name != "before a break")
    for _ in range(2):
        values = []
        for each in (model, compiled):
            torch.manual_seed(1)
            x = torch.randn(4, 3, requires_grad=True)
            first, returned, last = each(x * 1.5)
            (first.sin().sum() + last.sum()).backward()
            values.append((first, returned, last, x.grad, each.weight.grad, each.mean))
        torch.testing.assert_close(*values)
    assert (compiled(x * 1.5)[1] is compiled.mean) == (model(x * 1.5)[1] is model.mean)
