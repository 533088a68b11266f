"""train_step(): what is changed of the model between two steps, or of the batch, reaches the next one."""

from __future__ import annotations

import copy
import enum

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.small_models import branching, take_step
from tests.tables import table
from tests.train_step.changing_models import WIDTH, Eager, Heads, assert_same_training, heads, samples
from tests.train_step.test_step import ROUNDING, SGD, Adam, assert_same, batches, make, net


def norms(momentum=None):
    torch.manual_seed(0)
    norm = nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=momentum))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))


def set_momentum(model):
    model[1][0].momentum = 0.5


def set_cumulative(model):
    model[2].momentum, model[1][0].momentum = None, None


def append(model):
    model[1].append(nn.BatchNorm1d(WIDTH, momentum=None, affine=False))


def replace(model):
    model[1][0] = nn.BatchNorm1d(WIDTH, momentum=0.3, affine=False)


def evaluate(model):
    model[1].eval()


def scale_inputs(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def scale_outputs(model):
    model[2].register_forward_hook(lambda module, args, output: output * 2)


def tie(model):
    model[2].weight = model[0].weight


def freeze(model):
    model[0].requires_grad_(False)


def move(model):
    for p in model.parameters():
        p.data = p.data * 0.5


def set_memory(model):
    with torch.no_grad():
        model[0].weight.set_(torch.ones(WIDTH, WIDTH))


def new_statistics(model):
    model[1][0].running_mean = torch.ones(WIDTH)


def new_layer(model):
    torch.manual_seed(3)
    model[2] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)  # which no optimizer holds


def no_layer(model):
    del model[2]


def no_bias(model):
    model[2].bias = None


def own_forward(model):
    model[2].forward = lambda x: -x @ model[2].weight


@table(2, "change, momentum", [
    *((change, None) for change in (set_momentum, append, replace, evaluate, scale_inputs, tie)),
    *((change, 0.1) for change in (set_momentum, set_cumulative, evaluate, scale_outputs, freeze, move, set_memory,
                    new_statistics, new_layer, no_layer, no_bias, own_forward)),
])  # fmt: skip
def test_a_change_of_the_model_is_seen(change, momentum):
    step, reference = heads(SGD, norms(momentum)), Eager(norms(momentum), SGD)
    for place, batch in enumerate(samples(4)):
        for each in (step, reference):
            if place == 2:
                change(each.model)
            each(*batch)
    assert_same_training(step, reference)


class Kind(enum.Enum):
    TANH = enum.auto()
    RELU = enum.auto()


class Name(enum.StrEnum):
    TANH = enum.auto()
    RELU = enum.auto()


FUNCTIONS = {Kind.TANH: torch.tanh, Kind.RELU: torch.relu, Name.TANH: torch.tanh, Name.RELU: torch.relu}


class OfKind(nn.Linear):
    """Holds an object that is a global's, too; a layer before it has had Dynamo read the global."""

    def __init__(self, kind):
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x):
        x = FUNCTIONS[self.kind](super().forward(x))
        return x * 2 if self.kind == type(self.kind).RELU else x


@pytest.mark.parametrize("kinds", [Kind, Name])
def test_another_object_in_the_place_of_a_global_one_is_seen(kinds):
    model, (x, y) = nn.Sequential(OfKind(kinds.TANH), OfKind(kinds.TANH)), samples(1)[0]
    step, transformed = heads(SGD, model), apexfx.transform(model, opt_level="O0", inner="eager")
    for kind in kinds:
        model[1].kind = kind
        expected = model(x)
        assert_same(transformed(x), expected)
        assert_same(step(x, y), F.mse_loss(expected, y).detach())


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"objective": branching(F.mse_loss), "fallback": "transform"}],
                         ids=["one graph", "in pieces"])
def test_layers_that_are_frozen_and_unfrozen(options):
    step, reference = heads(**options), Eager(Heads())
    for place, batch in enumerate(samples(5)):
        for each in (step, reference):
            each.model.heads[0].requires_grad_(place in (1, 4))
            each(*batch)
    assert_same_training(step, reference)


def test_the_model_holds_its_own_modules_after_a_step():
    model = norms()
    before = list(model.modules())
    step = heads(SGD, model, opt_level="O3", dtype="bfloat16", loss_scale=None)
    step(*samples(1)[0])
    assert list(map(id, model.modules())) == list(map(id, before)) and type(model[1][0]) is nn.BatchNorm1d
    assert not [name for module in model.modules() for name in vars(module) if "apexfx" in name]
    assert not any(module._forward_pre_hooks for module in model.modules())


@table(1, "register, what", [
    (lambda m: m[0].weight.register_hook(lambda g: g * 0), "a hook is registered on parameter '0.weight'"),
    (lambda m: m[2].bias.register_post_accumulate_grad_hook(lambda p: None), "a hook is registered on parameter '2.bias'"),
    (lambda m: m[0].register_full_backward_hook(lambda *_: None), "0 has a backward hook"),
])  # fmt: skip
def test_a_hook_that_would_not_run_is_refused_when_made_and_later(register, what):
    step, model = heads(SGD, norms()), norms()
    step(*samples(1)[0])
    before = copy.deepcopy(step.model.state_dict())
    register(model)
    with pytest.raises(ValueError, match=what):
        heads(SGD, model, opt_level="O3", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    handle = register(step.model)
    with pytest.raises(ValueError, match=what):
        step(*samples(1)[0])
    assert_same(step.model.state_dict(), before)
    handle.remove()
    step(*samples(1)[0])


@pytest.mark.long
def test_a_dynamic_batch_compiles_one_graph():
    step = make(SGD, {"lr": 0.1}, dynamic=True)
    reference = net()
    theirs = SGD(reference.parameters(), lr=0.1)
    for size in (3, 5, 8, 4):
        for inputs, targets in batches(1, size):
            step(inputs, targets)
            take_step(theirs, F.cross_entropy(reference(inputs), targets))
    assert len(step.report.graphs) == 1
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)


def test_the_sizes_of_another_step_are_not_taken_for_changes():
    for width in (8, 16):
        model = nn.Linear(WIDTH, width)
        step = apexfx.train_step(model, F.mse_loss, Adam(model.parameters()), opt_level="O0", inner="eager")
        step(torch.randn(6, WIDTH), torch.randn(6, width))
        assert "Sym(" not in step.report.code(stage="step", after="captured")


class CountsOnALayer(nn.Module):
    """Keeps a number on its recurrent layer, which it also holds unregistered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.GRU(4, 3)
        self.same = [self.layer]

    def forward(self, x):
        y, _ = self.layer(x)
        self.same[0].calls = getattr(self.same[0], "calls", 0) + 1
        return y * self.same[0].calls


@pytest.mark.long
def test_attributes_that_are_set_on_a_layer_while_a_copy_stands_in_for_it():
    model, reference, x = CountsOnALayer(), CountsOnALayer(), torch.ones(5, 2, 4)
    step = apexfx.train_step(model, objective=lambda m, x: m(x).square().mean(), optimizer=SGD(model.parameters(), lr=0.1),
                             opt_level="O0", inner="eager")
    optimizer = SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        loss = take_step(optimizer, reference(x).square().mean())
        assert_same(step(x), loss.detach(), **ROUNDING)
    assert model.layer.calls == 3
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)
