"""The precision pass on values that must keep their dtype, their storage or their range."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx.testing import assert_close
from tests.passes.precision_models import HALVES, run
from tests.small_models import Model
from tests.tables import table


def average(m, x):
    """Read a float buffer in a matrix product, and write it through a view."""
    y = m.fc(x) * m.scale
    with torch.no_grad():
        m.ema.view(-1).lerp_((x.mT @ x).view(-1), 0.5)
    return y @ m.ema


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_mutated_buffer_is_never_a_copy(level):
    model = Model(average, fc=nn.Linear(4, 4), ema=nn.Buffer(torch.zeros(4, 4)), scale=nn.Buffer(torch.full((4,), 2.0)))
    x = torch.randn(3, 4)
    reference = copy.deepcopy(model)
    out, recorder = run(model, x, level=level)
    assert_close(out, reference(x), dtype=torch.bfloat16, scale=4)  # three products in a row
    assert_close(model.ema, reference.ema, dtype=torch.bfloat16)
    assert model.ema.any() and model.ema.dtype == torch.float32
    entry = [row for row in recorder.casts() if row["rule"] == "model"]
    assert not any(row["tensor"] == "ema" for row in entry)
    assert level == "O1" or any(row["tensor"] == "scale" for row in entry)


class _Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        count.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def _count(x, count):
    count.add_(1)
    return x * 2


def _count_in_branch(x, count):
    with torch.no_grad():
        torch.cond(x.sum() > 0, lambda c: c.add_(1).sum(), lambda c: c.add_(2).sum(), (count,))
    return x * 2


def _clip(x, count):
    with torch.no_grad():
        F.hardtanh(input=count, min_val=1.0, max_val=2.0, inplace=True)
    return x * 2


def _double(x, count):
    x = x * 1
    _Doubles.apply(x.view(-1))
    return x


def _double_in_branch(x, count):
    with torch.no_grad():
        x = x * 1
        torch.cond(count.sum() > 0, lambda c: c.mul_(2).sum(), lambda c: c.add_(2).sum(), (x,))
    return x


@table(3, "call", [
    pytest.param(_Counts.apply, id="autograd.Function"), pytest.param(_count_in_branch, id="cond"),
    pytest.param(_clip, id="input="), pytest.param(torch._dynamo.allow_in_graph(_count), id="allow_in_graph"),
    pytest.param(torch._dynamo.nonstrict_trace(_count), id="nonstrict_trace"), pytest.param(_double, id="view of an activation"),
    pytest.param(_double_in_branch, id="activation")])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_body_or_a_function_writes_is_read_as_it_is_then(call, level):
    def forward(m, x):
        with torch.no_grad():
            before = F.linear(m.count, m.fc.weight)
        y = call(m.fc(x), m.count)
        with torch.no_grad():
            return y + before + F.linear(m.count, m.fc.weight)

    model = Model(forward, fc=nn.Linear(4, 4), count=nn.Buffer(torch.zeros(4)))
    reference, x = copy.deepcopy(model), torch.randn(3, 4)
    out, _ = run(model, x, level=level)
    assert_close(out, reference(x), dtype=torch.bfloat16, scale=4)
    assert torch.equal(model.count, reference.count)


def test_a_batch_norm_that_is_called_by_keyword_keeps_its_parameters():
    def forward(m, x):
        return F.batch_norm(input=m.fc(x), weight=m.bn.weight, bias=m.bn.bias, running_mean=m.bn.running_mean,
                            running_var=m.bn.running_var, training=True)

    _, recorder = run(Model(forward, fc=nn.Linear(4, 4), bn=nn.BatchNorm1d(4)), torch.randn(3, 4), level="O2")
    assert not any(row["tensor"].startswith("bn.") for row in recorder.casts())


def test_an_output_that_is_a_view_of_an_input_stays_one():
    def f(x, w):
        v = x.view(-1)
        return v, x, (v * 2).sum() + (x @ w).sum()

    x = torch.randn(2, 4)
    (view, same, _), recorder = run(f, x, torch.randn(4, 4), level="O2")
    assert view.data_ptr() == x.data_ptr() == same.data_ptr() and view.dtype == torch.float32
    assert "bf16[8]" in recorder.text("view")  # the copy that feeds the arithmetic


def test_the_users_own_casts_stay():
    def norm(x, weight):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (weight * h.to(x.dtype)) @ weight.diag().half().to(x.dtype)

    x, weight = torch.randn(3, 4), torch.randn(4)
    for level in ("O1", "O2", "O3"):
        torch._dynamo.reset()
        out, recorder = run(norm, x, weight, level=level)
        assert_close(out, norm(x, weight), dtype=torch.bfloat16, scale=2)
        assert len(recorder.text(r" (to|half)\(").splitlines()) == 4


def test_positions_made_float_on_purpose_are_not_rounded():
    # Rotary embeddings: position 257 does not exist in bfloat16.
    def angles(frequency, positions):
        return (frequency[None, :, None].float().expand(1, -1, 1) @ positions[:, None, :].float()).transpose(1, 2).cos()

    frequency, positions = torch.rand(4), torch.arange(1000, 1010)[None]
    for level in ("O1", "O2"):
        torch._dynamo.reset()
        out, _ = run(angles, frequency, positions, level=level)
        assert torch.equal(out, angles(frequency, positions))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_masks_made_for_float32_neither_crash_nor_poison(level, half):
    def attend(q, additive):
        big = torch.finfo(q.dtype).min
        scores = (q @ q.mT).masked_fill(additive < 0, big)
        first = F.softmax(scores, -1) @ q
        return first + F.scaled_dot_product_attention(q, q, q, attn_mask=additive)

    q = torch.randn(1, 2, 4, 8)
    additive = torch.zeros(1, 1, 4, 4)
    additive[..., 2:] = torch.finfo(torch.float32).min
    additive[..., 1, :] = torch.finfo(torch.float32).min  # a row that is masked throughout
    additive[..., 0, 3] = -torch.inf
    out, _ = run(attend, q, additive, level=level, half=half)
    expected = attend(q, additive)
    rows = [0, 2, 3]
    assert_close(out[..., rows, :], expected[..., rows, :], dtype=half, scale=2)
    # In float32 the mask swallows the scores of row 1 and the average is plain; in half it may not, but it is a mean.
    assert out[..., 1, :].isfinite().all() and out[..., 1, :].abs().max() <= 2 * q.abs().max()


def test_a_custom_op_gets_the_dtypes_it_was_written_for():
    @torch.library.custom_op("apexfxtest::picky", mutates_args=())
    def picky(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x + 1

    @picky.register_fake
    def _(x):
        assert x.dtype == torch.float32
        return torch.empty_like(x)

    for level in ("O1", "O2"):
        torch._dynamo.reset()
        x, w = torch.randn(2, 4), torch.randn(4, 4) / 2  # products of order one
        out, recorder = run(lambda x, w: picky(x @ w) @ w, x, w, level=level)
        assert_close(out, (x @ w + 1) @ w, dtype=torch.bfloat16, scale=2)
        assert [row["rule"] for row in recorder.casts() if "picky" in row["op"]] == ["captured"]


@pytest.mark.parametrize("spelled", [lambda op: op, lambda op: torch.ops.apexfxtest.double_], ids=["custom_op", "packet"])
def test_what_a_custom_op_writes_is_no_copy(spelled):
    @torch.library.custom_op("apexfxtest::double_", mutates_args={"x"})
    def double_(x: torch.Tensor, y: torch.Tensor) -> None:
        assert y.dtype == torch.float32
        x.mul_(2)

    double_ = spelled(double_)
    for level in ("O1", "O2"):
        torch._dynamo.reset()
        x, w = torch.randn(2, 4), torch.randn(4, 4) / 2  # a product of order one

        def f(x, w):
            h = x @ w
            double_(h, x @ w)
            return h

        out, recorder = run(f, x, w, level=level)
        assert_close(out, x @ w * 2, dtype=torch.bfloat16)
        assert [row["rule"] for row in recorder.casts() if "double_" in row["op"]] == ["captured"]


def test_a_cast_under_no_grad_and_graph_breaks_keep_dtypes():
    def f(x, w):
        h = x @ w
        torch._dynamo.graph_break()
        return h @ w, h.dtype

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    for level in ("O1", "O2"):
        torch._dynamo.reset()
        (out, dtype), recorder = run(f, x, w, level=level)
        assert out.dtype == dtype == torch.float32 and len(recorder.graphs) == 2
        assert_close(out, x @ w @ w, dtype=torch.bfloat16, scale=4)
