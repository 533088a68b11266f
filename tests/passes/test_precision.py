"""The precision pass on real Dynamo graphs: the printed graph, the ledger, the numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

from apexfx.passes.sync_batchnorm import SyncBatchnorm
from apexfx.testing import assert_close
from tests.forward_graphs import compiled, precision

HALVES = [torch.bfloat16, torch.float16]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return F.softmax(self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3))), -1)


def run(model, *inputs, level="O1", half=torch.bfloat16, verify="final", **options):
    """Return the outputs of `model` under the pass, and the recorder."""
    fast, recorder = compiled(model, lambda: precision(level, half, **options), verify=verify)
    return fast(*inputs), recorder


def test_o1_casts_per_op():
    out, recorder = run(Block(), torch.randn(2, 3, 6, 6))
    assert_expected_inline(recorder.text(), """\
%0 = aten._to_copy.default(%x, dtype=bfloat16) -> bf16[2,3,6,6]
%1 = aten._to_copy.default(%conv.weight, dtype=bfloat16) -> bf16[4,3,3,3]
%2 = torch.conv2d(%0, %1, None, [1, 1], [0, 0], [1, 1], 1) -> bf16[2,4,4,4]
%3 = add_(%bn.num_batches_tracked, 1) -> i64[]
%4 = F.batch_norm(%2, %bn.running_mean, %bn.running_var, %bn.weight, %bn.bias, True, 0.1, 1e-05) -> bf16[2,4,4,4]
%5 = F.relu(%4) -> bf16[2,4,4,4]
%6 = aten._to_copy.default(%5, dtype=float32) -> f32[2,4,4,4]
%7 = mean(%6, [2, 3]) -> f32[2,4]
%8 = aten._to_copy.default(%7, dtype=bfloat16) -> bf16[2,4]
%9 = aten._to_copy.default(%fc.weight, dtype=bfloat16) -> bf16[2,4]
%10 = aten._to_copy.default(%fc.bias, dtype=bfloat16) -> bf16[2]
%11 = torch.linear(%8, %9, %10) -> bf16[2,2]
%12 = aten._to_copy.default(%11, dtype=float32) -> f32[2,2]
%13 = F.softmax(%12, -1) -> f32[2,2]
out  [%13]""")
    assert out.dtype == torch.float32


def test_o2_casts_once_at_entry_and_keeps_batch_norm():
    out, recorder = run(Block(), torch.randn(2, 3, 6, 6), level="O2")
    assert_expected_inline(recorder.text(), """\
%0 = aten._to_copy.default(%conv.weight, dtype=bfloat16) -> bf16[4,3,3,3]
%1 = aten._to_copy.default(%x, dtype=bfloat16) -> bf16[2,3,6,6]
%2 = aten._to_copy.default(%fc.weight, dtype=bfloat16) -> bf16[2,4]
%3 = aten._to_copy.default(%fc.bias, dtype=bfloat16) -> bf16[2]
%4 = torch.conv2d(%1, %0, None, [1, 1], [0, 0], [1, 1], 1) -> bf16[2,4,4,4]
%5 = add_(%bn.num_batches_tracked, 1) -> i64[]
%6 = F.batch_norm(%4, %bn.running_mean, %bn.running_var, %bn.weight, %bn.bias, True, 0.1, 1e-05) -> bf16[2,4,4,4]
%7 = F.relu(%6) -> bf16[2,4,4,4]
%8 = mean(%7, [2, 3]) -> bf16[2,4]
%9 = torch.linear(%8, %2, %3) -> bf16[2,2]
%10 = F.softmax(%9, -1) -> bf16[2,2]
%11 = aten._to_copy.default(%10, dtype=float32) -> f32[2,2]
out  [%11]""")
    assert out.dtype == torch.float32


def test_o3_casts_batch_norm_too_and_never_its_statistics():
    for model in (Block(), Block().eval()):
        _, recorder = run(model, torch.randn(2, 3, 6, 6), level="O3")
        assert {"bn.weight", "bn.bias"} <= {row["tensor"] for row in recorder.casts()}
        assert not any("running" in row["tensor"] for row in recorder.casts())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_synchronized_batch_norm_keeps_float32_parameters_beside_half_activations(level):
    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            return F.relu(self.bn(self.conv(x)) + x)

    model, x = Tail(), torch.randn(4, 3, 5, 5)
    reference = copy.deepcopy(model)
    fast, recorder = compiled(model, lambda: SyncBatchnorm(group_name=""), lambda: precision(level))
    out = fast(x)
    assert_close(out, reference(x), dtype=torch.bfloat16)
    for a, b in zip(model.buffers(), reference.buffers()):
        assert_close(a, b, dtype=torch.bfloat16)
    [node] = [n for n in recorder.graphs[0].graph.nodes if "sync_batch_norm" in str(n.target)]
    dtypes = [a.meta["val"].dtype for a in node.args[:5]]
    assert dtypes == [torch.bfloat16, *[torch.float32] * 4]
    assert not any("running" in row["tensor"] for row in recorder.casts())


def test_o0_brings_a_half_model_to_float32():
    model = Block().to(torch.float16)
    _, recorder = run(model, torch.randn(2, 3, 6, 6).half(), level="O0")
    # The half statistics are written in place, so batch norm itself must stay half.
    assert_expected_inline(recorder.text("conv2d|batch_norm|linear|softmax"), """\
