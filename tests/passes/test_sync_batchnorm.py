"""sync_batchnorm: the printed graph, what is fused and what must not be, the report, and numbers on one process."""

from __future__ import annotations

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from apexfx.graph.printing import format_graph
from apexfx.passes.sync_batchnorm import SyncBatchnorm
from apexfx.testing import assert_close
from tests.passes import batch_norm_graphs
from tests.passes.batch_norm_graphs import text

# ruff: noqa: E501  printed graphs

SYNC = torch.ops.apexfx.sync_batch_norm.default


class Block(nn.Module):
    """A batch norm and whatever `tail(y, z)` does with its output."""

    def __init__(self, tail, norm=None):
        super().__init__()
        self.bn = norm or nn.BatchNorm2d(3)
        self.down = nn.BatchNorm2d(3)
        self.tail = tail

    def forward(self, x, z):
        return self.tail(self.bn(x), z)


def rewrite(model, *inputs, group_name=""):
    return batch_norm_graphs.rewrite(model, *inputs, make=lambda: SyncBatchnorm(group_name=group_name), runs=not group_name)


def ops(gm):
    return [line.split(" = ")[1] for line in format_graph(gm).splitlines() if " = " in line]


def draw():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, 2, 2, generator=generator) for _ in range(2)]


class TestPrintedGraph(TestCase):
    def test_batch_norm_becomes_one_node(self):
        _, gm, _ = rewrite(Block(lambda y, z: y.sin()), *draw(), group_name="7")
        self.assertExpectedInline(
            format_graph(gm, only="=|out"),
            """\
%0 = add_(%bn.num_batches_tracked, 1) -> i64[]
%1 = apexfx.sync_batch_norm.default(%x, %bn.weight, %bn.bias, %bn.running_mean, %bn.running_var, 0.1, 1e-05, '7') -> f32[4,3,2,2]
%2 = sin(%1) -> f32[4,3,2,2]
out  [%2]""",
        )

    def test_add_and_relu_are_fused(self):
        pass_, gm, _ = rewrite(Block(lambda y, z: F.relu(y + z)), *draw(), group_name="7")
        self.assertExpectedInline(
            format_graph(gm, only="apexfx|out"),
            """\
%1 = apexfx.sync_batch_norm.default(%x, %bn.weight, %bn.bias, %bn.running_mean, %bn.running_var, 0.1, 1e-05, '7', None, %z, True) -> f32[4,3,2,2]
out  [%1]""",
        )
        [match] = pass_.matches
        self.assertEqual(match.module, "bn")
        self.assertEqual(match.detail, "sync_batch_norm + add + relu over group '7'")
        self.assertTrue(match.source.startswith("test_sync_batchnorm.py:"))


def iadd(y, z):
    y += z
    return y


FUSED = {
    "F.relu": (lambda y, z: F.relu(y), "relu"),
    "F.relu in place": (lambda y, z: F.relu(y, inplace=True), "relu"),
    "torch.relu_": (lambda y, z: torch.relu_(y), "relu"),
    "method": (lambda y, z: y.relu(), "relu"),
    "method in place": (lambda y, z: y.relu_(), "relu"),
    "module": (nn.ReLU(inplace=True), "relu"),
    "add": (lambda y, z: (y + z).relu(), "add + relu"),
    "radd": (lambda y, z: (z + y).relu(), "add + relu"),
    "iadd": (lambda y, z: iadd(y, z).relu_(), "add + relu"),
    "operator.iadd": (lambda y, z: torch.relu(operator.iadd(y, z)), "add + relu"),
    "torch.add": (lambda y, z: F.relu(torch.add(z, y)), "add + relu"),
    "add_": (lambda y, z: F.relu(y.add_(z)), "add + relu"),
    "later residual": (lambda y, z: F.relu(y + z.sin()), "add + relu"),
}


def and_more(tail, y, z):
    """Read a view of the tail, as the layers behind it may."""
    y = tail(y) if isinstance(tail, nn.Module) else tail(y, z)
    return (y.flatten(1) * 2).sin()


