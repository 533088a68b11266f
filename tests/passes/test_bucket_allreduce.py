"""The bucket_allreduce pass: the graph it writes, every option's effect on the collectives, and the edge cases.

Graphs run on the fake process group, whose allreduce leaves the buffer alone: with `gradient_average=False` the
gradients must come out bitwise as without the pass.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from apexfx.config import BucketConfig
from apexfx.fx import value
from apexfx.invariants import is_wait
from apexfx.passes.bucket_allreduce import BucketAllreduce
from apexfx.pipeline import Pipeline
from apexfx.printing import format_graph
from apexfx.schedule.plan import BucketPlan
from tests.backward_graphs import record

COMM = "all_reduce|wait_tensor"


@pytest.fixture(scope="module", autouse=True)
def _fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def make_passes(world_size=2, **options):
    def make(placeholders):
        return [BucketAllreduce(placeholders=placeholders, config=BucketConfig(**options), group_name="0",
                                world_size=world_size)]
    return make


def rewritten(model, *inputs, loss=None, fullgraph=True, verify="final", **options):
    """Return the recorder of one step through the pass."""
    return record(model, *inputs, make_passes=make_passes(**options), loss=loss, fullgraph=fullgraph, verify=verify)


def issued(gm):
    """Return (dtype, elements) of every allreduce, in order."""
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce_.default)
    return [(value(n).dtype, value(n).numel()) for n in nodes]


def two_layers():
    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 7))


def check_local(model, *inputs, loss=None, num_graphs=1, **options):
    """Assert that a sum over a group that adds nothing gives the local gradients, bitwise and with the same strides."""
    reference = copy.deepcopy(model)
    out = torch.compile(reference, backend="aot_eager")(*inputs)
    (loss or (lambda o: o.float().square().mean()))(out).backward()
    torch._dynamo.reset()
    recorder = rewritten(model, *inputs, loss=loss, gradient_average=False, fullgraph=num_graphs == 1, **options)
    assert len(recorder.backward) == num_graphs
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        assert torch.equal(ours.grad, theirs.grad), name
        assert ours.grad.dtype == theirs.grad.dtype and ours.grad.stride() == theirs.grad.stride(), name
    return recorder


# ---- the graph ------------------------------------------------------------------------------------------------------


def test_start_right_after_the_gradients_and_wait_at_the_end():
    recorder = rewritten(two_layers(), torch.randn(4, 5), message_size=20)
    assert_expected_inline(format_graph(recorder.backward[0], only=r"mm|flatten|all_reduce|wait|mul|split|aten.view|out"), """\
