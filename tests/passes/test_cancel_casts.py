"""Casts that change nothing go, one cast serves all uses of a value, and nothing else is touched."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from apexfx.passes.cancel_casts import CancelCasts
from apexfx.testing import assert_close
from tests.forward_graphs import compiled, precision

aten = torch.ops.aten
bf16, f32 = torch.bfloat16, torch.float32


def to(x, dtype):
    return aten._to_copy.default(x, dtype=dtype)


def run(function, *inputs):
    """Return the outputs with only this pass, after checking that they equal eager to the bit, and the recorder."""
    expected = function(*[x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs])
    fast, recorder = compiled(function, CancelCasts, CancelCasts, verify="each")
    out = fast(*inputs)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert not recorder.reports[1].matches  # twice is once
    return out, recorder


def loop(x, w):
    for _ in range(3):
        x = x @ w
    return x


def test_one_weight_cast_serves_all_uses():
    fast, recorder = compiled(loop, lambda: precision("O1"), CancelCasts)
    fast(torch.randn(2, 4), torch.randn(4, 4))
    assert_expected_inline(recorder.text(), """\
%0 = aten._to_copy.default(%x, dtype=bfloat16) -> bf16[2,4]
%1 = aten._to_copy.default(%w, dtype=bfloat16) -> bf16[4,4]
%2 = operator.matmul(%0, %1) -> bf16[2,4]
%3 = operator.matmul(%2, %1) -> bf16[2,4]
%4 = operator.matmul(%3, %1) -> bf16[2,4]
%5 = aten._to_copy.default(%4, dtype=float32) -> f32[2,4]
out  [%5]""")
    artifacts = recorder.reports[1].artifacts
    assert sum(row.bytes for row in artifacts.removed_casts) == 2 * 16 * 2
    assert [row.tensor for row in artifacts.removed_casts] == ["w", "w"]
    assert all("cast before" in row.removed and row.rule == "half" for row in artifacts.removed_casts)


def test_a_cast_that_is_written_stays():
    def f(x):
        y = x * 2
        cast, again = to(y, f32), to(y, f32)
        cast.add_(1)
        return y, cast, again + y

    run(f, torch.randn(4))


def test_same_dtype():
    _, recorder = run(lambda x: to(x * 2, f32) + 1, torch.randn(4))
    assert "_to_copy" not in recorder.text()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_exact_round_trips(half):
    _, recorder = run(lambda x: to(to(x * 2, f32), half) + 1, torch.randn(4).to(half))
    assert "_to_copy" not in recorder.text()
    _, recorder = run(lambda x: to((x * 2).float(), half) + 1, torch.randn(4).to(half))
    assert "float" not in recorder.text()
    out, recorder = run(lambda x: (to(to(x * 2, f32), half), to(x * 2, f32).exp()), torch.randn(4).to(half))
    assert len(recorder.text("_to_copy").splitlines()) == 1


def down_and_up(x):
    return to(to(x, bf16), f32)


def other_half(x):
    return to(to(to(x, bf16), f32), torch.float16)


def written_source(x, w):
    x = x * 1
    first = to(x, bf16)
    x.view(-1).add_(1)
    return first @ w, to(x, bf16) @ w


def written_cast(x, w):
    first, second = to(x, bf16), to(x, bf16)
    first.add_(1)
    return first @ w, second @ w


def written_origin(x, w):
    h = x.to(bf16) * 1
    up = to(h, f32)
    h.mul_(2)
    return to(up, bf16) @ w, h


def written_by_a_later_setitem(x, w):
    h = x * 1
    same = to(h, f32)
    h[0] = 0
    return same, h


def under_no_grad(x, w):
    with torch.no_grad():
        frozen = to(x, bf16)
    return frozen @ w, to(x, bf16) @ w


@pytest.mark.parametrize("function, num_casts", [
    (down_and_up, 2), (other_half, 3), (written_source, 2), (written_cast, 2), (written_origin, 2),
    (written_by_a_later_setitem, 1), (under_no_grad, 2),
], ids=lambda p: getattr(p, "__name__", str(p)))  # fmt: skip
def test_must_not_fire(function, num_casts):
    inputs = (torch.randn(4, 4), torch.randn(4, 4).to(bf16))[: function.__code__.co_argcount]
    _, recorder = run(function, *inputs)
    assert len(recorder.text("_to_copy").splitlines()) == num_casts
    assert not recorder.reports[0].matches and not recorder.reports[0].artifacts.removed_casts


def test_gradients_pass_a_no_grad_twin():
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4).to(bf16)
    fast, _ = compiled(under_no_grad, CancelCasts)
    a, b = fast(x, w)
    assert not a.requires_grad and b.requires_grad
    b.sum().backward()
    assert x.grad is not None


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_is_the_same_with_and_without(level):
    results = []
    for passes in ([lambda: precision(level)], [lambda: precision(level), CancelCasts]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Loop(), torch.randn(3, 5, 4)
        fast, recorder = compiled(model, *passes)
        out = fast(x)
        out.sum().backward()
        results.append((out.detach(), [p.grad for p in model.parameters()]))
    (out, grads), (same, shared) = results
    assert torch.equal(out, same)
    for a, b in zip(grads, shared):
        # The uses of one cast add their gradients in half, those of many casts in float32.
        assert_close(b, a, dtype=bf16, scale=2)
    casts = recorder.text("cell.weight_hh").splitlines()
    assert len(casts) == 1 and copy.deepcopy(model)(x).shape == out.shape
