"""The recompute pass: the same bits from less memory, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import apexfx
from apexfx.passes.recompute import Recompute
from tests.passes.blocks import Block

WIDTH, ROWS = 64, 1024


class Again(apexfx.Pass):
    """Run the pass once more, which changes nothing."""

    name, stage = "again", "step"

    def call(self, gm):
        result = Recompute()(gm)
        assert not result.modified
        return result


def trained(dropout=0.0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH, dropout) for _ in range(4)))
    step = apexfx.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-3),
                             **{"opt_level": "O0", "inner": "eager", **options})
    for _ in range(3):
        step(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    return step


@pytest.fixture(scope="module")
def plain():
    return trained()


@pytest.fixture(scope="module")
def saving():
    return trained(memory_budget=0, verify="each", passes=[Again()])


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"opt_level": "O2", "dtype": torch.bfloat16}, {"max_grad_norm": 1.0}], ids=str)
def test_the_bits_are_the_same_from_less_memory(options, saving, plain):
    if options:
        saving, plain = trained(memory_budget=0, **options), trained(**options)
    assert len(saving.report.matched("recompute")) >= 3 and not plain.report.matched("recompute")
    torch.testing.assert_close(saving.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    hidden = ROWS * 2 * WIDTH * 4
    assert saving.report.memory().peak <= plain.report.memory().peak - (2 if "opt_level" not in options else 1) * hidden


@pytest.mark.long
def test_under_inductor_it_runs_by_itself():
    saving, plain = trained(inner="inductor"), trained(inner="inductor", skip=["recompute"])
    assert saving.report.matched("recompute")
    assert saving.report.memory().peak < plain.report.memory().peak
    torch.testing.assert_close(saving.model.state_dict(), plain.model.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.long
def test_a_budget_that_cannot_be_met_says_so_once(caplog, saving):
    report = trained(memory_budget=2).report
    assert f"memory_budget=2 was given, and {report.memory().peak} bytes is the least" in report.notes[0]
    assert sum("memory_budget=" in record.getMessage() for record in caplog.records) == 1 and not saving.report.notes


@pytest.mark.long
def test_it_stops_where_the_budget_is_met(saving, plain):
    most, plain = saving.report, plain.report
    some = trained(memory_budget=plain.memory().peak - 1).report
    assert most.memory().peak < some.memory().peak < plain.memory().peak
    assert len(some.matched("recompute")) < len(most.matched("recompute"))


def test_a_copy_stands_in_front_of_its_reader(saving):
    lines = saving.report.code(stage="step").splitlines()
    places = [i for i, line in enumerate(lines) if "aten.gelu.default" in line]
    backward = next(i for i, line in enumerate(lines) if "aten.gelu_backward" in line)
    assert len(places) > 4 and min(places[4:]) > max(places[:4]) and any(place > backward for place in places[4:])
    assert any("gelu" in line and "_again" in line for line in lines)


@pytest.mark.long
def test_what_is_random_stays():
    step = trained(dropout=0.5, memory_budget=0)
    code = step.report.code(stage="step")
    assert code.count("aten.native_dropout.default(") + code.count("aten.bernoulli") + code.count("aten.rand") == 4


@pytest.mark.parametrize("memory_budget", [-1, 1.5, True, "1GB"])
def test_a_budget_is_a_number_of_bytes(memory_budget):
    with pytest.raises(ValueError, match="expected a number of bytes"):
        trained(memory_budget=memory_budget)


def peaked(write):
    """Return a graph in which cos(c) is read in front of a peak and behind it, and c is perhaps written, before or in between."""
    def run(x, y):
        copied = torch.ops.aten.clone.default(x)
        read = torch.ops.aten.view.default(copied, [32, 32]) if write == "through a view" else copied
        if write in ("first", "through a view"):
            torch.ops.aten.add_.Tensor(copied, 3.0)
        early = torch.ops.aten.cos.default(read)
        first = torch.ops.aten.mm.default(early, y)
        big = torch.ops.aten.mm.default(torch.ops.aten.cat.default([first, first, first]), y)
        if write == "input":
            torch.ops.aten.add_.Tensor(x, torch.ops.aten.sum.default(big))
        return torch.ops.aten.mm.default(early, y), torch.ops.aten.sin.default(x)

    return make_fx(run, tracing_mode="fake")(torch.randn(32, 32), torch.randn(32, 32))


@pytest.mark.parametrize("write", ["", "first", "through a view", "input"])
def test_what_reads_a_tensor_that_is_written_stays(write):
    assert Recompute()(peaked(write)).modified == (not write)


def cast(x, y):
    return torch.ops.prims.convert_element_type.default(x, torch.bfloat16)


def channels_last(x, y):
    return torch.ops.aten.clone.default(x, memory_format=torch.channels_last)


@pytest.mark.parametrize(("compute", "costs_time"), [
    (lambda x, y: torch.ops.aten.cos.default(x), False), (torch.ops.aten.add.Tensor, True), (cast, True), (channels_last, True)],
    ids=["cos", "sum", "cast", "layout"])
def test_without_a_budget_what_costs_time_stays(compute, costs_time):
    def run(x, y):
        kept = compute(x, y)
        first = torch.ops.aten.amax.default(kept, [1])
        peak = torch.ops.aten.cumsum.default(torch.ops.aten.cat.default([x, y, y]), 0)
        return peak, torch.ops.aten.amin.default(kept, [1]), first

    for budget in (None, 0):
        gm = make_fx(run, tracing_mode="fake")(torch.randn(8, 8, 3, 3), torch.randn(8, 8, 3, 3))
        assert Recompute(budget=budget)(gm).modified == (budget == 0 or not costs_time)
        assert not Recompute(budget=budget)(gm).modified


def test_what_late_readers_alone_read_is_computed_there():
    def run(x):
        early = torch.ops.aten.mul.Tensor(x, 2.0)
        late = torch.ops.aten.sum.default(torch.ops.aten.exp.default(torch.ops.aten.cat.default([x] * 8)))
        return torch.ops.aten.div.Tensor(torch.ops.aten.add.Tensor(early, late), 3.0)

    x = torch.randn(64, 64)
    gm = make_fx(run, tracing_mode="fake")(x)
    count = len(gm.graph.nodes)
    assert Recompute()(gm).modified and len(gm.graph.nodes) == count and all(n.users for n in gm.graph.nodes if n.op != "output")
    assert [n.name for n in gm.graph.nodes][-4] == "mul_again"
    gm.recompile()
    assert torch.equal(gm(x), run(x))


def test_two_values_of_one_reader_are_computed_again_once():
    """Each of the two would have the other one kept."""
    def run(x):
        return torch.ops.aten.mul.Tensor(torch.ops.aten.cos.default(torch.ops.aten.sin.default(x)),
                                         torch.ops.aten.sin.default(torch.ops.aten.cos.default(x)))

    gm = make_fx(run, tracing_mode="fake")(torch.randn(64, 64))
    Recompute()(gm)
    assert len(gm.graph.nodes) < 16 and not Recompute()(gm).modified


@pytest.mark.long
def test_a_long_row_of_ops_stays():
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            for _ in range(150):
                x = x * 1.001 + 0.01
            return self.linear(x)

    model = Long()
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             memory_budget=0)
    step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    assert not step.report.matched("recompute")