%1 = aten.mm.default(%tangents_1, %0) -> f32[4,3]
%3 = aten.mm.default(%2, %relu) -> f32[7,3]
%6 = aten.view.default(%5, [7]) -> f32[7]
%8 = apexfx.flatten_bucket.default([%6, %7], [0, 8], 32, float32) -> f32[32]
%9 = _c10d_functional.all_reduce_.default(%8, 'sum', '0') -> f32[32]
%13 = aten.mm.default(%12, %primals_3) -> f32[3,5]
%16 = aten.view.default(%15, [3]) -> f32[3]
%18 = apexfx.flatten_bucket.default([%16, %17], [0, 4], 20, float32) -> f32[20]
%19 = _c10d_functional.all_reduce_.default(%18, 'sum', '0') -> f32[20]
%20 = _c10d_functional.wait_tensor.default(%9) -> f32[32]
%21 = aten.mul_.Tensor(%20, 0.5) -> f32[32]
%22 = aten.split_with_sizes.default(%21, [7, 1, 21, 3])
%25 = aten.view.default(%24, [7, 3]) -> f32[7,3]
%26 = _c10d_functional.wait_tensor.default(%19) -> f32[20]
%27 = aten.mul_.Tensor(%26, 0.5) -> f32[20]
%28 = aten.split_with_sizes.default(%27, [3, 1, 15, 1])
%31 = aten.view.default(%30, [3, 5]) -> f32[3,5]
out  [%31, %29, None, %25, %23]""")


def test_report():
    [stage] = rewritten(two_layers(), torch.randn(4, 5), message_size=20).reports
    [report] = stage.passes
    assert [m.detail for m in report.matches] == ["allreduce of 2 gradients, 128 bytes", "allreduce of 2 gradients, 80 bytes"]
    assert report.warning is None and report.added["_c10d_functional.all_reduce_.default"] == 2
    plan = BucketPlan.from_json(json.loads(json.dumps(report.artifacts["plan"])))
    assert [b.parameters for b in plan.buckets] == [("2.bias", "2.weight"), ("0.bias", "0.weight")]
    assert [b.wait_before for b in plan.buckets] == ["output", "output"]
    assert plan.buckets[0].window_flops == 2 * 3 * 4 * 5  # the first layer's weight gradient
    assert plan.buckets[1].window_flops == 0


def test_twice_equals_once():
    recorder = rewritten(two_layers(), torch.randn(4, 5))
    before = format_graph(recorder.backward[0])
    report = Pipeline(recorder.passes).run("backward", recorder.backward[0]).passes[0]
    assert format_graph(recorder.backward[0]) == before
    assert not report.matches and report.warning is None and not report.added


def test_must_not_fire_without_parameter_gradients():
    model = two_layers().requires_grad_(False)
    recorder = rewritten(model, torch.randn(4, 5, requires_grad=True))
    assert not issued(recorder.backward[0])
    assert recorder.reports[0].passes[0].warning == "none of the graph's inputs is a parameter that requires a gradient"


def test_verify_each_compares_with_the_graph_before():
    recorder = rewritten(two_layers(), torch.randn(4, 5))
    fresh = record(two_layers(), torch.randn(4, 5), make_passes=lambda _: [])
    gm, pass_ = fresh.backward[0], recorder.passes[0]
    inputs = [torch.randn(value(p).shape) for p in gm.graph.find_nodes(op="placeholder")]
    Pipeline([pass_], verify="each").run("backward", gm, inputs=lambda: [x.clone() for x in inputs])
    assert len(issued(gm)) == 1


# ---- options --------------------------------------------------------------------------------------------------------

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("options", "expected"), [
    ({}, [(F32, 52)]),
    ({"message_size": 20}, [(F32, 32), (F32, 20)]),
    ({"message_size": 1}, [(F32, 8), (F32, 24), (F32, 4), (F32, 16)]),
    ({"message_size": 1, "delay_allreduce": True}, [(F32, 52)]),
    ({"trigger_params": ("2.bias",)}, [(F32, 8), (F32, 44)]),
    ({"trigger_params": ("0.bias",), "message_size": 1}, [(F32, 36), (F32, 16)]),
    ({"layout": "ddp"}, [(F32, 46)]),
    ({"layout": "ddp", "bucket_cap_mb": 28 * 4 / 2**20}, [(F32, 28), (F32, 18)]),
    ({"comm_dtype": BF16}, [(BF16, 56)]),
    ({"allreduce_always_fp32": True}, [(F32, 52)]),
])
def test_collectives_issued(options, expected):
    assert issued(rewritten(two_layers(), torch.randn(4, 5), **options).backward[0]) == expected


def scaling(gm):
    return [node for node in gm.graph.nodes if node.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor)
            and "apexfx_bucket" in node.meta]


def multiplications(gm):
    return [node.args[1] for node in scaling(gm)]


@pytest.mark.parametrize(("options", "factors", "total"), [
    ({}, [1 / 4], 1 / 4),
    ({"gradient_predivide_factor": 2.0}, [1 / 2, 1 / 2], 1 / 4),
    ({"gradient_average": False}, [], 1.0),
    ({"gradient_average": False, "gradient_predivide_factor": 8.0}, [1 / 8], 1 / 8),
    ({"layout": "ddp"}, [1 / 4], 1 / 4),
])
def test_divisors(options, factors, total):
    model, x = two_layers(), torch.randn(4, 5)
    model(x).square().mean().backward()
    local = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    gm = rewritten(model, x, world_size=4, **options).backward[0]
    assert multiplications(gm) == factors
    for p, grad in zip(model.parameters(), local):
        torch.testing.assert_close(p.grad, grad * total)
    names = [n.name for n in gm.graph.nodes]
    wait = next(n for n in gm.graph.nodes if is_wait(n))
    before = sum(names.index(n.name) < names.index(wait.name) for n in scaling(gm))
    assert before == (1 if options.get("layout") == "ddp" or "gradient_predivide_factor" in options else 0)


def test_delay_allreduce_starts_after_all_of_backward():
    recorder = rewritten(two_layers(), torch.randn(4, 5), delay_allreduce=True)
    text = format_graph(recorder.backward[0], only="mm|all_reduce|wait")
    assert [line.split()[2].split("(")[0] for line in text.splitlines()] == [
        "aten.mm.default", "aten.mm.default", "aten.mm.default", "_c10d_functional.all_reduce_.default",
        "_c10d_functional.wait_tensor.default"]


def test_options_name_everything_the_rewrite_depends_on(tmp_path):
    recorder = rewritten(two_layers(), torch.randn(4, 5), message_size=20)
    plan = recorder.passes[0].plan
    json.dumps(recorder.passes[0].options())
    plan.save(tmp_path / "plan.json")
    ph = recorder.passes[0].placeholders
    of_file = [BucketAllreduce(placeholders=ph, config=BucketConfig(plan=tmp_path / "plan.json"), group_name="0", world_size=2)
               .options()]
    plan.regroup([plan.parameters]).save(tmp_path / "plan.json")
    of_file.append(BucketAllreduce(placeholders=ph, config=BucketConfig(plan=tmp_path / "plan.json"), group_name="0",
                                   world_size=2).options())
    assert of_file[0] != of_file[1]  # the same path, another content


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_a_saved_plan_is_replayed_and_an_edited_one_followed(tmp_path):
    x = torch.randn(4, 5)
    plan = rewritten(two_layers(), x, message_size=20).passes[0].plan
    plan.save(tmp_path / "plan.json")
    replay = rewritten(two_layers(), x, plan=tmp_path / "plan.json")
    assert issued(replay.backward[0]) == [(F32, 32), (F32, 20)] and replay.passes[0].plan == plan
    edited = plan.regroup([["0.weight"], ["2.weight", "0.bias"], ["2.bias"]])
    edited = dataclasses.replace(edited, buckets=tuple(in_float64_without_average(b) for b in edited.buckets))
    gm = check_local(two_layers(), x, plan=edited).backward[0]
    assert issued(gm) == [(torch.float64, 16), (torch.float64, 28), (torch.float64, 8)]


def in_float64_without_average(bucket):
    slots = tuple(dataclasses.replace(slot, offset_bytes=2 * slot.offset_bytes) for slot in bucket.slots)
    return dataclasses.replace(bucket, slots=slots, reduce_dtype=torch.float64, total_bytes=2 * bucket.total_bytes,
                               postdivide=1.0)


def test_buckets_are_issued_in_plan_order_even_when_complete_earlier():
    x = torch.randn(4, 5)
    plan = rewritten(two_layers(), x).passes[0].plan.regroup([["0.bias"], ["2.weight", "2.bias"], ["0.weight"]])
    for start in ("ready", "end"):
        first = dataclasses.replace(plan.buckets[0], start=start)
        gm = rewritten(two_layers(), x, plan=dataclasses.replace(plan, buckets=(first, *plan.buckets[1:]))).backward[0]
        assert issued(gm) == [(F32, 4), (F32, 32), (F32, 16)]
        torch._dynamo.reset()


def test_a_plan_for_another_model_is_refused():
    plan = rewritten(two_layers(), torch.randn(4, 5)).passes[0].plan
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"parameter '2.weight' was given as float32\[9, 3\] .* expects float32\[7, 3\]"):
        rewritten(nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 9)), torch.randn(4, 5), plan=plan)
    with pytest.raises(ValueError, match="divides for 2 ranks and the group has 3"):
        rewritten(two_layers(), torch.randn(4, 5), plan=plan, world_size=3)
    with pytest.raises(TypeError, match="plan=3 .* expected a BucketPlan or the path of one"):
        BucketAllreduce(placeholders=(), config=BucketConfig(plan=3), group_name="0", world_size=2)


# ---- edge cases -----------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(F.relu(self.a(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, x):
        return self.embedding((x.abs() * 3).long()[:, 0] % 9) @ self.embedding.weight.t()


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.b(x)  # in the graph, but not in the loss
        return self.a(x)


class SameGradient(nn.Module):
    """The gradients of p and q are one node, the tangent itself: an input of the backward graph."""

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x + self.p + self.q


class StillNeeded(nn.Module):
    """p's gradient is also read by the rest of backward, after its allreduce has started in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.p, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.b(self.a(x) + self.p) * self.scale