%4 = torch.conv2d(%1, %0, None, [1, 1], [0, 0], [1, 1], 1) -> f32[2,4,4,4]
%7 = F.batch_norm(%6, %bn.running_mean, %bn.running_var, %bn.weight, %bn.bias, True, 0.1, 1e-05) -> f16[2,4,4,4]
%11 = torch.linear(%10, %2, %3) -> f32[2,2]
%12 = F.softmax(%11, -1) -> f32[2,2]""")
    assert all(p.dtype == torch.float16 for p in model.parameters())


def test_must_not_fire_on_what_has_no_rule():
    for level, function in [
        ("O0", Block()), ("O1", lambda x: x.relu().view(-1)[2:]), ("O1", lambda x: x.double() @ x.double().mT),
    ]:  # fmt: skip
        _, recorder = run(function, torch.randn(2, 3, 6, 6), level=level)
        assert not recorder.casts() and not recorder.reports[0].matches
    assert "no rule" in recorder.reports[0].warning


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_twice_is_once(level):
    model = Block() if level != "O0" else Block().to(torch.bfloat16)
    x = torch.randn(2, 3, 6, 6).to(next(model.parameters()).dtype)
    fast, recorder = compiled(model, lambda: precision(level), lambda: precision(level))
    fast(x)
    first, second = recorder.reports
    assert first.matches and not second.matches
    assert first.code.splitlines()[1:] == second.code.splitlines()[1:]


def test_the_ledger_says_why():
    _, recorder = run(Block(), torch.randn(2, 3, 6, 6))
    rows = {row["tensor"]: row for row in recorder.casts()}
    row = rows["fc.weight"]
    assert row["op"].endswith("linear") and row["rule"] == "half" and "tensor cores" in row["reason"]
    assert (row["source_dtype"], row["target_dtype"], row["bytes"], row["module"]) == ("f32", "bf16", 16, "fc")
    assert row["source"].startswith("test_precision.py:")
    assert len(recorder.reports[0].matches) == len(recorder.casts())
    assert {row["node"] for row in recorder.casts()} <= {n.name for n in recorder.graphs[0].graph.nodes}


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_parameters_keep_storage_and_dtype_and_get_gradients_in_it(level, half):
    model = Block()
    reference, x = copy.deepcopy(model).double(), torch.randn(8, 3, 6, 6)
    before = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    out, _ = run(model, x, level=level, half=half)
    (out * torch.tensor([1.0, -2.0])).sum().backward()
    expected = reference(x.double())
    (expected * torch.tensor([1.0, -2.0])).sum().backward()
    assert before == {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    assert_close(out, expected, dtype=half)
    for p, q in zip(model.parameters(), reference.parameters()):
        assert p.grad.dtype == torch.float32
        # A gradient is a sum over 8 * 16 positions and three layers: the relative error is that of the sum's norm.
        assert (p.grad - q.grad).norm() <= 0.1 * q.grad.norm() + 1e-3
    for a, b in zip(model.buffers(), reference.buffers()):
        assert_close(a, b, dtype=half)


class Ema(nn.Module):
    """A float buffer that is read by a matrix product and written through a view."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("ema", torch.zeros(4, 4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        y = self.fc(x) * self.scale
        with torch.no_grad():
            self.ema.view(-1).lerp_((x.mT @ x).view(-1), 0.5)
        return y @ self.ema


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_mutated_buffer_is_never_a_copy(level):
    model, x = Ema(), torch.randn(3, 4)
    reference = copy.deepcopy(model)
    out, recorder = run(model, x, level=level)
    assert_close(out, reference(x), dtype=torch.bfloat16, scale=4)  # three products in a row
    assert_close(model.ema, reference.ema, dtype=torch.bfloat16)
    assert model.ema.any() and model.ema.dtype == torch.float32
    entry = [row for row in recorder.casts() if row["rule"] == "model"]
    assert not any(row["tensor"] == "ema" for row in entry)
    assert level == "O1" or any(row["tensor"] == "scale" for row in entry)


def test_an_output_that_is_a_view_of_an_input_stays_one():
    def f(x, w):
        v = x.view(-1)
        return v, x, (v * 2).sum() + (x @ w).sum()

    x = torch.randn(2, 4)
    (view, same, _), recorder = run(f, x, torch.randn(4, 4), level="O2")
    assert view.data_ptr() == x.data_ptr() == same.data_ptr() and view.dtype == torch.float32
    assert "bf16[8]" in recorder.text("view")  # the copy that feeds the arithmetic


