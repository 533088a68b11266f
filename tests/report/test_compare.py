"""Which graph is which, reports written and read again, what is different between two, and the allreduce of a parameter."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import apexfx
from apexfx._torch import fake_process_group
from apexfx.config import BucketConfig
from apexfx.report import Report
from tests.report.test_ops import net_report


def text(printed):
    return "\n".join(line.rstrip() for line in str(printed).splitlines())


def step_report(width=32, opt_level="O2", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), opt_level=opt_level,
                             inner="eager", **options)
    step(torch.randn(2, 8), torch.randint(4, (2,)))
    return step.report


def test_each_graph_says_which_it_is():
    model = apexfx.transform(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), inner="eager")
    model(torch.randn(4, 8)).sum().backward()
    model(torch.randn(5, 8))
    with torch.no_grad():
        model.eval()(torch.randn(4, 8))
    first, second, third = [graph.identity for graph in model.report.graphs]
    assert first == "train, inputs[0] f32[4,8]"
    assert second.startswith("train, inputs[0] f32[?,8]")  # the size that changed may be any from then on
    assert "; compiled again: tensor 'inputs[0]' size mismatch at index 0. expected 4, actual 5" in second
    assert third.startswith("eval, without gradients, inputs[0] f32[") and "; compiled again: " in third
    lines = str(model.report).splitlines()
    assert [line for line in lines if line.startswith("graph ")][:3] == [f"graph {i}: {graph.identity}"
                                                                         for i, graph in enumerate(model.report.graphs)]


def test_the_reason_is_that_of_the_nearest_graph():
    model = apexfx.transform(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), inner="eager", dynamic=False)
    model(torch.randn(4, 8))
    with torch.no_grad():
        model.eval()(torch.randn(4, 8))
    model.train()(torch.randn(5, 8))
    assert model.report.graphs[2].recompiled == "inputs[0] f32[5,8], was f32[4,8] in graph 0"


@pytest.mark.long
def test_the_reason_is_right_where_inputs_are_in_another_order():
    model = nn.Linear(8, 8)

    def objective(model, x, weights, limit):
        return (model(x).sum(-1).clamp(max=limit) * weights).sum()

    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), 0.1), accumulate=2,
                             opt_level="O0", inner="eager")
    for length, limit in ((6, 0.28), (8, 0.28), (8, 0.24)):  # with an update in front of the third
        step(torch.randn(4, length, 8), torch.randn(4, length), limit)
    first, *_, last = (graph for graph in step.report.graphs if graph.inputs)
    assert len(last.inputs) > len(first.inputs) and last.recompiled == "batch[2] 0.24, was 0.28"


def test_a_graph_says_which_break_it_is_next_to():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x = self.fc(x)
            torch._dynamo.graph_break()
            return x.relu()

    model = apexfx.transform(Broken(), inner="eager")
    model(torch.randn(2, 4))
    first, second = [graph.identity for graph in model.report.graphs]
    assert "next to a graph break: " in first and "test_compare.py:" in first
    assert first.endswith(", in forward: torch._dynamo.graph_break()")
    assert "test_compare.py:" in second and "compiled again" not in second


def test_a_step_says_which_graph_it_is():
    assert step_report().graphs[0].identity == "train, batch[0] f32[2,8], batch[1] i64[2]"


@pytest.mark.long
def test_a_report_that_was_read_answers_as_the_one_that_was_written(tmp_path):
    for report in (net_report(), step_report()):
        report.to_json(tmp_path / "report.json")
        again = Report.load(tmp_path / "report.json")
        assert str(again) == str(report)
        assert str(again.ops()) == str(report.ops()) and str(again.casts()) == str(report.casts())
        assert again.code() == report.code() and len(report.compare(again)) == 0
        assert json.dumps(again.to_json(), default=str) == json.dumps(report.to_json(), default=str)
    assert again.memory().peak == report.memory().peak


@pytest.mark.parametrize("content, message", [
    ({"version": 1}, "holds a report of version 1, which an older apexfx wrote, expected version 4; write it anew"),
    ({"version": 5}, "holds a report of version 5, which a newer apexfx wrote, expected version 4"),
    ({}, "holds no report"), ([], "holds no report"), ({"version": 4}, r"malformed report \(KeyError: 'config'\)"),
    ({"version": 4, "config": {}, "notes": [], "graphs": [{}]}, r"malformed report \(KeyError"),
])
def test_what_is_no_report_of_this_version_is_refused(content, message, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Report.load(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.json' cannot be read \(No such file or directory\); give the path"):
        Report.load(tmp_path / "none.json")
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ValueError, match="report.json is not JSON"):
        Report.load(tmp_path / "report.json")


@pytest.mark.long
def test_two_levels():
    assert_expected_inline(text(net_report().compare(net_report(opt_level="O2"))), """\
