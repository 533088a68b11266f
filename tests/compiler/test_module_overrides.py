"""Overrides of modules that run in a checkpoint, or of which a parameter is used elsewhere: Dynamo records no call of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx


class Block(nn.Module):
    """Ops of its own between its children, with and without a parameter."""

    def __init__(self):
        super().__init__()
        self.fc, self.act, self.gain = nn.Linear(4, 4), nn.GELU(), nn.Parameter(torch.eye(4))

    def forward(self, x):
        x = self.act(self.fc(x))
        return x @ x.mT @ x @ self.gain


class Scaled(torch.autograd.Function):
    """A product with its derivative written by hand: a higher-order op whose body no pass rewrites."""

    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x @ gain

    @staticmethod
    def backward(ctx, grad):
        x, gain = ctx.saved_tensors
        return grad @ gain.mT, x.mT @ grad


class Outer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.blocks, self.head, self.call = nn.ModuleList([Block()]), nn.Linear(4, 4), call

    def forward(self, x):
        return self.head(self.call(self, x)) @ x.mT


CALLS = {
    "module": lambda outer, x: outer.blocks[0](x),
    "checkpoint": lambda outer, x: checkpoint(outer.blocks[0], x, use_reentrant=False),
    "method": lambda outer, x: outer.blocks[0].forward(x),
    "function": lambda outer, x: Scaled.apply(x, outer.blocks[0].gain),
    "linear": lambda outer, x: outer.blocks[0].fc.forward(x),
    "borrowed": lambda outer, x: nn.functional.linear(x, outer.blocks[0].fc.weight),
}


def halves(call, path):
    """Return the modules of the ops that were cast to half, and the report."""
    model = apexfx.transform(Outer(CALLS[call]), inner="eager", precision={path: "float32"})
    model(torch.randn(3, 4))
    return {cast.module for cast in model.report.casts() if cast.rule == "half"}, str(model.report)


@pytest.mark.parametrize("call", ["module", "checkpoint"])
def test_an_override_reaches_the_ops_of_a_module_and_of_a_checkpoint(call):
    modules, report = halves(call, "blocks.0")
    assert modules == {"", "head"} and "warning" not in report


@pytest.mark.parametrize(("call", "path", "text"), [
    ("method", "blocks.0", "operator.matmul (test_module_overrides.py:"),
    ("linear", "blocks.0.fc", "torch.linear (test_module_overrides.py:"),
    ("borrowed", "blocks.0", "torch.linear (test_module_overrides.py:"),
    ("function", "blocks.0", "hop.autograd_function_apply (test_module_overrides.py:"),
])  # fmt: skip
def test_what_an_override_misses_that_has_a_parameter_of_the_module_is_said(call, path, text, caplog):
    _, report = halves(call, path)
    [said] = [line for line in report.splitlines() if "precision[" in line and "warning" in line]
    assert said.startswith(f"warning: graph 0, precision[{path!r}] does not reach {text}")
    assert said.endswith("Call the module, or override the op by its name")
    assert caplog.text.count("does not reach") == 1 and "covers no module path" not in caplog.text
