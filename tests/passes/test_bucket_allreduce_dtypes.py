"""The bucket_allreduce pass and half precision: which dtype is on the wire, and what it rounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from apexfx.graph.printing import format_graph
from tests.passes.bucket_graphs import BF16, F32, check_local, issued, local_gradients, rewritten, two_layers

pytestmark = pytest.mark.usefixtures("fake_group")


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


@pytest.mark.parametrize("options", [{}, {"allreduce_always_fp32": True}, {"comm_dtype": F32}])
def test_a_replayed_plan_decides_in_which_dtype_a_gradient_enters_its_buffer(options):
    model, x = HalfCompute(), torch.randn(4, 5)
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
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()

        def forward(self, x):
            return self.b(self.a(x).bfloat16())

    recorder = check_local(Mixed(), torch.randn(4, 4))
    assert issued(recorder.backward[0]) == [(BF16, 24), (F32, 20)]
