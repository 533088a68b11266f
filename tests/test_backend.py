"""torch.compile(backend="apex"): which graphs share a report, for as long as the compiled model lives."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import apexfx
from tests.backward_graphs import TwoGraphs
from tests.tables import table

OPTIONS = {"opt_level": "O0", "inner": "eager"}


@pytest.mark.long
def test_graphs_of_one_model_share_a_report_without_options():
    torch.compile(TwoGraphs(), backend="apex")(torch.randn(2, 4))
    assert len(apexfx.last_report().graphs) == 2


def test_graphs_of_a_model_in_the_wrapper_of_torch_share_a_report():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compiled = torch.compile(nn.Linear(4, 2), backend="apex", options={"opt_level": "O0", "inner": "eager"})
        model, x = nn.parallel.DistributedDataParallel(compiled), torch.randn(3, 4)
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            model(x)
        assert [graph.identity.partition(",")[0] for graph in apexfx.last_report().graphs] == ["train", "eval"]
    finally:
        dist.destroy_process_group()


def test_nothing_outlives_the_compiled_model():
    torch.compile(nn.Linear(3, 2), backend="apex", options=dict(OPTIONS))(torch.randn(2, 3))
    report = weakref.ref(apexfx.last_report())
    torch.compile(nn.Linear(4, 2), backend="apex", options=dict(OPTIONS))(torch.randn(2, 4))  # is the last one now
    torch._dynamo.reset()
    gc.collect()
    assert report() is None


def test_a_compiled_model_that_has_run_is_copied_and_saved():
    model, x = torch.compile(nn.Linear(3, 2), backend="apex", options=dict(OPTIONS)), torch.randn(2, 3)
    before = model(x)
    report = apexfx.last_report()
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch._dynamo.reset()
        assert torch.equal(other(x), before) and apexfx.last_report() is not report and len(report.graphs) == 1


class Recurrent(nn.Module):
    """An LSTM in a module of its own; `first` leaves the graph before it empty."""

    def __init__(self, first):
        super().__init__()
        self.before, self.inner, self.head = nn.Identity() if first else nn.Linear(4, 4), Inner(), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.inner(self.before(x)))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 5)

    def forward(self, x):
        return self.layer(x)[0]


@table(1, "first", [True, False])
@pytest.mark.parametrize(("options", "warns"), [
    ({"opt_level": "O1"}, True), ({"precision": {"head": "bfloat16"}}, True), ({}, False),
])  # fmt: skip
def test_a_graph_break_is_noted_with_its_place_and_warned_of_where_it_loses_something(options, warns, first, caplog):
    torch.compiler.reset()
    torch.compile(Recurrent(first), backend="eager")(torch.randn(3, 2, 4))  # its break is no matter of the others
    compiled = torch.compile(Recurrent(first), backend="apex", options=OPTIONS | options)
    torch.compile(nn.Linear(4, 2), backend="apex", options=dict(OPTIONS))(torch.randn(3, 4))
    assert not apexfx.last_report().notes
    for length in (3, 4):
        compiled(torch.randn(length, 2, 4))
    line = Inner.forward.__code__.co_firstlineno + 1
    [note] = apexfx.last_report().notes
    assert f"test_backend.py:{line}, in forward: return self.layer(x)[0]. What runs between" in note
    assert "apexfx.transform() holds torch.nn.LSTM" in note
    logged = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "apexfx.report.data"]
    assert logged == [note] * warns
