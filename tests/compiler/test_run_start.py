"""A run of a step tells, once and in time, that it is about to communicate, and to change something."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from apexfx.compiler.run_start import RunStart


def start():
    told = []
    return told, RunStart(lambda: told.append("communicates"), lambda: told.append("changes"))


def test_code_is_told_of_before_it_runs():
    told, run = start()
    run.tell_before_run()
    assert told == ["communicates", "changes"]


def test_code_that_is_proved_is_told_of_behind_the_proof():
    told, run = start()
    run.awaits_proof = True
    run.tell_before_run()
    assert not told
    run.tell_after_proof()
    run.tell_before_run()
    assert told == ["communicates", "changes"] * 2


def test_code_awaits_its_proof_where_the_ranks_do_not_agree():
    def differ():
        raise ZeroDivisionError

    run = RunStart(differ)
    run.awaits_proof = True
    with pytest.raises(ZeroDivisionError):
        run.tell_after_proof()
    assert run.awaits_proof


def test_a_graph_tells_in_front_of_what_changes_its_inputs():
    told, run = start()
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.zeros(2), torch.zeros(2)
    half = graph.call_function(operator.truediv, (y, 2))
    half.meta["val"] = torch.zeros(2)
    own = graph.call_function(torch.ops.aten.add_.Tensor, (half, 1))
    own.meta["val"] = half.meta["val"]
    written = graph.call_function(torch.ops.aten.add_.Tensor, (x, own))
    written.meta["val"] = x.meta["val"]
    graph.output(written)
    gm = fx.GraphModule(torch.nn.Module(), graph)
    run.tell_in_graph(gm)
    gm.recompile()
    assert [node.name for node in graph.nodes].index("note") == 4  # behind what is written in memory of the graph's own
    run.tell_before_run()
    assert not told
    gm(torch.ones(2), torch.ones(2))
    assert told == ["changes"]
