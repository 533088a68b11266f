"""The outline_layers pass: equal layers become one subgraph, what is not equal stays, and the bits are the same."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import apexfx
from apexfx.graph.marks import NAME
from apexfx.graph.mutation import storages
from apexfx.graph.nodes import value
from apexfx.passes import outline_layers
from apexfx.passes.outline_layers import OutlineLayers, invoke_subgraph
from tests.passes.blocks import Block
from tests.small_models import take_step

WIDTH, ROWS, LAYERS = 16, 4, 5


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr(outline_layers, "_LEAST_OPS", 4)
    monkeypatch.setattr(outline_layers, "_LEAST_SAVED", 0)
    monkeypatch.setattr(outline_layers, "_LEAST_SHARE", 0.0)


def layer(x, weight):
    return x + torch.tanh(torch.sin(x @ weight) * 2.0).cos()


def plain(x, *weights):
    for weight in weights:
        x = layer(x, weight)
    return x


def another_constant(x, *weights):
    for place, weight in enumerate(weights):
        x = x + torch.tanh(torch.sin(x @ weight) * (3.0 if place == 2 else 2.0)).cos()
    return x


def another_stride(x, *weights):
    for place, weight in enumerate(weights):
        x = layer(x, weight.t().contiguous().t() if place == 2 else weight + 0.0)
    return x


def another_wiring(x, *weights):
    for place, weight in enumerate(weights):
        a = x @ weight
        b = torch.sin(a)
        x = (a - b if place == 2 else b - a).tanh().cos().exp().neg()
    return x


def a_value_that_is_skipped_to(x, *weights):
    first = x
    for weight in weights:
        x, first = layer(x, weight) + first, x
    return x, first


def two_results_of_one_memory(x, *weights):
    kept = []
    for weight in weights:
        a = torch.tanh(x @ weight)
        b = a.t().sin().cos()
        x = (b @ a).exp().sum() + a
        kept += [a, a.t(), a[1:]]
    return x, *(each * 2 for each in kept)


def a_result_that_is_an_operand(x, *weights):
    kept = []
    for weight in weights:
        turned = weight.t()
        x = layer(x, turned)
        kept.append(turned)
    return x, *(x @ each for each in kept)


def parts_of_one_tensor(x, *weights):
    kept = []
    for weight in weights:
        low, high = (x @ weight).split(WIDTH // 2, 1)
        x = torch.cat([low.sin(), high.cos()], 1).tanh().exp().neg()
        kept.append(high)
    return x, *(each + 1 for each in kept)


def by_turns(x, *weights):
    for place, weight in enumerate([*weights, weights[0]]):
        x = layer(x, weight) if place % 2 else (x @ weight).relu().exp().neg().sigmoid()
    return x


def written_amid(x, *weights):
    total = torch.zeros_like(x)
    for weight in weights:
        a = torch.sin(x @ weight)
        total.add_(a)
        x = (a + total).tanh().cos().exp()
    return x, total


def written_behind(x, *weights):
    total = torch.zeros_like(x)
    for weight in weights:
        a = torch.sin(x @ weight)
        total.add_(a)
        x = a.tanh().cos().exp().neg()
    return x, total


def random_amid(x, *weights):
    for weight in weights:
        a = torch.sin(x @ weight).tanh().cos().exp()
        x = (a * torch.rand_like(a)).sigmoid().neg().sin().cos()
    return x


def a_conjugate_that_is_an_operand(x, *weights):
    turned = torch.view_as_complex(x.view(ROWS, WIDTH // 2, 2)).conj()
    for weight in weights:
        y = torch.view_as_complex((x @ weight).view(ROWS, WIDTH // 2, 2))
        x = torch.view_as_real(y * turned).reshape(ROWS, WIDTH).tanh().cos()
    return x


def views_alone(x, *weights):
    parts = [(weight.t()[1:].t(), weight[2:].view(-1), weight.view(2, -1).t()) for weight in weights]
    return x.sin(), *(each for part in parts for each in part)


def differentiated(x, *weights):
    leaves = [weight.detach().requires_grad_() for weight in weights]
    loss = plain(x, *leaves).square().sum()
    return loss, *torch.autograd.grad(loss, leaves)


# What is outlined of each, as (copies, ops, operands, results) of a run.
PROGRAMS = {
    plain: [(5, 6, 2, 1)],
    another_constant: [],  # two copies in front of it, and two behind it
    another_stride: [],
    another_wiring: [(4, 7, 2, 1)],
    a_value_that_is_skipped_to: [(4, 7, 3, 1)],
    two_results_of_one_memory: [(5, 11, 2, 2)],
    a_result_that_is_an_operand: [(5, 7, 2, 1)],
    parts_of_one_tensor: [(5, 10, 2, 2)],
    by_turns: [(3, 11, 3, 1)],
    written_amid: [(4, 6, 3, 1)],
    written_behind: [(4, 6, 2, 1)],
    random_amid: [(4, 10, 3, 1)],
    a_conjugate_that_is_an_operand: [],
    views_alone: [],
    differentiated: [(4, 13, 6, 2), (5, 7, 2, 3)],
}


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [0.25 * torch.randn(shape, generator=generator) for shape in [(ROWS, WIDTH), *[(WIDTH, WIDTH)] * LAYERS]]


def graph_of(program):
    return make_fx(program, tracing_mode="fake")(*inputs())


def outlined(gm):
    gm, outline = copy.deepcopy(gm), OutlineLayers()
    outline(gm)
    gm.graph.lint()
    gm.recompile()
    return gm, [tuple(int(word) for word in match.detail.replace(",", "").split() if word.isdigit()) for match in outline.matches]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_equal_is_one_subgraph_with_the_same_bits(program):
    flat = graph_of(program)
    gm, runs = outlined(flat)
    assert runs == PROGRAMS[program]
    assert len(gm.graph.find_nodes(op="call_function", target=invoke_subgraph)) == sum(copies for copies, *_ in runs)
    found = []
    for each in (flat, gm):
        torch.manual_seed(0)
        found.append(each(*inputs()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    again, runs = outlined(gm)
    assert not runs and len(again.graph.nodes) == len(gm.graph.nodes)


@pytest.mark.parametrize("name, expected", [
    ("w", "w"), ("norm.weight", "norm_weight"), ("0.weight", "layers_0_weight"), ("w and w", "w_and_w"), ("arg0", "arg0_1"),
    ("lambda", "lambda_1"), ("torch", "torch_1"), ("self", "arg1")])
def test_what_a_layer_reads_is_named_as_in_it(name, expected):
    flat = graph_of(plain)
    x, *weights = flat.graph.find_nodes(op="placeholder")
    x.meta[NAME] = f"other_layers.0.{name}"  # is of no layer
    for place, weight in enumerate(weights):
        weight.meta[NAME] = f"layers.{place}.{name}"
    gm, _ = outlined(flat)
    assert [node.target for node in gm.layers.graph.find_nodes(op="placeholder")] == ["arg0", expected]
    torch.testing.assert_close(gm(*inputs()), flat(*inputs()), rtol=0, atol=0)


class Model(nn.Module):
    """A program of above as a model, its weights parameters."""

    def __init__(self, program):
        super().__init__()
        self.program, self.weights = program, nn.ParameterList(inputs()[1:])

    def forward(self, x):
        return self.program(x, *self.weights)


@pytest.mark.long
@pytest.mark.parametrize("program, door", [(program, door) for program in PROGRAMS for door in ("transform", "train_step")
                                           if program not in (differentiated, random_amid)],
                         ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_code_has_the_numbers_of_eager(program, door):
    """Inductor takes what a subgraph returns for memory of its own."""
    def loss_of(outputs):
        leaves = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum((each * (place + 1)).square().mean() for place, each in enumerate(leaves))

    x, eager, compiled = inputs()[0].double(), Model(program).double(), Model(program).double()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (eager, compiled)]
    if door == "train_step":
        step = apexfx.train_step(compiled, loss_of, optimizers[1], opt_level="O0")
        losses, report = [float(step(x)) for _ in range(2)], step.report
    else:
        model, losses = apexfx.transform(compiled, opt_level="O0"), []
        report = model.report
        for _ in range(2):
            losses.append(loss_of(model(x)))
            take_step(optimizers[1], losses[-1])
    assert not PROGRAMS[program] or any(
        "invoke_subgraph" in text for stage in report.graphs[0].stages for text in (stage.lowered, stage.passes[-1].code))
    for found in losses:
        loss = loss_of(eager(x))
        torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), loss.detach(), rtol=1e-10, atol=0)
        take_step(optimizers[0], loss)
    torch.testing.assert_close(list(compiled.parameters()), list(eager.parameters()), rtol=0, atol=1e-10)


def trained(*, layers=4, dropout=0.0, steps=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH, dropout) for _ in range(layers)))
    step = apexfx.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), **{"opt_level": "O0", **options})
    for _ in range(steps):
        step(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    return step


@pytest.mark.long
def test_a_profile_and_a_report_name_each_copy():
    step = trained()
    assert [entry.name for entry in step.report.graphs[0].stages[-1].passes][-1] == "outline_layers"
    rows = [match.detail for match in step.report.graphs[0].stages[-1].passes[-1].matches]
    assert rows == ["3 x 23 ops of {1..3}, backward, 6 in, 5 out", "4 x 10 ops of {0..3}, 5 in, 3 out"]
    text = step.print_readable(stage="step")
    assert "; after='recompute' prints what it calls inline\n" in text
    assert all(f"layers_{layer} = torch.ops.higher_order.invoke_subgraph(" in text for layer in range(4))
    assert "class Layers(torch.nn.Module):  # 4 calls: layers_0 ... layers_3\n" in text
    times = step.report.profile(step, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), num_steps=1).times
    modules = {module for time in times for module in time.modules}
    assert {f"{layer}.{name}" for layer in range(4) for name in ("up", "down")} <= modules
    named = [time for time in times if time.nodes and time.graph is not None and len(time.modules) == 1]
    assert len({frozenset(time.nodes) for time in named}) == len(named)


@pytest.mark.long
@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_steps_are_those_without_the_pass(dropout):
    """The random numbers of each copy are its own."""
    outlined, plain = (trained(dropout=dropout, skip=skip) for skip in ((), ("outline_layers",)))
    assert [step.report.graphs[0].stages[-1].passes[-1].name for step in (outlined, plain)] == ["outline_layers", "recompute"]
    # Two updates of AdamW move each element by 2e-3: other random numbers would show.
    torch.testing.assert_close(list(outlined.model.parameters()), list(plain.model.parameters()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_call_returns_memory_of_its_own(program):
    """Inductor gives the memory of a result away when that is read, whatever else lies in it."""
    gm, _ = outlined(graph_of(program))
    for call in gm.graph.find_nodes(op="call_function", target=invoke_subgraph):
        results = [storages(result) for result in value(call)]
        assert len(frozenset().union(*results)) == len(results)
        assert not frozenset().union(*results) & storages([value(operand) for operand in call.args[2:]])


def test_what_communicates_or_waits_is_in_no_copy():
    graph, given = fx.Graph(), torch.zeros(ROWS, WIDTH)
    x = graph.placeholder("x")
    calls = [graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0")),
             graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,)),
             graph.call_function(torch.ops.apexfx.own_rows.default, (x, 2, "0")),
             graph.call_function(torch.ops.aten.sin.default, (x,))]
    for node in (x, *calls):
        node.meta["val"] = given
    assert [outline_layers._may_repeat(node) for node in calls] == [False, False, False, True]
