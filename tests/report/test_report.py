"""What a report says: the table, the diff, the ledger, the plan, JSON; and what it says when there is nothing yet."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.infra.pass_base import PassResult

import apexfx
from apexfx import ops
from apexfx.buckets.plan import GradientSpec, plan_buckets
from apexfx.compiler.pipeline import Pipeline
from apexfx.config import BucketConfig
from apexfx.passes.base import Pass
from apexfx.report.cast_ledger import CastLedger
from apexfx.report.data import Report
from apexfx.report.records import GraphReport, stage_from_json, stage_to_json

aten = torch.ops.aten


class Softsign(Pass):
    """Replace every tanh by a softsign.

    Before:  tanh(x)
    After:   x / (1 + abs(x))
    """

    name = "softsign"
    numeric = "reassociates"

    def call(self, gm):
        found = gm.graph.find_nodes(op="call_function", target=aten.tanh.default)
        for node in found:
            with gm.graph.inserting_before(node):
                size = gm.graph.call_function(aten.abs.default, node.args)
                below = gm.graph.call_function(aten.add.Tensor, (size, 1.0))
                new = gm.graph.call_function(aten.div.Tensor, (node.args[0], below))
            for made in (size, below, new):
                made.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            self.record(new, "tanh to softsign")
            gm.graph.erase_node(node)
        return PassResult(gm, bool(found))

    def why_no_match(self, gm):
        return "the graph has no tanh"


class Casts(Pass):
    """Keep a ledger of three casts; change nothing."""

    name = "precision"

    def call(self, gm):
        return PassResult(gm, False)

    def artifacts(self):
        row = {"rule": "half", "reason": "tensor cores", "source_dtype": "f32", "target_dtype": "bf16", "op": "linear",
               "source": "model.py:3"}
        return {"casts": [{**row, "node": f"cast_{i}", "bytes": 1024, "tensor": f"layers.{i}.weight",
                           "module": f"layers.{i}"} for i in range(3)]}


class Cancelled(Casts):
    """Say that two casts were removed, one of them the user's own; change nothing."""

    name = "cancel_casts"

    def artifacts(self):
        inserted = {**super().artifacts()["casts"][1], "removed": "same dtype"}
        own = {**inserted, "node": "to", "rule": "captured", "bytes": 512, "removed": "exact round trip"}
        return {"removed_casts": [inserted, own]}


class Plan(Casts):
    """Carry a bucket plan; change nothing."""

    name = "bucket_allreduce"

    def artifacts(self):
        spec = GradientSpec("weight", (4, 4), torch.float32, torch.float32, torch.device("cpu"))
        return {"plan": plan_buckets([spec], BucketConfig(), 2, "0").to_json()}


