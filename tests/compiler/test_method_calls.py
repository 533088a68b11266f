"""Modules of which a method is called instead of the module: Dynamo records no module there."""

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
        return self.mix(self.act(self.fc(x))) @ self.gain

    def mix(self, x):
        return x @ x.mT @ x

    def project(self, x):
        return self.mix(self.fc(x))


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
    def __init__(self, call, num_blocks=1):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(num_blocks)), nn.Linear(4, 4)
        self.call, self.kept = call, [block.forward for block in self.blocks]

    def forward(self, x):
        return self.head(self.call(self, x)) @ x.mT


CALLS = {
    "forward": lambda outer, x: outer.blocks[0].forward(x),
    "kept": lambda outer, x: outer.kept[0](x),
    "project": lambda outer, x: outer.blocks[0].project(x),
    "both": lambda outer, x: outer.blocks[0].project(outer.blocks[0](x)),
    "another": lambda outer, x: outer.kept[-1](x),
    "loop": lambda outer, x: outer.kept[1](outer.kept[0](x)),
    "checkpoint": lambda outer, x: checkpoint(outer.blocks[0], x, use_reentrant=False),
    "function": lambda outer, x: Scaled.apply(x, outer.blocks[0].gain),
    "linear": lambda outer, x: outer.blocks[0].fc.forward(x),
    "borrowed": lambda outer, x: nn.functional.linear(x, outer.blocks[0].fc.weight),
}


def halves(call, num_blocks, path):
    """Return the modules of the ops that were cast to half, and the report."""
    model = apexfx.transform(Outer(CALLS[call], num_blocks), inner="eager", precision={path: "float32"})
    model(torch.randn(3, 4))
    return {cast.module for cast in model.report.casts() if cast.rule == "half"}, str(model.report)


@pytest.mark.parametrize("call", ["forward", "kept", "project", "both", "checkpoint"])
def test_an_override_reaches_the_ops_of_a_method_called_alone_and_of_a_checkpoint(call):
    modules, report = halves(call, 1, "blocks.0")
    assert modules == {"", "head"} and "warning" not in report


@pytest.mark.parametrize(("call", "num_blocks", "path", "text"), [
    ("another", 2, "blocks.1", "operator.matmul (test_method_calls.py:"),
    ("loop", 2, "blocks.1", "operator.matmul (test_method_calls.py:"),
    ("linear", 1, "blocks.0.fc", "torch.linear (test_method_calls.py:"),
    ("borrowed", 1, "blocks.0", "torch.linear (test_method_calls.py:"),
    ("function", 1, "blocks.0", "hop.autograd_function_apply (test_method_calls.py:"),
])  # fmt: skip
def test_what_an_override_may_miss_is_said(call, num_blocks, path, text, caplog):
    _, report = halves(call, num_blocks, path)
    [said] = [line for line in report.splitlines() if "precision[" in line and "warning" in line]
    assert said.startswith(f"warning: graph 0, precision[{path!r}] does not reach {text}")
    assert said.endswith("Call the module, or override the op by its name")
    assert caplog.text.count("does not reach") == 1 and "covers no module path" not in caplog.text


def test_an_override_of_another_module_says_nothing():
    assert "warning" not in halves("loop", 2, "head")[1]


class Plain(nn.Linear):
    """Inherits its forward from torch."""


class Layer(nn.TransformerEncoderLayer):
    """Inherits its forward, which calls a method of this class, and that one of a block."""

    def __init__(self):
        super().__init__(4, 1, 4, dropout=0.0, batch_first=True)
        self.block = Block()

    def _ff_block(self, x):
        return self.block.project(x)


class Inheriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.layer = Plain(4, 4), Layer()

    def forward(self, x):
        return self.plain(self.layer(x))


def test_a_forward_inherited_from_torch_is_no_method_called_alone():
    model = apexfx.transform(Inheriting(), inner="eager", precision={"plain": "float32", "layer.block": "float32"})
    model(torch.randn(1, 3, 4))
    assert {op.module: op.dtype for op in model.report.ops() if op.name in ("linear", "matmul")} == {
        "plain": "f32", "layer.block.fc": "f32", "layer.block": "f32"}
