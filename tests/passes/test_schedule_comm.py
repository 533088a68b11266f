"""The schedule_comm pass: what moves, what must not, and the order that survives Inductor."""

from __future__ import annotations

import copy
import random
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from apexfx.compiler.pipeline import Pipeline
from apexfx.config import BucketConfig
from apexfx.graph.marks import AFTER_BACKWARD
from apexfx.graph.nodes import call
from apexfx.graph.printing import format_graph
from apexfx.passes.bucket_allreduce import BucketAllreduce
from apexfx.passes.schedule_comm import ScheduleComm
from tests.backward_graphs import record
from tests.small_models import Model
from tests.tables import table

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


pytestmark = pytest.mark.usefixtures("fake_group")


def both(**options):
    def make(placeholders):
        return [BucketAllreduce(placeholders=placeholders, config=BucketConfig(**options), group_name="0", world_size=2),
                ScheduleComm()]
    return make


def mlp(depth=3, width=8):
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


class Builder:
    """Writes a small graph by hand, with values."""

    def __init__(self, num_inputs=1):
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.inputs = [self.graph.placeholder(f"x{i}") for i in range(num_inputs)]
        for node in self.inputs:
            with self.mode:
                node.meta["val"] = torch.empty(4)

    def op(self, target, *args, name=None):
        node = call(self.graph, target, args, like=self.inputs[0], mode=self.mode)
        if name:
            node._rename(name)
        return node

    def all_reduce(self, x):
        return self.op(c10d.all_reduce_.default, self.op(aten.clone.default, x), "sum", "0")

    def wait(self, x):
        return self.op(c10d.wait_tensor.default, x)

    def module(self, *outputs):
        self.graph.output(tuple(outputs)).meta["val"] = None
        return fx.GraphModule(nn.Module(), self.graph)


def scheduled(gm):
    """Run the pass; return the ops in order, by short name."""
    Pipeline([ScheduleComm()], verify="final").run("backward", gm)
    return names(gm)


def names(gm):
    return [node.name for node in gm.graph.nodes if node.op == "call_function"]


def test_starts_move_up_and_waits_move_down():
    b = Builder()
    x = b.inputs[0]
    slow = b.op(aten.sin.default, x)
    gradient = b.op(aten.cos.default, x)
    first = b.wait(b.all_reduce(gradient))
    other = b.op(aten.exp.default, slow)
    second = b.wait(b.all_reduce(other))
    rest = b.op(aten.neg.default, slow)
    gm = b.module(first, second, rest)
    assert names(gm) == ["sin_default", "cos_default", "clone_default", "all_reduce__default", "wait_tensor_default",
                         "exp_default", "clone_default_1", "all_reduce__default_1", "wait_tensor_default_1", "neg_default"]
    assert scheduled(gm) == ["cos_default", "clone_default", "all_reduce__default", "sin_default", "exp_default",
                             "clone_default_1", "all_reduce__default_1", "neg_default", "wait_tensor_default",
                             "wait_tensor_default_1"]


def test_delayed_collectives_keep_their_order():
    b = Builder()
    first = b.wait(b.all_reduce(b.inputs[0]))
    delayed = [b.all_reduce(b.op(aten.sin.default, first)), b.all_reduce(b.inputs[0])]
    for node in delayed:
        node.meta[AFTER_BACKWARD] = True
    order = scheduled(b.module(*map(b.wait, delayed)))
    assert [n for n in order if n.startswith("all_reduce")] == [f"all_reduce__default{end}" for end in ("", "_1", "_2")]