20 differences: 1 option, 13 op, 6 casts
        what                                          before                                 after
------  --------------------------------------------  -------------------------------------  --------------------
option  opt_level                                     O1                                     O2
3 x op  train without gradients, blocks.{0..2}.norm:  f32                                    bf16
        layer_norm
3 x op  train without gradients,                      f32                                    bf16
        blocks.{0..2}.mlp.1: gelu
3 x op  train without gradients, blocks.{0..2}: mul   f32 (promoted by blocks.{0..2}.gamma)  bf16
3 x op  train without gradients, blocks.{0..2}: add   f32                                    bf16
op      train without gradients, model: mean          f32                                    bf16
casts   train without gradients                       28, 132.5 KiB a step                   25, 100.8 KiB a step
casts   train without gradients: f32 -> bf16 for      21, 109.9 KiB a step                   -
        torch.linear
casts   train without gradients: bf16 -> f32 for      3, 15.0 KiB a step                     -
        torch.gelu
casts   train without gradients: bf16 -> f32 for      3, 7.5 KiB a step                      -
        operator.mul
casts   train without gradients: f32 -> bf16 for      -                                      23, 99.5 KiB a step
        parameter
casts   train without gradients: f32 -> bf16 for      -                                      1, 1.2 KiB a step
        input""")


@pytest.mark.long
def test_two_widths_of_a_step():
    assert_expected_inline(text(step_report().compare(step_report(64))), """\
6 differences: 2 casts, 4 memory
        what                              before           after
------  --------------------------------  ---------------  -----------------
casts   train                             6, 904 B a step  6, 1.7 KiB a step
casts   train: f32 -> bf16 for parameter  4, 840 B a step  4, 1.6 KiB a step
memory  train, peak                       2.7 KiB          5.3 KiB
memory  train, parameters                 1.6 KiB          3.3 KiB
memory  train, activations                1000 B           1.9 KiB
memory  train, gradients                  840 B            1.6 KiB""")


class Scaled(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(p)) for _ in range(3)))

    def forward(self, x, temperature=1.0):
        return self.layers(x) / temperature


@pytest.mark.long
def test_a_constant_that_changed_is_named_by_its_role():
    def report(p, *temperatures):
        torch.compiler.reset()
        model = apexfx.transform(Scaled(p), inner="eager", dynamic=False)
        for temperature in temperatures:
            model(torch.randn(2, 4), temperature)
        return model.report

    first, second = report(0.1, 1.0), report(0.2, 0.5, 0.25)
    changed = {change.what: (change.before, change.after) for change in first.compare(second) if change.kind == "constant"}
    assert changed == {"train, temperature": ("1.0", "0.5"), **{f"train, layers.{i}.1.p": ("0.1", "0.2") for i in range(3)}}
    assert "3 x constant  train, layers.{0..2}.1.p" in str(first.compare(second))
    assert second.graphs[1].identity.endswith("compiled again: temperature 0.25, was 0.5")


def test_equal_runs_do_not_differ():
    agreed = step_report().compare(step_report())
    assert str(agreed) == "the reports agree: options, graphs, constants, ops, casts, buckets, memory"
    assert len(Report({}).compare(Report({}))) == 0


def test_another_bucket_plan_is_a_change():
    def report(message_size):
        model = apexfx.transform(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), opt_level="O0", inner="eager",
                                 ddp=BucketConfig(message_size=message_size))
        model.capture(torch.randn(2, 8))
        return model.report

    with fake_process_group(2):
        whole, halves = report(1000), report(1)
    assert [change.what for change in whole.compare(halves) if change.kind == "bucket"] == [
        f"train, bucket {index}" for index in range(len(halves.buckets().buckets))]


def test_what_is_no_report_is_refused():
    report = apexfx.transform(nn.Linear(2, 2), inner="eager").capture(torch.randn(1, 2))
    with pytest.raises(TypeError, match=r"compare\('before.json'\) was given, expected a report: .*Report.load\(path\)"):
        report.compare("before.json")
    with pytest.raises(TypeError, match=r"explain\(3\) was asked for, expected the name"):
        report.explain(3)