def test_checkpointed_bodies_are_rewritten():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(checkpoint(lambda z: F.gelu(self.a(z)), x, use_reentrant=False))

    for level in ("O1", "O2"):
        torch._dynamo.reset()
        model, x = Checkpointed(), torch.randn(3, 4)
        out, recorder = run(model, x, level=level)
        assert_close(out, model(x), dtype=torch.bfloat16)
        out.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        body = recorder.text("linear|gelu").splitlines()
        assert "-> bf16" in body[0] and "-> bf16" in body[1]
        assert len({row["node"] for row in recorder.casts()}) == len(recorder.casts())
        assert any(row["node"].startswith("wrap_body_0.") for row in recorder.casts()) == (level == "O1")


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


def test_in_place_ops_match_their_own_tensor():
    def f(x, y, w):
        h = x @ w
        kept = h.view(-1)
        h += y
        h.mul_(y)
        h.exp_()
        F.relu(h, inplace=True)
        return kept, torch.add(y, y, out=torch.empty_like(h))

    x, y, w = torch.randn(2, 4), torch.randn(2, 3), torch.randn(4, 3)
    out, recorder = run(f, x, y, w)
    for actual, expected in zip(out, f(x, y, w)):
        assert_close(actual, expected, dtype=torch.bfloat16, scale=2)
    assert {row["rule"] for row in recorder.casts() if row["tensor"] == "y"} == {"match_self"}


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
        x, w = torch.randn(2, 4), torch.randn(4, 4)
        out, recorder = run(lambda x, w: picky(x @ w) @ w, x, w, level=level)
        assert_close(out, (x @ w + 1) @ w, dtype=torch.bfloat16, scale=2)
        assert [row["rule"] for row in recorder.casts() if "picky" in row["op"]] == ["captured"]


def test_float64_is_never_cast_down():
    model = Block().double()
    for level in ("O1", "O2", "O3"):
        torch._dynamo.reset()
        _, recorder = run(model, torch.randn(2, 3, 6, 6).double(), level=level)
        assert not recorder.casts()


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


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("overrides, expected", [
    ({}, "bf16 bf16 bf16"),
    ({"encoder": torch.float32}, "f32 f32 bf16"),
    ({"encoder.1.*": "float32"}, "bf16 f32 bf16"),
    ({"linear": "float32"}, "f32 f32 f32"),
    ({"linear": "float32", "head": torch.bfloat16}, "f32 f32 bf16"),
    ({"h*d": "float16"}, "bf16 bf16 f16"),
])  # fmt: skip
def test_overrides(level, overrides, expected):
    model, x = Nested(), torch.randn(5, 4)
    out, recorder = run(model, x, level=level, overrides=overrides)
    linears = [line.split("-> ")[1].split("[")[0] for line in recorder.text("torch.linear").splitlines()]
    assert " ".join(linears) == expected
    assert_close(out, copy.deepcopy(model)(x), dtype=torch.bfloat16, scale=2)
    if "encoder" in overrides:
        assert not any(row["tensor"].startswith("encoder") and row["rule"] == "model" for row in recorder.casts())
    if overrides:
        assert any("override" in row["reason"] for row in recorder.casts()) or "f32" in expected


def test_an_override_that_covers_nothing_is_named(caplog):
    run(Nested(), torch.randn(5, 4), overrides={"decoder.*": "float32"})
    assert "precision['decoder.*'] covers no module path and no op" in caplog.text
    run(Nested(), torch.randn(5, 4), overrides={"encodre": "float32"})
    assert "precision['encodre'] covers no module path and no op of this graph; did you mean 'encoder" in caplog.text


@pytest.mark.parametrize("overrides, error", [
    ({"head": "float8"}, ValueError), ({"head": torch.int32}, ValueError), ({3: "half"}, TypeError),
])  # fmt: skip
def test_bad_overrides_are_refused(overrides, error):
    with pytest.raises(error, match="precision="):
        precision("O1", overrides=overrides)


def test_two_casters_are_refused():
    def inner(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    x = torch.randn(4, 4)
    for level in ("O1", "O2", "O3"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="cast twice"):
            run(inner, x, level=level)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(Exception, match="cast twice"):
            run(lambda x: x @ x, x, level=level)
    torch._dynamo.reset()
    out, recorder = run(inner, x, level="O0")
    assert out.dtype == torch.bfloat16 and not recorder.casts()


def test_autocast_switched_off_is_a_region_without_rules():
    def f(x):
        h = x @ x
        with torch.autocast("cpu", enabled=False):
            return h.float() @ x.float()

    x = torch.randn(4, 4)
    _, recorder = run(f, x)
    assert [line.split("-> ")[1] for line in recorder.text("matmul").splitlines()] == ["bf16[4,4]", "f32[4,4]"]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_verified_pass_by_pass(level):
    out, _ = run(Block(), torch.randn(4, 3, 6, 6), level=level, verify="each")
    assert out.isfinite().all()


def test_a_dynamic_batch_size():
    model = Nested()
    fast, recorder = compiled(model, lambda: precision("O2"))
    for batch in (5, 7, 9):
        x = torch.randn(batch, 4)
        assert_close(fast(x), copy.deepcopy(model)(x), dtype=torch.bfloat16, scale=2)
    assert len(recorder.graphs) == 2