def test_a_wait_on_the_critical_path_comes_after_the_work_that_was_there_before_it():
    # As in the backward of a synchronized batch norm: the next gradient depends on a reduced statistic.
    b = Builder()
    x = b.inputs[0]
    early = b.op(aten.sin.default, x)  # a weight gradient, reduced last
    statistic = b.all_reduce(b.op(aten.cos.default, x))
    normal = b.op(aten.mul.Tensor, x, b.wait(statistic))
    recompute = b.op(aten.exp.default, x)  # for later: must not be pulled in front of the wait
    last = b.all_reduce(b.op(aten.add.Tensor, b.op(aten.add.Tensor, normal, recompute), early))
    second = b.all_reduce(b.op(aten.add.Tensor, b.op(aten.neg.default, x), early))
    assert scheduled(b.module(b.wait(last), b.wait(second))) == [
        "cos_default", "clone_default", "all_reduce__default", "sin_default", "exp_default", "wait_tensor_default",
        "mul_tensor", "add_tensor", "add_tensor_1", "clone_default_1", "all_reduce__default_1",
        "neg_default", "add_tensor_2", "clone_default_2", "all_reduce__default_2",
        "wait_tensor_default_1", "wait_tensor_default_2"]


def test_nothing_crosses_a_mutation():
    b = Builder(2)
    x, buffer = b.inputs
    before = b.op(aten.sin.default, buffer)
    b.op(aten.copy_.default, buffer, x)
    after = b.op(aten.cos.default, buffer)
    reduced = b.all_reduce(after)
    gm = b.module(b.wait(reduced), before)
    assert scheduled(gm) == ["sin_default", "copy__default", "cos_default", "clone_default", "all_reduce__default",
                             "wait_tensor_default"]


def test_an_allreduce_into_a_tensor_that_others_read_comes_behind_them():
    b = Builder()
    shared = b.op(aten.clone.default, b.inputs[0])
    slow = b.op(aten.sin.default, b.inputs[0])
    before = b.op(aten.neg.default, shared)
    started = b.op(c10d.all_reduce_.default, shared, "sum", "0")
    assert scheduled(b.module(b.wait(started), before, slow)) == [
        "clone_default", "neg_default", "all_reduce__default", "sin_default", "wait_tensor_default"]


def test_random_draws_keep_their_order():
    b = Builder()
    late = b.op(aten.rand_like.default, b.inputs[0])
    urgent = b.op(aten.rand_like.default, b.inputs[0])
    gm = b.module(b.wait(b.all_reduce(urgent)), late)
    assert scheduled(gm)[:2] == ["rand_like_default", "rand_like_default_1"]


def test_must_not_fire_without_collectives():
    recorder = record(mlp(), torch.randn(4, 8), make_passes=lambda _: [ScheduleComm()])
    [report] = recorder.reports[0].passes
    assert not report.matches and report.warning is None and recorder.reports[0].windows == []


def test_a_weight_gradient_is_reduced_before_the_next_layer_starts():
    gm = record(mlp(), torch.randn(4, 8), make_passes=both(message_size=72)).backward[0]
    assert_expected_inline(format_graph(gm, only="mm|sum|all_reduce|wait"), """\
%3 = aten.mm.default(%2, %relu_1) -> f32[8,8]
%5 = aten.sum.dim_IntList(%1, [0], True) -> f32[1,8]
%9 = _c10d_functional.all_reduce_.default(%8, 'sum', '0') -> f32[72]
%11 = aten.mm.default(%1, %10) -> f32[4,8]
%15 = aten.mm.default(%14, %relu) -> f32[8,8]
%17 = aten.sum.dim_IntList(%13, [0], True) -> f32[1,8]
%21 = _c10d_functional.all_reduce_.default(%20, 'sum', '0') -> f32[72]
%23 = aten.mm.default(%13, %22) -> f32[4,8]
%27 = aten.mm.default(%26, %primals_3) -> f32[8,8]
%29 = aten.sum.dim_IntList(%25, [0], True) -> f32[1,8]
%33 = _c10d_functional.all_reduce_.default(%32, 'sum', '0') -> f32[72]
%34 = _c10d_functional.wait_tensor.default(%9) -> f32[72]
%40 = _c10d_functional.wait_tensor.default(%21) -> f32[72]
%46 = _c10d_functional.wait_tensor.default(%33) -> f32[72]""")


