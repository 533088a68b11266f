"""What is indexed by a number that is known when the graph runs only, a tensor of no dimension or what was read of one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import apexfx
from tests.tables import table
from tests.versions import refused_before
from tests.ways import WAYS, check, updates


class Bank(nn.Module):
    """A layer, a buffer and a table that `use(model, h, k)` indexes by `k`, a number of the batch."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.table, self.use = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4)), use
        self.register_buffer("bank", torch.zeros(5, 4))

    def forward(self, batch):
        return self.use(self, self.layer(batch[0]), batch[1])


def squares(out, batch):
    return out.float().pow(2).mean()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 4, generator=generator), torch.tensor(k)) for k in (1, 2, 0, 2)]


def writes(place):
    def use(model, h, k):
        with torch.no_grad():
            place(model, h.float(), k)
        return h + model.bank.sum(0)

    return use


def bank_of_mean(index):
    return writes(lambda model, h, k: model.bank.__setitem__(index(k), h.mean(0)))


def adds_to_zeros(model, h, k):
    out = h.new_zeros(5, 4)
    out[k] += h.sum(0)
    return h * out.sum(0)


def adds_to_one_column(model, h, k):
    out = h.new_zeros(3, 4)
    out[:, k] += h[:, 0]
    return h * out


def adds_through_a_view(model, h, k):
    row = model.bank[k]
    row += h.mean(0)


def fills(model, h, k):
    model.bank[k] += 1.0
    model.bank[k, 1:] = 0.5
    model.bank[k][0] = 2.0


READS = {
    "a row": lambda model, h, k: h + model.bank[k] + model.table[k],
    "a row behind the end": lambda model, h, k: h + model.table[k - 3] * model.table[-k],
    "the largest": lambda model, h, k: h + model.table[h.sum(1).argmax()],
    "a column": lambda model, h, k: h[:, k] * 2,
    "a column of dots": lambda model, h, k: h[..., k, None] * h[k, ..., :2] * h[None, k, ..., k],
    "an element": lambda model, h, k: h * model.table[k, k],
    "a part of a row": lambda model, h, k: h * model.table[k, :2].sum() * model.table[k][1:].sum(),
    "a row of columns": lambda model, h, k: h * model.table[k, torch.tensor([0, 2, 3, 1])],
    "columns of a row": lambda model, h, k: h * model.table[None, torch.tensor([0, 2, 3]), k].sum(),
    "a mask and a number": lambda model, h, k: h * model.table[torch.arange(5) > 2, k].sum(),
    "a mask of two and a number": lambda model, h, k: h * h[..., None].expand(3, 4, 3)[torch.ones(3, 4) > 0, k].sum(),
    "int32 and int16": lambda model, h, k: h * model.table[k.int()] * model.table[k.short()],
    "what was read": lambda model, h, k: h * model.table[k.item()] * h[:, int(k), None] * model.table[k.item() - 3, 0],
    "a slice": lambda model, h, k: h * model.table[k:k + 1].sum(0) * h[:, :k].sum(),
}
WRITES = {
    "a row": bank_of_mean(lambda k: k),
    "a row behind the end": bank_of_mean(lambda k: k - 4),
    "a row of one": bank_of_mean(lambda k: (k, ...)),
    "a slice of one": bank_of_mean(lambda k: slice(k, k + 1)),
    "what was read": bank_of_mean(lambda k: k.item()),
    "an element": writes(lambda model, h, k: model.bank.__setitem__((k, int(k)), h.sum())),
    "a part of a row": writes(lambda model, h, k: model.bank.__setitem__((k, slice(1, 3)), h.mean(0)[:2])),
    "a column": writes(lambda model, h, k: model.bank.__setitem__((slice(None), k), h.sum())),
    "through a view": writes(adds_through_a_view),
    "several times": writes(fills),
    "added to zeros": adds_to_zeros,
    "added to one column": adds_to_one_column,
}
FORMS = {**{f"reads {name}": use for name, use in READS.items()}, **{f"writes {name}": use for name, use in WRITES.items()}}
CASES = [(form, way, level) for form in FORMS for way in WAYS for level in ("O0", "O1", "O2")]


@table(5, "form, way, level", CASES)
def test_an_index_that_is_a_number_of_the_batch(form, way, level):
    check(way, lambda: Bank(FORMS[form]), squares, batches(), level)


@pytest.mark.long
@pytest.mark.parametrize("way", ["transform", "step"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "writes several times"])  # at which Inductor (2.13) fails
def test_inductor_indexes_so_too(form, way):
    check(way, lambda: Bank(FORMS[form]), squares, batches(), "O0", inner="inductor")


@pytest.mark.parametrize("way", ["transform", "step"])
def test_one_graph_is_for_all_numbers(way):
    torch.manual_seed(0)
    model = Bank(lambda model, h, k: h + model.bank[k] + h[:, k, None])
    options = {"opt_level": "O0", "inner": "eager"}
    made = apexfx.transform(model, **options) if way == "transform" else apexfx.train_step(
        model, objective=lambda model, *batch: model(batch).mean(), optimizer=torch.optim.SGD(model.parameters(), 0.1), **options)
    for batch in batches():
        made(batch) if way == "transform" else made(*batch)
    assert len(made.report.graphs) == 1


@pytest.mark.parametrize("way", ["transform", "step"])
def test_a_list_of_such_numbers_is_refused_at_its_line(way):
    with refused_before("2.14", RuntimeError, r"apexfx: .*test_numbers_of_data.py:\d+ reads a number"):
        check(way, lambda: Bank(lambda model, h, k: h + model.table[[k, 0]].sum()), squares, batches(), "O0")


def rows_or_all(model, h, k):
    rows = h[h[:, 0] > 9]
    if n := rows.shape[0]:
        return rows / n
    return h


@pytest.mark.parametrize("fullgraph", [False, True])
def test_transform_refuses_a_branch_on_a_number_that_was_read_at_its_line(fullgraph):
    model = apexfx.transform(Bank(rows_or_all), opt_level="O0", inner="eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match=r"apexfx: a branch, or a shape, .*rows_or_all: if n := rows.shape\[0\]:\n  Use"):
        model(batches()[0])


class Log:
    last = 0.0


def objective_that_logs(model, x):
    loss = model(x).square().mean()
    kl = loss.detach().abs()
    Log.last = kl.item()
    return loss, {"number": kl.item(), "sum": 2 * float(kl) + int((x > 0).sum()), "large": kl.item() > 0.1,
                  "text": f"{kl.item():.3f}", "array": kl.numpy()}


@pytest.mark.parametrize("inner, options", [("eager", {}), ("eager", {"accumulate": 2}), ("inductor", {})])
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

    torch.manual_seed(0)
    model = Bank(use)
    options = {"opt_level": "O0", "inner": "eager"}
    made = apexfx.transform(model, **options) if way == "transform" else apexfx.train_step(
        model, objective=lambda model, *batch: model(batch).mean(), optimizer=torch.optim.SGD(model.parameters(), 0.1), **options)
    for batch in batches():
        expected = model.layer(batch[0]).abs().mean().item()
        made(batch) if way == "transform" else made(*batch)
        assert (made if way == "transform" else model).last == pytest.approx(expected)
    assert len(made.report.graphs) == 1
