"""train_step(fallback="transform"): a step that Dynamo cannot capture whole, against the same loop in eager torch."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.compiler.forward_errors import LIBRARIES
from apexfx.optimizers import FusedAdam
from apexfx.passes.base import Pass
from tests.own_optimizers import Adagrad
from tests.small_models import take_step, train_on
from tests.tables import table
from tests.ways import updates

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # as of tests/train_step/test_step.py


class Broken(nn.Module):
    """What keeps Dynamo from capturing it whole is a function of an activation, called between two layers."""

    def __init__(self, between=lambda x: torch._dynamo.graph_break()):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh())
        self.head, self.other = nn.Linear(16, 3), nn.Linear(16, 3)
        self.between = between

    def forward(self, x):
        x = self.body(x)
        chosen = self.between(x)
        return (self.other if chosen else self.head)(x)


def batches(count, size=6):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for _ in range(count)]


def make(optimizer=AdamW, numbers=None, *, model=None, loss_fn=F.cross_entropy, **options):
    model = model if model is not None else Broken()
    options = {"opt_level": "O0", "inner": "eager", "fallback": "transform", **options}
    return apexfx.train_step(model, loss_fn, optimizer(model.parameters(), **(numbers or {"lr": 0.01})), **options)


def eager(optimizer, numbers, data, *, model=None, max_grad_norm=None, accumulate=1):
    model = model if model is not None else Broken()
    optimizer = optimizer(model.parameters(), **numbers)
    for place, (inputs, targets) in enumerate(data, 1):
        (F.cross_entropy(model(inputs), targets) / accumulate).backward()
        if place % accumulate == 0:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def same(one, other, **tolerance):
    torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))


class Scaled(torch.autograd.Function):
    """Dynamo does not get through it."""

    @staticmethod
    def forward(ctx, x):
        return x * float(x.sum() * 0 + 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


OBSTACLES = {
    "a graph break": lambda x: torch._dynamo.graph_break(),
    "a print": lambda x: print(x.sum().item()),
    "a branch on data": lambda x: bool(x[0, 0] > 0),
    "a custom function": lambda x: Scaled.apply(x) is None,
}


@table(1, "obstacle", OBSTACLES)
def test_a_step_in_pieces_is_that_of_eager_torch(obstacle, capsys):
    data = batches(6)
    step = make(SGD, {"lr": 0.1, "momentum": 0.9}, model=Broken(OBSTACLES[obstacle]))
    losses = train_on(step, data)
    reference, theirs = eager(SGD, {"lr": 0.1, "momentum": 0.9}, data, model=Broken(OBSTACLES[obstacle]))
    same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    same([step.optimizer.state[p]["momentum_buffer"] for p, q in zip(step.model.parameters(), reference.parameters())
          if q in theirs.state],
         [theirs.state[q]["momentum_buffer"] for q in reference.parameters() if q in theirs.state], **ROUNDING)
    assert losses[0].dtype == torch.float32 and not losses[0].requires_grad
    assert all(p.grad is None for p in step.model.parameters()) and "forward" not in vars(step.model)
    assert len(step.report.graphs) > 1 and "runs in pieces" in str(step.report)


@pytest.mark.long
@pytest.mark.parametrize("optimizer, options", [
    (AdamW, {"max_grad_norm": 0.05}), (AdamW, {"accumulate": 3}), (Adagrad, {}), (Adagrad, {"max_grad_norm": 0.05}),
    (Adagrad, {"max_grad_norm": 0.05, "accumulate": 2}), (FusedAdam, {"max_grad_norm": 0.05, "accumulate": 2}),
], ids=str)  # fmt: skip
def test_clipping_and_accumulation_are_those_of_eager_torch(optimizer, options):
    data = batches(6)
    step = make(optimizer, **options)
    train_on(step, data)
    reference, _ = eager(optimizer, {"lr": 0.01}, data, **options)
    same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    assert ("Adagrad updates outside of the graph" in str(step.report)) == (optimizer is Adagrad)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"opt_level": "O2", "dtype": "float16", "max_grad_norm": 0.1},
                                     {"accumulate": 2, "loss_scale": 1024.0}])
def test_it_is_the_step_of_one_graph_bit_by_bit(options):
    whole, pieces = make(model=Broken(lambda x: None), **options), make(**options)
    for batch in batches(4):
        same(whole(*batch), pieces(*batch))
    same(whole.state_dict(), pieces.state_dict())
    assert "in pieces" not in str(whole.report) and "in pieces" in str(pieces.report)


def test_an_overflow_in_float16_is_skipped():
    data = batches(4)
    step = make(opt_level="O2", dtype="float16", max_grad_norm=1.0)
    step(*data[0])
    parameters, before = dict(step.model.named_parameters()), copy.deepcopy(dict(step.model.named_parameters()))
    step(data[1][0] * torch.inf, data[1][1])
    same(parameters, before)
    assert step.skipped == 1 and step.loss_scale == 2.0**15
    step.model.body[1].reset_running_stats()  # which the forward has updated, as it would in eager
    step(*data[2])
    assert step.skipped == 1 and not torch.equal(parameters["head.weight"], before["head.weight"])
    assert "GradScaler" not in str(step.report)


@table(1, "optimizer", [AdamW, Adagrad], ids=str)
def test_gradients_can_be_kept(optimizer):
    data = batches(2)
    step, model = make(optimizer, keep_grads=True, loss_scale=8.0), Broken()
    F.cross_entropy(model(data[0][0]), data[0][1]).backward()
    step(*data[0])
    assert step.model.other.weight.grad is None
    for p, q in zip(step.model.parameters(), model.parameters()):
        same(p.grad, q.grad, **ROUNDING)


@pytest.mark.long
def test_a_checkpoint_goes_from_pieces_to_one_graph_and_back():
    data = batches(6)
    steps = make(loss_scale="dynamic"), make(model=Broken(lambda x: None), loss_scale="dynamic"), make(loss_scale="dynamic")
    straight = make(loss_scale="dynamic")
    for place, step in enumerate(steps):
        if place:
            step.load_state_dict(copy.deepcopy(steps[place - 1].state_dict()))
        for batch in data[2 * place:2 * place + 2]:
            step(*batch)
            straight(*batch)
    same(steps[-1].state_dict(), straight.state_dict(), **ROUNDING)


@pytest.mark.long
def test_a_step_that_ran_as_one_graph_goes_on_in_pieces_amid_an_accumulation():
    model = Broken(lambda x: torch._dynamo.graph_break() if len(x) == 5 else None)
    data = [*batches(3), *batches(3, size=5)]
    step = make(model=model, accumulate=2)
    train_on(step, data)
    reference, _ = eager(AdamW, {"lr": 0.01}, data, accumulate=2)
    same(model.state_dict(), reference.state_dict(), **ROUNDING)
    assert step.report.stage("step", 1).captured and step.report.graphs[-1].forward.captured
    with pytest.raises(RuntimeError, match="is not that of a whole training step"):
        step.print_readable(graph=len(step.report.graphs) - 1)
    assert "linear" in step.print_readable(stage="forward", graph=len(step.report.graphs) - 1, print_output=False)


def test_it_says_so_once_with_reason_and_place(caplog):
    step = make()
    train_on(step, batches(2))
    [said] = [record.message for record in caplog.records if "in pieces" in record.message]
    assert "graph_break" in said and "test_in_pieces.py:" in said and "\n" not in said
    assert said in step.report.notes and logging.WARNING in {record.levelno for record in caplog.records}


def test_without_a_fallback_the_error_names_it():
    step = make(fallback=None)
    with pytest.raises(RuntimeError) as raised:
        step(*batches(1)[0])
    what, where, advice = str(raised.value).splitlines()
    assert "cannot be captured as one graph: " in what and "graph_break" in what
    assert re.match(r"  at .*test_in_pieces\.py:\d+, in <lambda>: .*graph_break\(\)", where)
    assert "fallback='transform'" in advice and "from user code" in str(raised.value.__cause__)
    assert not step.report.graphs
    assert not f"{Path(torch.__file__).parent}vision/models/resnet.py".startswith(LIBRARIES), "has lines worth naming"


@pytest.mark.long
def test_under_inductor():
    data = batches(4)
    step = make(inner="inductor", max_grad_norm=0.1, loss_scale=1024.0)
    train_on(step, data)
    reference, _ = eager(AdamW, {"lr": 0.01}, data, max_grad_norm=0.1)
    same(step.model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_what_changes_between_two_calls_is_seen():
    data = batches(6)
    step, reference = make(SGD, {"lr": 0.1}), Broken()
    theirs = SGD(reference.parameters(), lr=0.1)
    for place, (inputs, targets) in enumerate(data):
        for model in (step.model, reference):
            model.body[1].train(place % 3 != 1)
            model.training = model.body.training = place % 3 != 1
            model.head.requires_grad_(place != 3)
            if place == 4:
                torch.manual_seed(2)
                model.body[2] = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).requires_grad_(False)
        for optimizer in (step.optimizer, theirs):
            optimizer.param_groups[0]["lr"] *= 0.9
        step(inputs, targets)
        take_step(theirs, F.cross_entropy(reference(inputs), targets))
    same(step.model.state_dict(), reference.state_dict(), **ROUNDING)


def test_a_forward_of_the_model_s_own_and_more_outputs():
    model = Broken()
    plain = model.forward
    model.forward = lambda x: plain(x) * 2
    step = updates("step", model, lambda m, x, t: (F.cross_entropy((y := m(x)), t), {"output": y}), fallback="transform")
    own = model.forward
    reference = copy.deepcopy(model.state_dict())
    inputs, targets = batches(1)[0]
    loss, rest = step(inputs, targets)
    assert model.forward is own and not rest["output"].requires_grad and loss.dim() == 0
    other = Broken()
    other.load_state_dict(reference)
    same(rest["output"], (other(inputs) * 2).detach(), **ROUNDING)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = Broken(), nn.Linear(3, 3)


def test_an_objective_that_calls_submodules_runs_in_eager_and_says_so(caplog):
    def objective(model, inputs, targets):
        return F.cross_entropy(model.right(model.left(inputs)), targets)

    model, reference = Pair(), Pair()
    step = updates("step", model, objective, fallback="transform")
    inputs, targets = batches(1)[0]
    step(inputs, targets)
    objective(reference, inputs, targets).backward()
    SGD(reference.parameters(), lr=0.1).step()
    same(model.state_dict(), reference.state_dict(), **ROUNDING)
    assert "did not call the model itself" in str(step.report) and "did not call the model itself" in caplog.text


@pytest.mark.parametrize("opt_level", ["O0", "O1"])
def test_a_break_in_a_loop_leaves_all_to_eager_where_that_loses_nothing(opt_level):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)])

        def forward(self, x):
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return x

    data = batches(3)
    step = make(SGD, {"lr": 0.1}, model=Layers(), opt_level=opt_level)
    if opt_level == "O1":
        with pytest.raises(RuntimeError, match="Dynamo captured no graph, so nothing was transformed"):
            step(*data[0])
        return
    train_on(step, data)
    reference, _ = eager(SGD, {"lr": 0.1}, data, model=Layers())
    same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    assert "Dynamo captured no graph" in str(step.report)


def test_dropout_inside_of_a_checkpoint_runs_in_pieces():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.second(checkpoint(lambda y: F.dropout(self.first(y), 0.5), x, use_reentrant=False))

    data = batches(3)
    step, reference = make(SGD, {"lr": 0.1}, model=Checkpointed()), Checkpointed()
    torch.manual_seed(1)
    train_on(step, data)
    torch.manual_seed(1)
    reference, _ = eager(SGD, {"lr": 0.1}, data, model=reference)
    same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    assert "checkpoints activations" in str(step.report)


# ---- errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("loss_fn, error, message", [
    (lambda y, t: F.cross_entropy(y, t, reduction="none"), ValueError, "the loss is not a scalar"),
    (lambda y, t: torch.fft.fft(y).mean(), ValueError, "the loss is torch.complex64"),
    (lambda y, t: F.cross_entropy(y, t).detach(), ValueError, "does not depend on any parameter"),
    (lambda y, t: None, TypeError, "has to return the loss"),
                  ], ids=["no scalar", "complex", "detached", "none"])
def test_a_user_s_error_stays_one(loss_fn, error, message):
    step = make(loss_fn=loss_fn)
    for norm in step.model.modules():
        norm.training = False
    before = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict(), step.loss_scale))
    with pytest.raises(error, match=message):
        step(*batches(1)[0])
    same((step.model.state_dict(), step.optimizer.state_dict(), step.loss_scale), before)
    assert not step.optimizer.state
    step.objective.loss_fn = F.cross_entropy
    step(*batches(1)[0])
    assert step.optimizer.state


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in backward")


@torch._dynamo.disable
def fails(x):
    return Fails.apply(x)


@pytest.mark.long
@pytest.mark.parametrize("trains", [True, False], ids=["statistics change", "nothing changes"])
def test_a_backward_that_fails_changes_nothing_but_statistics(trains):
    step = make(loss_fn=lambda y, t: F.cross_entropy(fails(y), t))
    step.model.train(trains)
    before = copy.deepcopy(dict(step.model.named_parameters()))
    with pytest.raises(ArithmeticError, match="in backward"):
        step(*batches(1)[0])
    same(dict(step.model.named_parameters()), before)
    step.objective.loss_fn = F.cross_entropy
    if not trains:
        step(*batches(1)[0])
        return
    with pytest.raises(RuntimeError, match="earlier step failed after it had begun to change(.|\n)*in backward"):
        step(*batches(1)[0])
    other = make()
    other(*batches(1)[0])
    step.load_state_dict(other.state_dict())
    step(*batches(1)[0])


def test_an_update_that_fails_leaves_a_step_of_no_more_use():
    step = make(SGD, {"lr": 0.1})
    step.model.eval()
    step(*batches(1)[0])
    step._state.now.tensors.clear()
    with pytest.raises(ValueError):
        step(*batches(1)[0])
    with pytest.raises(RuntimeError, match="earlier step failed"):
        step(*batches(1)[0])


def test_sparse_gradients_are_refused():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.head(self.rows(x))

    with pytest.raises(ValueError, match="'rows.weight' is sparse"):
        make(SGD, {"lr": 0.1}, model=Bag())(torch.tensor([0, 1]), torch.tensor([0, 1]))


def test_capture_is_of_one_graph():
    step = make()
    with pytest.raises(RuntimeError, match="cannot be captured as one graph"):
        step.capture(*batches(1)[0])
    step(*batches(1)[0])
    with pytest.raises(RuntimeError, match="cannot be captured as one graph"):
        step.capture(*batches(1)[0])


class AtTheEnd(Pass):
    """Does nothing."""

    name = "at_the_end"
    stage = "step"
    numeric = "bitwise"

    def call(self, gm):
        return self.result(gm, [])


@pytest.mark.parametrize("options, message", [
    ({"fallback": "eager"}, "fallback='eager' was given, expected 'transform' or None"),
    ({"fallback": True}, "fallback=True was given"),
    ({"fullgraph": True}, "fullgraph=True asks for one graph"),
    ({"safeguard": True}, "safeguard= is a part of the step's graph"), ({"ema": apexfx.EMA()}, r"EMA\(\) is a part of"),
    ({"memory_budget": 1}, "memory_budget= is a part of"), ({"passes": [AtTheEnd()]}, r"passes=\[at_the_end, ...\] is a part of"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
