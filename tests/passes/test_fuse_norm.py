"""fuse_norm: the printed graph, every spelling it finds, what it must leave alone, and numbers."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.utils.checkpoint import checkpoint

from apexfx.graph.printing import format_graph
from apexfx.passes.cancel_casts import CancelCasts
from apexfx.passes.fuse_norm import FuseNorm
from apexfx.passes.measured_speedups import LEAST_ELEMENTS, RATIO
from apexfx.testing import assert_close
from tests.forward_graphs import compiled, precision
from tests.passes.norm_graphs import EVERYWHERE, draw, fused, llama, measured, needs_kernel, rewrite
from tests.tables import table


def t5(x, weight, eps=1e-6):
    """transformers' T5LayerNorm."""
    x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        x = x.to(weight.dtype)
    return weight * x


def meta_llama(x, weight, eps=1e-6):
    """Meta's own."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).type_as(x) * weight


def gemma(x, weight, eps=1e-6):
    """Squares by multiplication, factors in the other order."""
    wide = x.float()
    return torch.rsqrt(eps + torch.mean(wide * wide, dim=-1, keepdim=True)).mul(wide).to(x.dtype).mul(weight)


WRITTEN = [llama, t5, meta_llama, gemma]


@needs_kernel
class TestPrinted(TestCase):
    def test_llama(self):
        _, gm, _ = rewrite(llama, draw(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16))
        self.assertExpectedInline(format_graph(gm), """\
in   %x: bf16[2,8]
in   %weight: bf16[8]
%0 = apexfx.rms_norm.default(%x, %weight, 1, 1e-06)
%1 = operator.getitem(%0, 0) -> bf16[2,8]
out  [%1]""")

    def test_layer_norm(self):
        _, gm, _ = rewrite(lambda x, w, b: F.layer_norm(x, (8,), w, b).relu(), draw(2, 8), torch.ones(8), torch.zeros(8))
        self.assertExpectedInline(format_graph(gm), """\
in   %x: f32[2,8]
in   %w: f32[8]
in   %b: f32[8]
%0 = apexfx.layer_norm.default(%x, %w, %b, 1, 1e-05)
%1 = operator.getitem(%0, 0) -> f32[2,8]
%2 = relu(%1) -> f32[2,8]
out  [%2]""")


    def test_a_residual_add_in_front(self):
        def block(x, r, w):
            total = x + r
            return F.layer_norm(total, (8,), w), total * 2

        _, gm, _ = rewrite(block, draw(2, 8), draw(2, 8), torch.ones(8))
        self.assertExpectedInline(format_graph(gm), """\