def captured(depth=2):
    """Return the graph of `depth` layers, each a product and a tanh."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    weights = [graph.placeholder(f"weight_{i}") for i in range(depth)]
    for i, weight in enumerate(weights):
        x = graph.call_function(aten.tanh.default, (graph.call_function(aten.mm.default, (x, weight)),))
        x.meta["nn_module_stack"] = {"x": (f"layers.{i}", nn.Linear)}
        x.meta["stack_trace"] = '  File "/home/me/model.py", line 12, in forward'
    graph.output((x,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4, device="meta")
    return fx.GraphModule(nn.Module(), graph)


def make_report(*passes, depth=2, ddp=False):
    report = Report({"opt_level": "O2", "ddp": ddp, "sync_bn": True, "inner": "eager", "verify": "auto"})
    report.add(GraphReport(0, False, Pipeline(passes).run("forward", captured(depth))))
    return report


def test_the_table_has_a_row_a_pass():
    text = str(make_report(Softsign(), Casts()))
    title, header, _, *rows = text.splitlines()
    assert title.startswith("apexfx report (O2, sync_bn, inner=eager): 1 graph, 2 pass runs, ")
    assert header.split()[:5] == ["graph", "stage", "pass", "matches", "nodes"]
    assert rows[0].split()[:8] == ["0", "forward", "softsign", "2", "8", "->", "12", "+"]
    assert [row.split() for row in rows[1:4]] == [["+", "2", "aten.add.Tensor"], ["+", "2", "aten.div.Tensor"],
                                                  ["-", "2", "aten.tanh.default"]]
    assert rows[4].split()[:8] == ["0", "forward", "precision", "0", "12", "->", "12", "-"]


def test_forty_eight_layers_print_as_one_line():
    report = make_report(Softsign(), depth=48)
    assert "    48 x layers.{0..47}: tanh to softsign  (model.py:12)" in str(report).splitlines()
    assert str(report.matches("softsign")) == "    48 x layers.{0..47}: tanh to softsign  (model.py:12)"
    assert len(str(report).splitlines()) == len(str(make_report(Softsign())).splitlines())


def test_a_pass_without_matches_warns_below_the_table():
    class Again(Softsign):
        name = "again"

    report = make_report(Softsign(), Again())
    assert "warning: again rewrote nothing: the graph has no tanh" in str(report)
    report.note("apexfx: a remark")
    report.note("apexfx: a remark")
    assert str(report).count("note: a remark") == 1


def test_diff_shows_what_changed_and_nothing_else():
    report = make_report(Softsign(), depth=1)
    diff = report.diff("softsign")
    assert diff.startswith("--- forward graph 0 before softsign\n+++ forward graph 0 after softsign\n@@")
    changed = [line[0] + line[1:].rpartition(" = ")[2].strip() for line in diff.splitlines()[2:] if line[0] in "+-"]
    assert changed == ["-torch.ops.aten.tanh.default(mm_default)", "-return (tanh_default,)",
                       "+torch.ops.aten.abs.default(mm_default)", "+torch.ops.aten.add.Tensor(abs_default, 1.0)",
                       "+torch.ops.aten.div.Tensor(mm_default, add_tensor)", "+return (div_tensor,)"]
    assert "\x1b" not in diff and repr(diff) == diff
    assert report.diff("softsign") == diff, "standard output is no terminal here"
    assert make_report(Casts()).diff("precision") == "precision left the forward graph 0 as it was"


def test_code_of_every_step_is_kept():
    report = make_report(Softsign(), Casts())
    assert "aten.tanh" in report.code(after="captured")
    assert "aten.tanh" not in report.code(after="softsign")
    assert report.code() == report.code(after="precision")
    assert report.code(after="softsign").startswith("# forward graph after softsign (")


def test_ledger_is_rows_and_a_folded_table():
    ledger = make_report(Casts()).casts()
    assert [cast.tensor for cast in ledger] == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
    assert len(ledger) == 3 and ledger[0].rule == "half" and ledger.total_bytes == 3072
    assert ledger.summary == "cast ledger at O2: 3 casts, 3.0 KiB a step"
    summary, header, _, row = str(ledger).splitlines()
    assert row.split() == "3 linear half f32 -> bf16 3.0 KiB layers.{0..2}.weight tensor cores".split()
    both = CastLedger([*ledger, dataclasses.replace(ledger[0], graph=1)], [], "O2")
    assert both.summary == "cast ledger at O2: 4 casts in 2 graphs, 4.0 KiB where each runs once" and "step" not in str(both)


def test_ledger_keeps_what_was_cancelled_apart():
    ledger = make_report(Casts(), Cancelled()).casts()
    assert [cast.node for cast in ledger] == ["cast_0", "cast_2"]
    assert [(cast.node, cast.removed, cast.rule) for cast in ledger.removed] == [
        ("cast_1", "same dtype", "half"), ("to", "exact round trip", "captured")]
    assert ledger.summary == ("cast ledger at O2: 2 casts, 2.0 KiB a step; 2 casts more removed by cancel_casts, "
                              "saving 1.5 KiB a step")
    assert str(make_report(Softsign()).casts()) == "cast ledger at O2: no casts"


def test_buckets_returns_the_plan():
    plan = make_report(Plan(), ddp=True).buckets()
    assert plan.parameters == ("weight",)
    assert "bucket plan: 1 allreduce," in str(plan)
    with pytest.raises(RuntimeError, match="ask for it by ddp=True"):
        make_report(Plan()).buckets()
    with pytest.raises(RuntimeError, match=r"run a training step \(loss.backward\(\)\)"):
        make_report(Casts(), ddp=True).buckets()


def test_json_holds_everything_and_a_stage_survives_it(tmp_path):
    report = make_report(Softsign(), Casts())
    path = tmp_path / "report.json"
    data = report.to_json(path)
    assert json.loads(path.read_text()) == data and data["config"] == report.config
    stage = report.graphs[0].forward
    row = json.loads(json.dumps(stage_to_json(stage)))
    back = stage_from_json(row)
    assert back.from_cache and not stage.from_cache
    assert back.passes[0].added == stage.passes[0].added and back.passes[0].removed == {"aten.tanh.default": 2}
    assert back.passes[0].code == stage.passes[0].code
    again = Report(report.config)
    again.add(GraphReport(0, True, back))
    assert "2 x layers.{0, 1}: tanh to softsign  (model.py:12)" in str(again)
    assert "came from the compile cache" in str(again) and "forward (cached)" in str(again)


def test_before_anything_was_captured_each_says_what_to_do():
    report = Report({"opt_level": "O1"})
    advice = r"call the model once, or model.capture\(\*inputs\)"
    assert "no graph yet; call the model once, or model.capture(*inputs)" in str(report)
    asked = [lambda: report.diff("precision"), report.casts, report.buckets, report.code, lambda: report.matches("x")]
    for ask in asked:
        with pytest.raises(RuntimeError, match=advice):
            ask()
    assert report.to_json()["graphs"] == []


def test_unknown_names_are_refused_with_the_known_ones():
    report = make_report(Softsign())
    with pytest.raises(ValueError, match="no pass 'softsine' ran on graph 0; these did: softsign"):
        report.diff("softsine")
    with pytest.raises(ValueError, match="graph=3 was given; graphs 0 to 0 were captured"):
        report.diff("softsign", graph=3)
    with pytest.raises(ValueError, match="expected 'forward', 'backward' or 'step'"):
        report.code(stage="front")
    with pytest.raises(ValueError, match="these did: softsign"):
        report.code(after="softsine")
    with pytest.raises(ValueError, match="these did: softsign"):
        report.matches("softsine")
    with pytest.raises(RuntimeError, match="no backward stage yet; run a training step"):
        report.code(stage="backward")


def test_a_report_says_where_compiled_ops_are_missing(monkeypatch):
    def notes():
        model = apexfx.transform(nn.Linear(2, 2), opt_level="O0", inner="eager")
        model(torch.ones(1, 2))
        return model.report.notes

    monkeypatch.delenv("APEXFX_EXT", raising=False)
    monkeypatch.setattr(ops, "LIBRARIES", tuple(ops.Library(name, "", False, "not built") for name in ("cpu", "cuda")))
    [note] = notes()
    assert "compiled ops for cpu are not loaded (not built)" in note and "doctor" in note
    monkeypatch.setenv("APEXFX_EXT", "0")  # asked for
    assert not notes()
    monkeypatch.undo()
    monkeypatch.setattr(ops, "LIBRARIES", (ops.Library("cpu", "", True, ""), ops.Library("cuda", "", False, "not built")))
    assert not notes()  # nothing of it is on such a device


def test_a_report_with_infinity_or_of_wrong_types_in_a_file(tmp_path):
    model, path = nn.Linear(4, 4), tmp_path / "report.json"
    step = apexfx.train_step(model, lambda out: out.sum(), torch.optim.SGD(model.parameters(), lr=0.1), inner="eager",
                             max_grad_norm=float("inf"))
    data = step.capture(torch.randn(2, 4)).to_json(path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == json.loads(json.dumps(data, default=str))
    data["graphs"][0]["stages"][0]["ops"][0]["dtype"] = {}
    path.write_text(json.dumps(data, default=str))
    with pytest.raises(ValueError, match="holds a malformed report"):
        type(step.report).load(path)
