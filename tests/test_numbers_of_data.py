"""Numbers that are known when the graph runs only: one graph is for all, and what they decide is refused at its line."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import apexfx
from tests.forms import Bank, numbered, squares
from tests.tables import table
from tests.versions import refused_before
from tests.ways import check, updates


def made(way, model):
    """Return what takes a batch, and reports."""
    options = {"opt_level": "O0", "inner": "eager"}
    return apexfx.transform(model, **options) if way == "transform" else apexfx.train_step(
        model, objective=lambda model, batch: model(batch).mean(), optimizer=torch.optim.SGD(model.parameters(), 0.1), **options)


@pytest.mark.parametrize("way", ["transform", "step"])
def test_one_graph_is_for_all_numbers(way):
    run = made(way, Bank(lambda model, h, k: h + model.bank[k] + h[:, k, None]))
    for batch in numbered():
        run(batch)
    assert len(run.report.graphs) == 1


@pytest.mark.parametrize("way", ["transform", "step"])
def test_a_list_of_such_numbers_is_refused_at_its_line(way):
    with refused_before("2.14", RuntimeError, r"apexfx: .*test_numbers_of_data.py:\d+ reads a number"):
        check(way, lambda: Bank(lambda model, h, k: h + model.table[[k, 0]].sum()), squares, numbered(), "O0")


def rows_or_all(model, h, k):
    rows = h[h[:, 0] > 9]
    if n := rows.shape[0]:
        return rows / n
    return h


@pytest.mark.parametrize("fullgraph", [False, True])
def test_transform_refuses_a_branch_on_a_number_that_was_read_at_its_line(fullgraph):
    model = apexfx.transform(Bank(rows_or_all), opt_level="O0", inner="eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match=r"apexfx: a branch, or a shape, .*rows_or_all: if n := rows.shape\[0\]:\n  Use"):
        model(numbered()[0])


class Log:
    last = 0.0


def objective_that_logs(model, x):
    loss = model(x).square().mean()
    kl = loss.detach().abs()
    Log.last = kl.item()
    return loss, {"number": kl.item(), "sum": 2 * float(kl) + int((x > 0).sum()), "large": kl.item() > 0.1,
                  "text": f"{kl.item():.3f}", "array": kl.numpy()}


@table(2, "inner, options", [("eager", {}), ("eager", {"accumulate": 2}), ("inductor", {})])
def test_a_metric_may_be_read_in_the_objective(inner, options):
    model = nn.Linear(4, 2, dtype=torch.float64)
    eager = copy.deepcopy(model)
    step = updates("step", model, objective_that_logs, inner=inner, **options)
    for call in range(4):
        x = torch.randn(3, 4, dtype=torch.float64)
        _, logged = step(x)
        last, (loss, expected) = Log.last, objective_that_logs(eager, x)
        assert list(map(type, logged.values())) == list(map(type, expected.values()))
        assert logged.pop("array") == pytest.approx(expected.pop("array"))
        assert logged == pytest.approx(expected) and last == logged["number"] == pytest.approx(loss.item())
        loss.backward()
        if call % 2 or not options:
            for p in eager.parameters():
                p.data -= 0.1 / options.get("accumulate", 1) * p.grad
                p.grad = None
    torch.testing.assert_close(list(model.parameters()), list(eager.parameters()))
    assert all(graph.recompiled == "" for graph in step.report.graphs)


@pytest.mark.parametrize("way", ["transform", "step"])
def test_a_forward_may_keep_a_number_that_it_reads(way):
    def use(model, h, k):
        model.last = h.detach().abs().mean().item()
        return h * 2

    run = made(way, model := Bank(use))
    for batch in numbered():
        expected = model.layer(batch[0]).abs().mean().item()
        run(batch)
        assert (run if way == "transform" else model).last == pytest.approx(expected)
    assert len(run.report.graphs) == 1
