"""A user's own rules reach the graphs of `amp.initialize(compile=True)` as they reach eager: registered, listed, decorated."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx import amp
from apexfx.amp.lists import functional_overrides, torch_overrides
from tests.tables import table

HALVES = (torch.float16, torch.bfloat16)


class Model(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.fc, self.relu, self.use = nn.Linear(4, 4), nn.Linear(4, 4), use

    def forward(self, x):
        return self.use(self, x)


def outputs(half, use, prepare):
    """Return what a model gives in eager and compiled, each initialised after `prepare`."""
    torch.manual_seed(0)
    model, x = Model(use), torch.randn(3, 4)
    results = []
    for options in ({}, {"compile": True, "inner": "eager"}):
        prepare()
        results.append(amp.initialize(copy.deepcopy(model), dtype=half, verbosity=0, **options)(x))
        amp._amp_state.handle._deactivate()
    return results


def check(half, use, prepare, *, changes=True):
    eager, compiled = outputs(half, use, prepare)
    assert torch.equal(eager, compiled)
    plain = outputs(half, use, lambda: None)[1]
    assert torch.equal(plain, compiled) != changes


@table(1, "half", HALVES, ids=str)
@pytest.mark.parametrize("register, module, name", [
    (amp.register_float_function, F, "linear"), (amp.register_half_function, torch, "softmax"),
    (amp.register_float_function, torch, "sigmoid"), (amp.register_half_function, torch.Tensor, "exp"),
])  # fmt: skip
def test_registered_functions_of_torch(register, module, name, half):
    check(half, lambda m, x: torch.softmax(m.fc(x).sigmoid(), -1) * m.fc(x).exp(), lambda: register(module, name))


def test_a_registered_function_is_no_module_of_that_name():
    check(torch.bfloat16, lambda m, x: m.relu(x), lambda: amp.register_float_function(torch, "relu"), changes=False)


def test_a_promoted_function():
    use = lambda m, x: torch.addcmul(x, m.fc(x), m.fc(x)) + torch.bmm(m.fc(x)[None], x.mT[None]).sum()  # noqa: E731
    check(torch.bfloat16, use, lambda: amp.register_promote_function(torch, "bmm"))


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_edited_lists(half):
    def use(m, x):
        return F.softmax(m.fc(x), -1) * torch.tanh(m.fc(x))

    functional_overrides.FP32_FUNCS.remove("softmax")
    torch_overrides.FP32_FUNCS.append("tanh")
    try:
        edited = outputs(half, use, lambda: None)
    finally:
        functional_overrides.FP32_FUNCS.append("softmax")
        torch_overrides.FP32_FUNCS.remove("tanh")
    assert torch.equal(*edited)
    assert not torch.equal(edited[1], outputs(half, use, lambda: None)[1])


def scores(x, y, *, more=()):
    return (x.square() * y + sum(more)).square().mean(-1)


@table(1, "half", HALVES, ids=str)
@pytest.mark.parametrize("register, decorate", [
    (amp.register_half_function, amp.half_function), (amp.register_float_function, amp.float_function),
    (amp.register_promote_function, amp.promote_function),
], ids=["half", "float", "promote"])  # fmt: skip
def test_functions_that_are_not_torchs(register, decorate, half):
    theirs = types.ModuleType("theirs")
    theirs.scores, decorated = scores, decorate(scores)
    def given(m, x):
        hidden = m.fc(x)  # half
        return {"half": (x, hidden), "float": (hidden, hidden), "promote": (hidden, x)}[decorate.__name__.partition("_")[0]]

    check(half, lambda m, x: theirs.scores(*given(m, x), more=[m.fc(x)]), lambda: register(theirs, "scores"))
    assert theirs.scores is scores  # given back
    eager, compiled = outputs(half, lambda m, x: decorated(*given(m, x), more=[m.fc(x)]), lambda: None)
    assert torch.equal(eager, compiled)


def test_other_levels_take_no_rules():
    amp.register_float_function(F, "linear")
    options = {"dtype": torch.bfloat16, "verbosity": 0, "compile": True, "inner": "eager"}
    model = amp.initialize(Model(lambda m, x: m.fc(x)), opt_level="O2", **options)
    x = torch.randn(3, 4)
    assert torch.equal(model(x), F.linear(x.bfloat16(), model.fc.weight.bfloat16(), model.fc.bias.bfloat16()).float())