def test_report():
    recorder = record(mlp(), torch.randn(4, 8), make_passes=both(message_size=72))
    report, rows = recorder.reports[0].passes[1], recorder.reports[0].windows
    product = 2 * 4 * 8 * 8  # one of the five matrix products; the first layer has no input gradient
    assert [(row.bucket, row.flops) for row in rows] == [(0, 4 * product), (1, 2 * product), (2, 0)]
    assert len(report.matches) == 3 and "flops between start and wait" in report.matches[0].detail


def test_delayed_buckets_stay_at_the_end():
    gm = record(mlp(), torch.randn(4, 8), make_passes=both(message_size=72, delay_allreduce=True)).backward[0]
    kinds = [line.split("aten.")[-1][:2] if "aten.mm" in line else "AR" if "all_reduce" in line else "W"
             for line in format_graph(gm, only=r"aten.mm|all_reduce|wait").splitlines()]
    assert kinds == ["mm"] * 5 + ["AR", "W"]


def test_dropout_under_activation_checkpointing_keeps_its_gradients():
    def forward(m, x):
        for layer in (m.a, m.b):
            x = checkpoint(lambda y, layer=layer: m.dropout(torch.tanh(layer(y))), x, use_reentrant=False)
        return x

    model, x = Model(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), dropout=nn.Dropout(0.5)), torch.randn(16, 8)
    reference = copy.deepcopy(model)
    torch.manual_seed(5)
    torch.compile(reference, backend="aot_eager")(x).square().mean().backward()
    torch._dynamo.reset()
    torch.manual_seed(5)
    record(model, x, make_passes=both(message_size=8, gradient_average=False), loss=lambda out: out.square().mean())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters()))


def random_graph(seed):
    """Return a random graph with collectives, waits in odd places and an in-place epilogue."""
    generator = random.Random(seed)
    b = Builder(3)
    values, started = list(b.inputs[:2]), []
    for _ in range(generator.randint(5, 60)):
        kind = generator.random()
        if kind < 0.15:
            started.append(b.all_reduce(generator.choice(values)))
        elif kind < 0.3 and started:
            values.append(b.wait(started.pop(generator.randrange(len(started)))))
        elif kind < 0.34:
            b.op(aten.copy_.default, b.inputs[2], generator.choice(values))
            values.append(b.op(aten.neg.default, b.inputs[2]))
        else:
            values.append(b.op(generator.choice([aten.add.Tensor, aten.mul.Tensor]), *generator.choices(values[-6:], k=2)))
    return b.module(*values[-3:], *(b.wait(node) for node in started))


@table(20, "seed", range(60))
def test_random_graphs_compute_the_same_and_keep_every_order_that_matters(seed):
    gm = random_graph(seed)
    inputs = [torch.randn(4) for _ in range(3)]
    expected = gm(*(x.clone() for x in inputs))
    before = names(gm)
    order = scheduled(gm)
    gm.recompile()
    assert sorted(order) == sorted(before)
    for actual, wanted in zip(gm(*(x.clone() for x in inputs)), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    for kind in ("all_reduce", "copy_"):
        assert [n for n in order if n.startswith(kind)] == [n for n in before if n.startswith(kind)]
    assert scheduled(gm) == order


@pytest.mark.long
def test_work_is_linear_in_the_number_of_nodes():
    def steps(depth):
        b = Builder()
        x = b.inputs[0]
        results = []
        for _ in range(depth):
            x = b.op(aten.sin.default, x)
            results.append(b.wait(b.all_reduce(b.op(aten.cos.default, x))))
        gm = b.module(*results)
        count = 0

        def trace(frame, event, _):
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            ScheduleComm().call(gm)
        finally:
            sys.settrace(before)
        return count

    assert steps(400) <= 5 * steps(100)  # four times the nodes