class Expanded(nn.Module):
    """The gradient of a sum is an expanded scalar."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x.sum() + self.p.sum()).reshape(1)


class Mutates(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.a(x))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=False))


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.none = nn.Linear(4, 4), nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.a(x) + self.none.sum()


class ReturnsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x), self.a.bias * 2


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.w).abs()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize(("model", "expected"), [
    (Twice, [(F32, 20)]), (Tied, [(F32, 36)]), (Unused, [(F32, 20)]), (SameGradient, [(F32, 16)]),
    (StillNeeded, [(F32, 60)]), (Expanded, [(F32, 16)]), (Mutates, [(F32, 28)]), (Checkpointed, [(F32, 40)]),
    (Empty, [(F32, 20)]), (Complex, [(F32, 32)]), (Frozen, [(F32, 20)]),
])
@pytest.mark.parametrize("message_size", [1, 10_000_000])
def test_edge_cases_leave_the_local_gradient_bitwise(model, expected, message_size):
    recorder = check_local(model(), torch.randn(4, 4), message_size=message_size)
    collectives = issued(recorder.backward[0])
    assert len({dtype for dtype, _ in collectives}) == 1
    assert sum(numel for _, numel in collectives) == sum(numel for _, numel in expected)
    if message_size > 1:
        assert collectives == expected


def test_a_parameter_that_is_also_an_output():
    check_local(ReturnsParameter(), torch.randn(4, 4), loss=lambda out: out[0].square().mean() + out[1].sum())


def test_the_gradient_shared_by_two_parameters_is_reduced_once_and_never_aliased():
    model = SameGradient()
    plan = check_local(model, torch.randn(4, 4)).passes[0].plan
    assert plan.buckets[0].slots[0].parameter == "p" and plan.buckets[0].slots[0].shared_with == ("q",)
    model.p.grad.zero_()
    assert model.q.grad.abs().sum() > 0


def test_two_graphs_are_reduced_each():
    class Break(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    recorder = check_local(Break(), torch.randn(4, 4), num_graphs=2)
    assert [issued(gm) for gm in recorder.backward] == [[(F32, 20)], [(F32, 20)]]


def test_channels_last_gradients_are_views_of_the_bucket_in_the_parameters_layout():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    check_local(model, torch.randn(2, 3, 8, 8))
    grads = [p.grad for p in model.parameters()]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 1
    assert all(g.data_ptr() % 16 == 0 for g in grads)


class HalfCompute(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


def test_half_gradients_are_reduced_before_their_upcast():
    recorder = check_local(HalfCompute(), torch.randn(4, 5))
    assert issued(recorder.backward[0]) == [(BF16, 40)]  # 6 -> 8 and 30 -> 32: 16 bytes in bfloat16
    text = format_graph(recorder.backward[0], only="mm|flatten|all_reduce|wait|= aten._to_copy|convert|split")
    assert_expected_inline(text, """\
