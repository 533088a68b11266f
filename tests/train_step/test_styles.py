"""train_step(): an objective or a model in a style of its own trains as in eager torch, or is refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.compiler.recompiles import told
from tests.small_models import take_step
from tests.tables import table
from tests.train_step.changing_models import WIDTH, heads, samples
from tests.train_step.test_other_leaves import Swap
from tests.train_step.test_step import ROUNDING, SGD, Adam, assert_same, batches, make, net
from tests.ways import updates

# ---- objectives that switch gradients off ------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def another_first(model, x):
    with torch.no_grad():
        made = model.first(x)
    return model.second(made).pow(3).mean()


def the_same_first(model, x):
    with torch.no_grad():
        made = model.first(x)
    return (model.second(model.first(x)) - made).pow(2).mean()


@table(1, "objective, level", [(another_first, "O0"), (the_same_first, "O0"), (another_first, "O1"), (the_same_first, "O2")])
def test_an_objective_may_begin_without_gradients(objective, level):
    model, reference, x = Twice(), Twice(), samples(1)[0][0]
    options = {} if level == "O0" else {"dtype": torch.bfloat16}
    apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=1.0), objective=objective, opt_level=level, inner="eager",
                      **options)(x)
    objective(reference, x).backward()
    for (name, p), q, before in zip(model.named_parameters(), reference.parameters(), Twice().parameters()):
        gradient = torch.zeros_like(q) if q.grad is None else q.grad
        torch.testing.assert_close(before - p, gradient, rtol=0.1, atol=1e-6 if level == "O0" else 0.02,
                                   msg=lambda text, name=name: f"{name}: {text}")


class Detach(apexfx.Pass):
    """Cut the loss off from the first linear layer."""

    name = "detach"
    stage = "forward"
    numeric = "bitwise"

    def call(self, gm):
        node = next(node for node in gm.graph.nodes if node.target is F.linear)
        with gm.graph.inserting_before(node):
            cut = gm.graph.call_method("detach", (node.args[1],))
        cut.meta.update(node.args[1].meta)
        node.args = (node.args[0], cut, *node.args[2:])
        self.record(node, "cut off")
        return PassResult(gm, True)


def test_a_pass_that_cuts_a_gradient_off_is_told():
    model = net()
    before = copy.deepcopy(model.state_dict())
    step = apexfx.train_step(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             passes=(Detach(),))
    with pytest.raises(RuntimeError, match="depends on 1 parameters .* whose gradients a forward pass has cut off"):
        step(*batches(1)[0])
    assert_same(model.state_dict(), before)


# ---- what reads a parameter reads it before the update -----------------------------------------------------------------------


class Readers(nn.Module):
    """An elementwise product whose backward, a buffer and a second output read a parameter that has an update of its own."""

    def __init__(self, width=768):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.last = nn.Linear(8, width), nn.Parameter(torch.randn(width, width)), nn.Linear(width, 4)
        self.register_buffer("average", torch.zeros(width, width))

    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.gate, alpha=0.1)
        return self.last(self.first(x) * self.gate)


def with_metrics(model, x, y):
    return F.mse_loss(model(x), y), (model.gate.detach() * 2 + 1, model.last.weight.detach().t().exp())


@table(1, ("options", "inner"), [
    ({}, "eager"), ({"max_grad_norm": 1e9}, "eager"), ({"loss_scale": 8.0}, "eager"), ({"max_grad_norm": 1e9}, "inductor"),
    *(pytest.param(options, "inductor", marks=pytest.mark.long) for options in ({}, {"loss_scale": 8.0}))], ids=str)
def test_what_reads_a_parameter_reads_it_before_its_update(inner, options):
    model, reference, rate = Readers(), Readers(), 100.0
    step = updates("step", model, with_metrics, lr=rate, inner=inner, **options)
    theirs = SGD(reference.parameters(), lr=rate)
    for _ in range(2):
        x, y = torch.randn(768, 8), torch.randn(768, 4)
        loss, metrics = step(x, y)
        theirs.zero_grad()
        expected, expected_metrics = with_metrics(reference, x, y)
        expected.backward()
        expected_metrics = [metric.clone() for metric in expected_metrics]
        theirs.step()
        assert_same([loss, *metrics], [expected.detach(), *expected_metrics], rtol=1e-5, atol=1e-5)
    assert_same(model.state_dict(), reference.state_dict(), rtol=1e-3, atol=1e-3)  # the rounding of sums of 768, times the rate
    num_updates = step.report.code(stage="step").count("apexfx.sgd_")
    assert num_updates == (1 if options else 2)


class TwoVectors(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.p, self.q = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))


CLIPS = {"max_grad_norm": 1e9}


@table(2, "inner, options, product, optimizer", [
    ("eager", {}, torch.dot, SGD), ("eager", CLIPS, torch.dot, Adam), ("eager", {}, Swap.apply, Adam),
    ("eager", CLIPS, Swap.apply, SGD), ("inductor", {}, torch.dot, SGD), ("inductor", CLIPS, Swap.apply, Adam),
], ids=[f"case {place}" for place in range(6)])  # fmt: skip
def test_a_gradient_may_be_the_memory_of_a_parameter(inner, options, product, optimizer):
    model, reference = TwoVectors(), TwoVectors()
    step = apexfx.train_step(model, optimizer=optimizer(model.parameters(), lr=0.1), objective=lambda m: product(m.p, m.q),
                             opt_level="O0", inner=inner, **options)
    theirs = optimizer(reference.parameters(), lr=0.1)
    for _ in range(3):
        step()
        take_step(theirs, product(reference.p, reference.q))
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)


# ---- what would train in another way than it seems ---------------------------------------------------------------------------


def test_a_step_that_dynamo_does_not_compile_is_told():
    step = make()
    before = copy.deepcopy(step.state_dict())
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="Dynamo is off"):
        step(*batches(1)[0])
    assert_same(step.state_dict(), before)
    step(*batches(1)[0])


@pytest.mark.long
def test_float16_autocast_trains_with_a_scale():
    with torch.autocast("cpu", torch.float16):
        make(loss_scale="dynamic")(*batches(1)[0])


def test_complex_gradients_are_not_clipped():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="2 parameters are complex"):
        apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=0.1), objective=lambda m, x: m(x).abs().sum(),
                          opt_level="O0", max_grad_norm=1.0)


class CheckpointedAttention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, dropout=dropout, batch_first=True)

    def forward(self, x):
        y = x.unsqueeze(0)
        return checkpoint(self.attention, y, y, y, need_weights=False, use_reentrant=False)[0].squeeze(0)


@pytest.mark.long
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_attention_inside_of_a_checkpoint_is_computed_again(inner):
    """Torch marks the op as random, whatever it drops out."""
    model, (x, y) = CheckpointedAttention(), samples(1)[0]
    reference = copy.deepcopy(model)
    step = heads(SGD, model, inner=inner)
    step(x, y)
    F.mse_loss(reference(x), y).backward()
    SGD(reference.parameters(), lr=0.01).step()
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)
    code = step.print_readable(after="captured", print_output=False)
    assert code.count("_scaled_dot_product_flash_attention_for_cpu.default(") == 2


@pytest.mark.long
def test_attention_with_dropout_inside_of_a_checkpoint_is_refused():
    with pytest.raises(RuntimeError, match="the model checkpoints activations around random numbers"):
        heads(model=CheckpointedAttention(0.5))(*samples(1)[0])


def test_an_error_of_the_model_is_not_taken_for_one_of_the_capture():
    step = heads()
    with pytest.raises(RuntimeError, match=r"(?s)same reduction dim.*changing_models\.py:.*self\.body"):
        step(torch.randn(3, WIDTH + 1), torch.randn(3, WIDTH))


# ---- what a step would do otherwise than eager ------------------------------------------------------------------------------


class Decays(nn.Module):
    """A number that the forward changes, and keeps."""

    def __init__(self):
        super().__init__()
        self.w, self.factor = nn.Parameter(torch.ones(3)), 1.0

    def forward(self, x):
        self.factor *= 0.5
        return (self.w * x * self.factor).sum()


@pytest.mark.long
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_number_that_the_forward_changes_is_followed_until_too_many_graphs_are_made_for_it(inner):
    model, reference = Decays(), Decays()
    step = updates("step", model, lambda m, x: m(x), inner=inner)
    theirs = SGD(reference.parameters(), lr=0.1)
    for _ in range(5):
        step(torch.ones(3))
        take_step(theirs, reference(torch.ones(3)))
    assert_same(model.w.detach(), reference.w.detach(), **ROUNDING)
    with pytest.raises(RuntimeError, match="was compiled 8 times"):
        for _ in range(5):
            step(torch.ones(3))


@pytest.mark.long
def test_a_list_of_numbers_that_changes_is_warned_of_by_its_name():
    def objective(m, x, advantages):
        return (m(x).flatten() * torch.tensor(advantages)).sum()

    model = nn.Linear(3, 1)
    step = apexfx.train_step(model, objective=objective, optimizer=SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    for number in range(3):
        step(torch.ones(2, 3), advantages=[1.0 + number, 2.0])
        assert len(step.report.notes) == (number == 2)  # the third value
    assert "a graph is compiled for each value of advantages[0]: give it as a tensor" in step.report.notes[0]


@pytest.mark.long
def test_a_list_that_the_objective_appends_to_is_warned_of():
    kls = []

    def objective(m, x):
        loss = m(x).square().mean()
        kls.append(loss.detach())
        return loss

    model = nn.Linear(3, 1)
    step = apexfx.train_step(model, objective=objective, optimizer=SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    for _ in range(5):
        step(torch.ones(2, 3))
    assert len(kls) == 5
    assert "return what the program appends there" in told(step.report.graphs[2].recompiled)  # graph 1: it is empty no more
    assert re.search(r"value of len\(.*kls\): return what the program appends there", step.report.notes[0])


def backward_of_another_loss(m, x):
    m[1](x).sum().backward()
    return m[0](x).sum()


def backward_in_a_branch(m, x):
    m[1](x).sum().backward()
    return m[0](x).sum() if x.sum() > 0 else m[1](x).sum()


@pytest.mark.parametrize("objective, fallback", [(backward_of_another_loss, None), (backward_in_a_branch, "transform")])
def test_a_backward_inside_of_the_objective_is_refused_before_anything_changes(objective, fallback):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    step = updates("step", model, objective, fallback=fallback)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = copy.deepcopy(step.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="calls backward\\(\\) itself"):
            step(torch.ones(1, 2))
    torch.testing.assert_close(step.state_dict(), before, rtol=0, atol=0)


def test_a_gradient_that_the_objective_sets_is_refused():
    def objective(m, x):
        m.weight.grad = torch.ones(2, 2)
        return m(x).sum()

    model = nn.Linear(2, 2)
    step = apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=0.1), objective=objective, opt_level="O0", inner="eager")
    with pytest.raises(RuntimeError, match="calls backward\\(\\) itself"):
        step(torch.ones(1, 2))


def test_a_backward_to_a_leaf_of_the_objective_s_own_is_that_of_eager():
    def objective(m, x):
        y = m(x)
        leaf = y.detach().requires_grad_()
        leaf.square().sum().backward()
        return (y * leaf.grad).sum()

    torch.manual_seed(0)
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    reference = copy.deepcopy(model)
    step = apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=0.1), objective=objective, opt_level="O0", inner="eager")
    step(x)
    objective(reference, x).backward()
    SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_where_no_loop_trains_is_refused(mode):
    step = heads()
    before = copy.deepcopy(step.model.state_dict())
    for _ in range(2):
        with mode(), pytest.raises(RuntimeError, match=r"called under torch.no_grad\(\) or torch.inference_mode"):
            step(*samples(1)[0])
        torch.testing.assert_close(step.model.state_dict(), before, rtol=0, atol=0)
        step(*samples(1)[0])
        before = copy.deepcopy(step.model.state_dict())


@table(1, "inner, handed_on", [
    ("eager", lambda w: w), ("eager", torch.detach), ("eager", lambda w: w.transpose(0, 1)), ("eager", lambda w: w[0]),
    ("inductor", lambda w: w[0])])
def test_an_objective_may_return_a_parameter(inner, handed_on):
    model, batch = net(), batches(1)[0]
    reference = copy.deepcopy(model)

    def objective(model, x, labels):
        return F.cross_entropy(model(x), labels), handed_on(model[0].weight)

    step = apexfx.train_step(model, objective=objective, optimizer=SGD(model.parameters(), lr=0.1), opt_level="O0", inner=inner)
    optimizer = SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss, expected = objective(reference, *batch)
        loss.backward()
        optimizer.step()
        _, returned = step(*batch)
        torch.testing.assert_close(returned, expected.detach(), **ROUNDING)  # as the update leaves it


def test_what_the_objective_returns_besides_the_loss_may_be_none():
    model = nn.Linear(2, 2)
    step = updates("step", model, lambda m, x: (m(x).sum(), None))
    loss, rest = step(torch.ones(1, 2))
    assert loss.dim() == 0 and rest is None


class Counts(nn.Module):
    """A forward that leaves traces besides its buffers."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher, self.calls = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), 0

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
        return self.student(x)


@pytest.mark.long
def test_looking_for_what_is_not_finite_leaves_the_model_alone(caplog):
    model = Counts()
    before = model.teacher.weight.clone()
    step = updates("step", model, lambda m, x: m(x).square().sum(), loss_scale="dynamic")
    for _ in range(12):
        step(torch.full((2, 3), 1e25))
    assert "steps in a row were skipped" in caplog.text and step.skipped == 12
    assert model.calls == 12
    assert_same(model.teacher.weight, before * 0.5**12)


@pytest.mark.long
def test_a_module_that_was_exported_computes_in_half_as_the_one_it_was_made_from():
    model, (batch,) = net(), batches(1)
    exported = copy.deepcopy(torch.export.export(model, batch[:1]).module())  # which has the same parameters
    losses = [apexfx.train_step(each, F.cross_entropy, SGD(each.parameters(), lr=0.1), opt_level="O2", inner="eager")(*batch)
              for each in (model, exported)]
    assert torch.equal(*losses)
