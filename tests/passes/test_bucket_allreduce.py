"""The bucket_allreduce pass: the graph it writes, every option's effect on the collectives, and replayed plans."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.library import opcheck

from apexfx.buckets.plan import BucketPlan
from apexfx.compiler.pipeline import Pipeline
from apexfx.config import BucketConfig
from apexfx.graph.collectives import is_wait
from apexfx.graph.nodes import value
from apexfx.graph.printing import format_graph
from apexfx.ops.ranks_agreed import waiting
from apexfx.passes.bucket_allreduce import BucketAllreduce
from tests.backward_graphs import record
from tests.passes.bucket_graphs import (
    BF16,
    F32,
    check_local,
    issued,
    local_gradients,
    make_passes,
    multiplications,
    rewritten,
    scaling,
    two_layers,
)
from tests.small_models import Model
from tests.tables import table

pytestmark = pytest.mark.usefixtures("fake_group")


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


def test_the_first_bucket_leaves_when_the_ranks_are_known_to_agree():
    order = []
    waiting["0"] = lambda: order.append("agreed")
    gm = rewritten(two_layers(), torch.randn(4, 5), message_size=20, waits=True).backward[0]
    assert_expected_inline(format_graph(gm, only=r"mm|flatten|all_reduce|agreed|wait"), """\
%1 = aten.mm.default(%tangents_1, %0) -> f32[4,3]
%3 = aten.mm.default(%2, %relu) -> f32[7,3]
%8 = apexfx.flatten_bucket.default([%6, %7], [0, 8], 32, float32) -> f32[32]
%9 = apexfx.ranks_agreed.default(%8, '0')
%10 = _c10d_functional.all_reduce_.default(%8, 'sum', '0') -> f32[32]
%14 = aten.mm.default(%13, %primals_3) -> f32[3,5]
%19 = apexfx.flatten_bucket.default([%17, %18], [0, 4], 20, float32) -> f32[20]
%20 = _c10d_functional.all_reduce_.default(%19, 'sum', '0') -> f32[20]
%21 = _c10d_functional.wait_tensor.default(%10) -> f32[32]
%27 = _c10d_functional.wait_tensor.default(%20) -> f32[20]""")
    assert order == ["agreed"] and not waiting
    opcheck(torch.ops.apexfx.ranks_agreed.default, (torch.ones(3), "0"))


def test_report():
    [stage] = rewritten(two_layers(), torch.randn(4, 5), message_size=20).reports
    [report] = stage.passes
    assert [m.detail for m in report.matches] == ["allreduce of 2 gradients, 128 bytes", "allreduce of 2 gradients, 80 bytes"]
    assert report.warning is None and report.added["_c10d_functional.all_reduce_.default"] == 2
    plan = BucketPlan.from_json(json.loads(json.dumps(report.artifacts.to_json()))["plan"])
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

@table(5, ("options", "expected"), [
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


@pytest.mark.parametrize(("options", "factors", "total"), [
    ({}, [1 / 4], 1 / 4),
    ({"gradient_predivide_factor": 2.0}, [1 / 2, 1 / 2], 1 / 4),
    ({"gradient_average": False}, [], 1.0),
    ({"gradient_average": False, "gradient_predivide_factor": 8.0}, [1 / 8], 1 / 8),
    ({"layout": "ddp"}, [1 / 4], 1 / 4),
])
def test_divisors(options, factors, total):
    model, x = two_layers(), torch.randn(4, 5)
    local = local_gradients(model, x)
    gm = rewritten(model, x, world_size=4, **options).backward[0]
    assert multiplications(gm) == factors
    for p, grad in zip(model.parameters(), local):
        torch.testing.assert_close(p.grad, grad * total)
    names = [n.name for n in gm.graph.nodes]
    wait = next(n for n in gm.graph.nodes if is_wait(n))
    before = sum(names.index(n.name) < names.index(wait.name) for n in scaling(gm))
    assert before == (1 if options.get("layout") == "ddp" or "gradient_predivide_factor" in options else 0)


def test_options_name_everything_the_rewrite_depends_on(tmp_path):
    recorder = rewritten(two_layers(), torch.randn(4, 5), message_size=20)
    plan = recorder.passes[0].plan
    json.dumps(recorder.passes[0].options())
    of_file = []
    for content in (plan, plan.regroup([plan.parameters])):  # the same path
        content.save(tmp_path / "plan.json")
        [pass_] = make_passes(plan=tmp_path / "plan.json")(recorder.passes[0].placeholders)
        of_file.append(pass_.options())
    assert of_file[0] != of_file[1]


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
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


# ---- half precision: what is on the wire, and what is rounded -------------------------------------------------------


def half_compute():
    return Model(lambda m, x: F.linear(x.bfloat16(), m.weight.bfloat16(), m.bias.bfloat16()),
                 weight=nn.Parameter(torch.randn(6, 5)), bias=nn.Parameter(torch.randn(6)))


def test_half_gradients_are_reduced_before_their_upcast():
    recorder = check_local(half_compute(), torch.randn(4, 5))
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


@table(2, ("options", "wire"), [
    ({"allreduce_always_fp32": True}, F32), ({"comm_dtype": F32}, F32), ({"comm_dtype": torch.float64}, torch.float64),
    ({"comm_dtype": BF16}, BF16),
])
def test_dtype_on_the_wire_of_half_gradients(options, wire):
    recorder = check_local(half_compute(), torch.randn(4, 5), **options)
    assert {dtype for dtype, _ in issued(recorder.backward[0])} == {wire}


@pytest.mark.parametrize("options", [{}, {"allreduce_always_fp32": True}, {"comm_dtype": F32}])
def test_a_replayed_plan_decides_in_which_dtype_a_gradient_enters_its_buffer(options):
    model, x = half_compute(), torch.randn(4, 5)
    made = rewritten(model, x, **options)
    torch._dynamo.reset()
    replayed = rewritten(model, x, plan=made.passes[0].plan)
    assert replayed.passes[0].plan == made.passes[0].plan and issued(replayed.backward[0]) == issued(made.backward[0])


@pytest.mark.parametrize(("options", "wire"), [({}, BF16), ({"allreduce_always_fp32": True}, F32)])
def test_half_parameters_get_half_gradients(options, wire):
    model = two_layers().bfloat16()
    recorder = check_local(model, torch.randn(4, 5, dtype=BF16), **options)
    assert {dtype for dtype, _ in issued(recorder.backward[0])} == {wire}


def test_comm_dtype_rounds_once():
    model, x = two_layers(), torch.randn(4, 5)
    local = local_gradients(model, x)
    rewritten(model, x, comm_dtype=BF16, gradient_average=False)
    for p, grad in zip(model.parameters(), local):
        assert torch.equal(p.grad, grad.bfloat16().float())


def test_mixed_dtypes_have_a_bucket_each():
    model = Model(lambda m, x: m.b(m.a(x).bfloat16()), a=nn.Linear(4, 4), b=nn.Linear(4, 4).bfloat16())
    recorder = check_local(model, torch.randn(4, 4))
    assert issued(recorder.backward[0]) == [(BF16, 24), (F32, 20)]
