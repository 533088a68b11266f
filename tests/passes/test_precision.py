"""The precision pass on real Dynamo graphs: the printed graph, the ledger, the numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.passes.sync_batchnorm import SyncBatchnorm
from apexfx.testing import assert_close
from tests.forward_graphs import compiled, precision
from tests.passes.precision_models import HALVES, Block, Nested, run
from tests.small_models import Model
from tests.tables import table


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


@table(1, "level", ["O1", "O2", "O3"])
def test_synchronized_batch_norm_keeps_float32_parameters_beside_half_activations(level):
    model = Model(lambda m, x: F.relu(m.bn(m.conv(x)) + x), conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3))
    x = torch.randn(4, 3, 5, 5)
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
    assert row["source"].startswith("precision_models.py:")
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


def test_checkpointed_bodies_are_rewritten():
    def forward(m, x):
        return m.b(checkpoint(lambda z: F.gelu(m.a(z)), x, use_reentrant=False))

    for level in ("O1", "O2"):
        torch._dynamo.reset()
        model, x = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(3, 4)
        out, recorder = run(model, x, level=level)
        assert_close(out, model(x), dtype=torch.bfloat16)
        out.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        body = recorder.text("linear|gelu").splitlines()
        assert "-> bf16" in body[0] and "-> bf16" in body[1]
        assert len({row["node"] for row in recorder.casts()}) == len(recorder.casts())
        assert any(row["node"].startswith("wrap_body_0.") for row in recorder.casts()) == (level == "O1")


def test_a_dynamic_batch_size():
    model = Nested()
    fast, recorder = compiled(model, lambda: precision("O2"))
    for batch in (5, 7, 9):
        x = torch.randn(batch, 4)
        assert_close(fast(x), copy.deepcopy(model)(x), dtype=torch.bfloat16, scale=2)
    assert len(recorder.graphs) == 2


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_an_embedding_renormalizes_are_those_of_the_parameter(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(6, 4, max_norm=0.5))
    reference, rows = copy.deepcopy(model), torch.tensor([[0, 1, 2], [3, 4, 0]])
    apexfx.transform(model, opt_level="O2", dtype=torch.bfloat16, inner="eager")(rows)
    reference(rows)
    assert torch.equal(model[0].weight, reference[0].weight)


def test_a_cast_of_the_users_that_copies_in_half_is_returned_as_it_was_written():
    class Scales(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            z = y.float()
            z.mul_(2)
            return z, z.reshape(-1)

    torch.manual_seed(0)
    model, x = Scales(4, 4), torch.randn(5, 4)
    scaled, viewed = apexfx.transform(model, opt_level="O1", dtype=torch.bfloat16, inner="eager")(x)
    assert_close(scaled, model(x)[0], dtype=torch.bfloat16, scale=2)
    assert torch.equal(viewed, scaled.view(-1))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x)[0], scaled)


def test_a_copy_of_an_input_that_the_model_writes_and_returns_is_one():
    class Adds(nn.Linear):
        def forward(self, x):
            y = x.clone()
            y.add_(super().forward(x))
            return y

    torch.manual_seed(0)
    model, x = Adds(4, 4), torch.randn(5, 4)
    assert_close(apexfx.transform(copy.deepcopy(model), opt_level="O2", dtype=torch.bfloat16, inner="eager")(x), model(x),
                 dtype=torch.bfloat16, scale=2)
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0), opt_level="O2", dtype=torch.bfloat16,
                             inner="eager")
    assert_close(step(x, x), F.mse_loss(model(x), x), dtype=torch.bfloat16, scale=2)