%1 = aten.mm.default(%0, %_to_copy) -> bf16[6,5]
%6 = apexfx.flatten_bucket.default([%4, %5], [0, 8], 40, bfloat16) -> bf16[40]
%7 = _c10d_functional.all_reduce_.default(%6, 'sum', '0') -> bf16[40]
%8 = _c10d_functional.wait_tensor.default(%7) -> bf16[40]
%9 = prims.convert_element_type.default(%8, float32) -> f32[40]
%10 = aten.split_with_sizes.default(%9, [6, 2, 30, 2])""")
    assert recorder.reports[0].passes[0].numeric == "changes_dtype"


@pytest.mark.parametrize(("options", "wire"), [
    ({"allreduce_always_fp32": True}, F32), ({"comm_dtype": F32}, F32), ({"comm_dtype": torch.float64}, torch.float64),
    ({"comm_dtype": BF16}, BF16),
])
def test_dtype_on_the_wire_of_half_gradients(options, wire):
    recorder = check_local(HalfCompute(), torch.randn(4, 5), **options)
    assert {dtype for dtype, _ in issued(recorder.backward[0])} == {wire}


@pytest.mark.parametrize(("options", "wire"), [({}, BF16), ({"allreduce_always_fp32": True}, F32)])
def test_half_parameters_get_half_gradients(options, wire):
    model = two_layers().bfloat16()
    recorder = check_local(model, torch.randn(4, 5, dtype=BF16), **options)
    assert {dtype for dtype, _ in issued(recorder.backward[0])} == {wire}


def test_comm_dtype_rounds_once():
    model, x = two_layers(), torch.randn(4, 5)
    model(x).square().mean().backward()
    local = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    rewritten(model, x, comm_dtype=BF16, gradient_average=False)
    for p, grad in zip(model.parameters(), local):
        assert torch.equal(p.grad, grad.bfloat16().float())


def test_mixed_dtypes_have_a_bucket_each():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()

        def forward(self, x):
            return self.b(self.a(x).bfloat16())

    recorder = check_local(Mixed(), torch.randn(4, 4))
    assert issued(recorder.backward[0]) == [(BF16, 24), (F32, 20)]


def test_a_sparse_gradient_is_refused_by_name():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4, sparse=True)

        def forward(self, x):
            return self.embedding(x)

    with pytest.raises(ValueError, match="parameter 'embedding.weight' has a gradient of layout torch.sparse_coo"):
        rewritten(Sparse(), torch.arange(4))


def test_one_rank_is_bitwise_local():
    model, x = two_layers(), torch.randn(4, 5)
    model(x).square().mean().backward()
    local = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    gm = rewritten(model, x, world_size=1).backward[0]
    assert len(issued(gm)) == 1 and not multiplications(gm)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), local))


def random_model(seed):
    generator = random.Random(seed)
    width, layers = generator.choice([3, 4, 6]), []
    for _ in range(generator.randint(1, 4)):
        layers += [nn.Linear(width, width, bias=generator.random() < 0.7)]
        kind = generator.choice(["norm", "batch", "same", "relu", "none"])
        layers += {"norm": [nn.LayerNorm(width)], "batch": [nn.BatchNorm1d(width)], "same": [layers[0]], "relu": [nn.ReLU()],
                   "none": []}[kind]
    model = nn.Sequential(*layers)
    for p in model.parameters():
        p.requires_grad_(generator.random() < 0.8)
    next(model.parameters()).requires_grad_(True)
    options = {"message_size": generator.choice([1, 10, 40, 1000]), "allreduce_always_fp32": generator.random() < 0.3,
               "delay_allreduce": generator.random() < 0.2}
    return model, torch.randn(5, width), options


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed):
    torch.manual_seed(seed)
    model, x, options = random_model(seed)
    recorder = check_local(model, x, **options)
    plan = recorder.passes[0].plan
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(plan.parameters) == trained
    assert issued(recorder.backward[0]) == [(b.reduce_dtype, b.numel) for b in plan.buckets]