@pytest.mark.parametrize("name", FUSED)
def test_fused_spellings_give_what_the_model_gives(name):
    tail, detail = FUSED[name]
    model = Block(functools.partial(and_more, tail)).double()
    x, z = (t.double().requires_grad_() for t in draw())
    expected_model = copy.deepcopy(model)
    expected = expected_model(x.clone(), z.clone())
    pass_, gm, y = rewrite(model, x, z)
    assert [m.detail for m in pass_.matches] == [f"sync_batch_norm + {detail} over group ''"]
    assert not any("relu(" in op or "add(" in op for op in ops(gm))
    assert_close(y, expected)
    for leaf, want in zip((x, z), torch.autograd.grad(expected.sin().sum(), (x, z), allow_unused=True)):
        got = torch.autograd.grad(y.sin().sum(), leaf, retain_graph=True, allow_unused=True)[0]
        assert (got is None) == (want is None)
        if got is not None:
            assert_close(got, want, scale=8)
    for got, want in zip(model.buffers(), expected_model.buffers()):
        assert_close(got.double(), want.double(), dtype=torch.float64)


def test_a_batch_norm_in_evaluation_mode_is_named_beside_others():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.trained, self.frozen = nn.BatchNorm2d(3), nn.BatchNorm2d(3).eval()

        def forward(self, x):
            return self.frozen(self.trained(x))

    model, x = Both(), draw()[0]
    pass_, gm, _ = rewrite(model, x)
    [remark] = pass_.artifacts().remarks
    assert remark.startswith("sync_batchnorm: frozen (test_sync_batchnorm.py:") and "is in evaluation mode" in remark
    pass_.begin()
    assert pass_.artifacts().remarks is None
    assert rewrite(model.eval(), x)[0].artifacts().remarks is None  # as a whole: nobody expects more


@pytest.mark.parametrize("op", [torch.native_batch_norm, torch.ops.aten.native_batch_norm])
def test_a_batch_norm_that_stays_local_is_named(op):
    pass_, gm, _ = rewrite(lambda x: op(x, None, None, None, None, True, 0.1, 1e-5)[0], draw()[0])
    [remark] = pass_.artifacts().remarks
    assert "(test_sync_batchnorm.py:" in remark and "statistics of this rank alone" in remark
    assert pass_.matches == [] and pass_.why_no_match(gm) is None