in   %x: f32[2,8]
in   %r: f32[2,8]
in   %w: f32[8]
%0 = apexfx.add_layer_norm.default(%x, %r, %w, None, 1, 1e-05)
%1 = operator.getitem(%0, 0) -> f32[2,8]
%2 = operator.getitem(%0, 1) -> f32[2,8]
%3 = operator.mul(%2, 2) -> f32[2,8]
out  [%1, %3]""")


def only_the_norm_uses_it(norm, x, r):
    return norm(x + r)


def used_after_it_too(norm, x, r):
    total = torch.add(x, r)
    return norm(total).sin() + total


def added_twice(norm, x, r):  # the second norm reads the first one's sum
    total = x + r
    h = norm(total)
    return norm(total + h) + total


RESIDUAL_NORMS = {
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w, 1e-6),
    "written_rms_norm": llama,
}


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", RESIDUAL_NORMS)
@pytest.mark.parametrize("block", [only_the_norm_uses_it, used_after_it_too, added_twice])
def test_the_residual_add_goes_into_the_op_with_the_same_values_and_gradients(block, norm, dtype):
    inputs = [t.requires_grad_() for t in (draw(3, 5, 8, dtype=dtype), draw(3, 5, 8, dtype=dtype).flip(0), draw(8, dtype=dtype))]

    def function(x, r, w):
        return block(lambda t: RESIDUAL_NORMS[norm](t, w), x, r)

    pass_, gm, y = rewrite(function, *inputs)
    op = f"apexfx.add_{norm.removeprefix('written_')}.default"
    assert fused(gm) == [op] * (2 if block is added_twice else 1)
    assert {match.detail.split()[0] for match in pass_.matches} == {f"add_{norm}"}
    assert not any(n.target in (operator.add, torch.add) and n.args[0] is n.graph.find_nodes(op="placeholder")[0]
                   for n in gm.graph.nodes)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected, grad = function(*wide), draw(3, 5, 8)
    scale = 1 if dtype is torch.float32 else 4  # the sum is rounded too
    assert_close(y, expected, scale=scale)
    got, want = torch.autograd.grad(y, inputs, grad.to(y.dtype)), torch.autograd.grad(expected, wide, grad.double())
    for value, oracle in zip(got, want):
        assert_close(value, oracle, scale=4 * scale)


def used_before_the_norm(x, r, w):
    total = x + r
    h = total.sin()
    return F.layer_norm(total, (8,), w * h.mean()), h


def broadcast(x, r, w):
    return F.layer_norm(x + r[:1], (8,), w)


def two_dtypes(x, r, w):
    return F.layer_norm(x + r.bfloat16(), (8,), w)


def scaled(x, r, w):
    return F.layer_norm(torch.add(x, r, alpha=2), (8,), w)


def a_number(x, r, w):
    return F.layer_norm(x + 1.0, (8,), w)


def written_after_the_add(x, r, w):
    x = x.clone()
    total = x + r
    x.mul_(2)
    return F.layer_norm(total, (8,), w), x


def added_without_gradient(x, r, w):
    with torch.no_grad():
        total = x + r
    return F.layer_norm(total, (8,), w)


def not_contiguous_sum(x, r, w):  # as a view of it relies on
    total = x.t() + r.t()
    return F.layer_norm(total, (8,), w), total.t().view(-1)


@needs_kernel
@pytest.mark.parametrize("function", [used_before_the_norm, broadcast, two_dtypes, scaled, a_number, written_after_the_add,
                                      added_without_gradient, not_contiguous_sum])
def test_an_add_that_is_not_the_ops_stays(function):
    inputs = [draw(8, 8).requires_grad_(), draw(8, 8).flip(0).requires_grad_(), draw(8).requires_grad_()]
    _, gm, got = rewrite(function, *inputs)
    assert [name for name in fused(gm) if "add" in name] == []
    want = function(*inputs)
    for a, b in zip(*((o if isinstance(o, tuple) else (o,)) for o in (got, want))):
        assert_close(a, b)
    got, want = (torch.autograd.grad(sum(t.sum() for t in (o if isinstance(o, tuple) else (o,))), inputs, allow_unused=True)
                 for o in (got, want))
    for a, b in zip(got, want):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_where_only_the_norm_was_measured_faster_the_add_stays():
    ratios = {key: value for key, value in EVERYWHERE.items() if not key[0].startswith("add_")}
    _, gm, _ = rewrite(lambda x, r: F.layer_norm(x + r, (8,)), draw(3, 8), draw(3, 8), ratios=ratios)
    assert fused(gm) == ["apexfx.layer_norm.default"]


@needs_kernel
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("written", WRITTEN)
def test_written_rms_norm_is_one_op_with_the_same_values_and_gradients(written, dtype, parameters):
    inputs = [draw(3, 5, 8, dtype=dtype).requires_grad_(), (draw(8).abs() + 0.5).to(parameters).requires_grad_()]
    pass_, gm, y = rewrite(written, *inputs)
    assert fused(gm) == ["apexfx.rms_norm.default"]
    assert len(gm.graph.find_nodes(op="call_method")) == 0
    assert y.dtype == written(*inputs).dtype and len(pass_.matches) == 1
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = F.rms_norm(wide[0], (8,), wide[1], 1e-6)
    grad = draw(3, 5, 8)
    assert_close(y, expected)
    got, want = torch.autograd.grad(y, inputs, grad.to(y.dtype)), torch.autograd.grad(expected, wide, grad.double())
    for value, oracle in zip(got, want):
        low = max((value.dtype, y.dtype), key=lambda d: torch.finfo(d).eps)  # the gradient passes through y's dtype
        assert_close(value, oracle, dtype=low, scale=4)


@needs_kernel
@pytest.mark.parametrize(
    "norm, op",
    [
        (nn.LayerNorm(8), "layer_norm"),
        (nn.LayerNorm((5, 8), eps=1e-3), "layer_norm"),
        (nn.LayerNorm(8, bias=False), "layer_norm"),
        (nn.LayerNorm(8, elementwise_affine=False), "layer_norm"),
        (nn.RMSNorm(8), "rms_norm"),
        (nn.RMSNorm((5, 8), eps=1e-3, elementwise_affine=False), "rms_norm"),
    ],
    ids=str,
)
def test_torch_norms(norm, op):
    x = draw(3, 5, 8)
    pass_, gm, y = rewrite(norm, x)
    assert fused(gm) == [f"apexfx.{op}.default"]
    assert_close(y, norm(x))
    assert pass_.matches[0].detail.startswith(f"{op} -> apexfx.{op}")


@pytest.mark.long
@needs_kernel
def test_transformers_modules():
    llama_module = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(8)
    t5_module = pytest.importorskip("transformers.models.t5.modeling_t5").T5LayerNorm(8)
    for module in (llama_module, t5_module):
        _, gm, y = rewrite(module, draw(3, 8))
        assert fused(gm) == ["apexfx.rms_norm.default"]
        assert_close(y, module(draw(3, 8)))


@needs_kernel
def test_inside_an_activation_checkpoint_and_with_a_dynamic_batch():
    norm = nn.LayerNorm(8)
    model = torch.nn.Sequential(nn.Linear(8, 8), norm)
    x = draw(3, 8)
    _, gm, y = rewrite(lambda x: checkpoint(model, x, use_reentrant=False), x)
    assert fused(gm) == ["apexfx.layer_norm.default"]
    assert_close(y, model(x))
    torch._dynamo.mark_dynamic(x, 0)
    _, gm, y = rewrite(model, x)
    assert fused(gm) == ["apexfx.layer_norm.default"]


@needs_kernel
def test_under_ambient_autocast_the_dtypes_are_those_captured():
    linear, norm, x = nn.Linear(8, 8), nn.LayerNorm(8), draw(3, 8)
    model = nn.Sequential(linear, norm)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    _, gm, y = rewrite(model, x, autocast=torch.bfloat16)
    assert y.dtype == expected.dtype
    assert_close(y, expected, dtype=torch.bfloat16)


def uses_the_mean(x, w):  # subtracts a mean: not an RMS norm
    h = x - x.mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))


def other_dim(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6))


def fourth_power(x, w):
    return w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6))


def other_input(x, w):
    return w * (x.relu() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def half_statistics(x, w):
    x = x.bfloat16()
    return w.bfloat16() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def written_in_between(x, w):
    x = x.clone()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.add_(1)
    return w * (x * scale)


def without_gradient_in_between(x, w):
    with torch.no_grad():
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (x * scale)


def weight_of_another_shape(x, w):
    return w[:1] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def not_contiguous(x, w):  # a view that only these strides allow may follow
    return llama(x.t().reshape(4, 2, 8).transpose(0, 1), w).transpose(0, 1).view(8, 8)


def float64_norm(x, w):
    return F.layer_norm(x.double(), (8,))


@pytest.mark.parametrize(
    "function",
    [uses_the_mean, other_dim, fourth_power, other_input, half_statistics, written_in_between, without_gradient_in_between,
     weight_of_another_shape, not_contiguous, float64_norm],
)  # fmt: skip
def test_must_not_fire(function):
    x, w = draw(8, 8).requires_grad_(), draw(8).requires_grad_()
    pass_, gm, y = rewrite(function, x, w)
    assert fused(gm) == [] and pass_.matches == []
    assert torch.equal(y, function(x, w))


@needs_kernel
def test_shared_intermediates_stay():
    def function(x, w):
        wide = x.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        return w * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype), variance

    x, w = draw(3, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    _, gm, (y, variance) = rewrite(copy.copy(function), x, w)
    assert fused(gm) == ["apexfx.rms_norm.default"]
    expected = function(x, w)
    assert torch.equal(variance, expected[1])
    assert_close(y, expected[0])


@needs_kernel
@pytest.mark.parametrize("affine", [True, False])
def test_casts_of_o1_go_into_the_op_and_leave_the_ledger(affine):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=affine), nn.Linear(8, 8))
    x, casts = draw(3, 8), []
    for passes in ([CancelCasts], [CancelCasts, lambda: FuseNorm()]):
        torch._dynamo.reset()
        fast, recorder = compiled(model, lambda: precision("O1"), *passes)
        with measured():
            y = fast(x)
        casts.append(recorder.text("_to_copy").count("_to_copy"))
    [gm] = recorder.graphs
    assert fused(gm) == ["apexfx.layer_norm.default"]
    node = gm.graph.find_nodes(op="call_function", target=torch.ops.apexfx.layer_norm.default)[0]
    assert node.args[0].meta["val"].dtype == torch.bfloat16 and node.meta["val"][0].dtype == torch.bfloat16
    removed = recorder.reports[-1].artifacts.removed_casts
    assert [(row.source_dtype, row.target_dtype) for row in removed] == [("f32", "bf16"), ("bf16", "f32")]
    assert casts[1] == casts[0] - 2
    assert_close(y, model(x), dtype=torch.bfloat16)


def test_table_decides():
    assert fused(rewrite(nn.LayerNorm(8), draw(3, 8), ratios={})[1]) == []


@needs_kernel
@table(1, "dynamic", [False, True])
@pytest.mark.parametrize(("norm", "function"), [
    ("layer_norm", nn.LayerNorm(4096)),
    ("rms_norm", nn.RMSNorm(4096)),
    ("written_rms_norm", lambda x: llama(x, torch.ones(4096))),
])  # fmt: skip
def test_norms_smaller_than_any_that_was_measured_stay(norm, function, dynamic):
    for rows, fires in ((511, False), (512, True)):
        x = draw(rows, 4096)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        _, gm, y = rewrite(function, x, least_elements=LEAST_ELEMENTS)
        assert bool(fused(gm)) == fires
        assert not dynamic or isinstance(next(iter(gm.graph.output_node().args[0])).meta["val"].shape[0], torch.SymInt)
        assert_close(y, function(x))


@needs_kernel
def test_the_least_elements_are_those_of_the_op():
    x = draw(3, 8)
    assert fused(rewrite(nn.LayerNorm(8), x, least_elements={"layer_norm": 25})[1]) == []
    _, gm, _ = rewrite(nn.LayerNorm(8), x, least_elements={"layer_norm": 24, "rms_norm": 25})
    assert fused(gm) == ["apexfx.layer_norm.default"]


def test_without_a_kernel_nothing_changes(monkeypatch):
    monkeypatch.setattr("apexfx.passes.fuse_norm.has_kernel", lambda op, key: False)
    assert fused(rewrite(nn.LayerNorm(8), draw(3, 8))[1]) == []


def test_the_table_is_well_formed():
    assert RATIO
    for (op, device, dtype), (mean, smallest) in RATIO.items():
        assert (op, "cpu", "float32") in EVERYWHERE and device in ("cpu", "cuda")
        assert isinstance(getattr(torch, dtype), torch.dtype)
        assert 0.9 <= smallest <= mean >= 1.05 and LEAST_ELEMENTS[op] > 0