NOT_FUSED = {
    "read twice": lambda y, z: y.relu() + y,
    "sum read twice": lambda y, z: (lambda s: s.relu() + s)(y + z),
    "no relu after the add": lambda y, z: (y + z).sin(),
    "broadcast residual": lambda y, z: (y + z[:1]).relu(),
    "other dtype": lambda y, z: (y + z.double()).relu(),
    "scaled add": lambda y, z: torch.add(y, z, alpha=2).relu(),
    "a number": lambda y, z: (y + 1).relu(),
    "itself": lambda y, z: (y + y).relu(),
    "relu6": lambda y, z: F.relu6(y),
    "residual in another layout": lambda y, z: (z.to(memory_format=torch.channels_last) + y).relu().permute(0, 2, 3, 1).view(4, -1),
    "residual overwritten": lambda y, z: iadd(z.sin(), y).relu(),
    "input overwritten before the relu": lambda y, z: (z.mul_(2), y.relu())[1] + z,
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_not_fused(name):
    model = Block(NOT_FUSED[name])
    x, z = draw()
    if name.startswith("input overwritten"):
        x = z  # what the batch norm reads is changed between it and its ReLU
    expected = copy.deepcopy(model)(x.clone(), z.clone()) if x is not z else None
    pass_, gm, y = rewrite(model, x, z)
    assert [m.detail for m in pass_.matches] == ["sync_batch_norm over group ''"]
    assert sum(op.startswith("apexfx.sync_batch_norm") for op in ops(gm)) == 1
    if expected is not None:
        assert_close(y, expected, dtype=torch.float32)


def test_downsample_keeps_the_order_of_batch_norms():
    """The later of two batch norms that meet in an add takes it in: neither moves past the other."""

    class Residual(Block):
        def forward(self, x, z):
            y = self.bn(x)
            return F.relu(y + self.down(z))

    model = Residual(None)
    x, z = draw()
    expected = copy.deepcopy(model)(x, z)
    pass_, gm, y = rewrite(model, x, z)
    details = {m.module: m.detail for m in pass_.matches}
    assert details == {"bn": "sync_batch_norm over group ''", "down": "sync_batch_norm + add + relu over group ''"}
    assert_close(y, expected)


def test_nothing_moves_past_a_second_use_of_the_same_buffers():
    class Twice(Block):
        def forward(self, x, z):
            y = self.bn(x)
            return F.relu(y + self.bn(z).sin())

    model = Twice(None)
    x, z = draw()
    expected_model = copy.deepcopy(model)
    expected_model(x, z)
    pass_, _, _ = rewrite(model, x, z)
    assert [m.detail for m in pass_.matches] == ["sync_batch_norm over group ''"] * 2
    for got, want in zip(model.buffers(), expected_model.buffers()):
        assert_close(got.double(), want.double(), dtype=torch.float32)


@pytest.mark.parametrize("norm", [
    nn.BatchNorm2d(3, affine=False),
    nn.BatchNorm2d(3, track_running_stats=False),
    nn.BatchNorm2d(3, momentum=0.3, eps=1e-3),
    nn.SyncBatchNorm(3),
], ids=["affine=False", "track_running_stats=False", "options", "SyncBatchNorm"])
def test_modules(norm):
    model = Block(lambda y, z: y, norm)
    x, z = draw()
    expected_model = copy.deepcopy(model)
    expected = expected_model(x, z)
    pass_, _, y = rewrite(model, x, z)
    assert len(pass_.matches) == 1
    assert_close(y, expected)
    for got, want in zip(model.buffers(), expected_model.buffers()):
        assert_close(got.double(), want.double(), dtype=torch.float32)


@pytest.mark.parametrize("call", [
    lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, True),
    lambda x, m, v, w, b: F.batch_norm(x, running_mean=m, running_var=v, weight=w, bias=b, training=True),
    lambda x, m, v, w, b: torch.batch_norm(x, w, b, m, v, True, 0.1, 1e-5, False),
    lambda x, m, v, w, b: torch.ops.aten.batch_norm.default(x, w, b, m, v, True, 0.1, 1e-5, False),
    lambda x, m, v, w, b: torch.ops.aten.batch_norm(x, w, b, m, v, True, 0.1, 1e-5, False),
], ids=["F.batch_norm", "keywords", "torch.batch_norm", "aten.batch_norm", "packet"])
def test_spellings(call):
    x = draw()[0]
    vectors = [v.clone() for v in torch.rand(4, 3)]
    expected_vectors = [v.clone() for v in vectors]
    expected = call(x, *expected_vectors)
    pass_, _, y = rewrite(call, x, *vectors)
    assert len(pass_.matches) == 1
    assert_close(y, expected)
    for got, want in zip(vectors, expected_vectors):
        assert_close(got, want)


def test_inside_a_checkpoint():
    model = Block(None)
    model.forward = lambda x, z: checkpoint(lambda x, z: F.relu(model.bn(x) + z).sin(), x, z, use_reentrant=False)
    x, z = draw()
    pass_, gm, y = rewrite(model.forward, x, z)
    assert [m.detail for m in pass_.matches] == ["sync_batch_norm + add + relu over group ''"]
    assert "tag_activation_checkpoint" in text(gm) and "apexfx.sync_batch_norm" in text(gm)
    assert_close(y, F.relu(F.batch_norm(x, None, None, training=True) + z).sin())


def test_eval_mode_must_not_fire():
    model = Block(lambda y, z: F.relu(y + z)).eval()
    pass_, gm, _ = rewrite(model, *draw())
    assert pass_.matches == [] and pass_.why_no_match(gm) is None
    assert any("batch_norm(" in op for op in ops(gm))


def test_no_batch_norm_says_so():
    pass_, gm, _ = rewrite(lambda x: x.relu(), draw()[0])
    assert pass_.matches == [] and "no batch norm" in pass_.why_no_match(gm)


def test_batch_norm_in_a_branch_is_refused():
    def model(x):
        return torch.cond(x.sum() > 0, lambda x: F.batch_norm(x, None, None, training=True), lambda x: x.sin(), (x,))

    with pytest.raises(BackendCompilerFailed, match="PassError.*inside a control flow"):
        rewrite(model, draw()[0])


def test_group_name_must_be_a_name():
    with pytest.raises(TypeError, match="group_name is 3"):
        SyncBatchnorm(group_name=3)
