"""One policy, two executors: numbers and programs through a graph and through eager, dtypes and values to the bit.

`passes/test_precision_ops.py` does the same to every op of the rule table.
"""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from apexfx.amp.executor import CastExecutor
from apexfx.compiler.pipeline import Pipeline
from apexfx.config import HALVES
from apexfx.ops.sync_batch_norm import sync_batch_norm
from tests.forward_graphs import compiled, precision
from tests.passes.op_samples import Recording, call, graph_of, mask, x
from tests.tables import table

MIN, MAX = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


def in_graph(half, function, args, kwargs):
    gm, node, tensors = graph_of(function, args, kwargs)
    Pipeline([precision("O1", half)], verify="final").run("forward", gm)
    return Recording(gm, node).result(*tree_map(copied, tensors))


def in_eager(half, function, args, kwargs):
    args, kwargs = tree_map(copied, (args, kwargs))
    with CastExecutor(half):
        return function(*args, **kwargs)


def copied(a):
    return a.clone() if isinstance(a, Tensor) else a


def without_nan(a):
    return a.masked_fill(a.isnan(), 0)


def differences(graph, eager, *, values=True):
    graph, eager = tree_leaves(graph), tree_leaves(eager)
    if [a.dtype for a in graph if isinstance(a, Tensor)] != [b.dtype for b in eager if isinstance(b, Tensor)]:
        return f"graph {[getattr(a, 'dtype', a) for a in graph]}, eager {[getattr(b, 'dtype', b) for b in eager]}"
    same = [torch.equal(without_nan(a), without_nan(b)) if isinstance(a, Tensor) else a == b
            for a, b in zip(graph, eager, strict=True)]
    return "" if all(same) or not values else f"graph {graph}, eager {eager}"


# Numbers that are limits of float32, or beyond those of float16, in ops that add, compare, choose and store.
NUMBERS = {
    "add": call(torch.add, x, MIN), "sub": call(operator.sub, x, MAX), "mul": call(operator.mul, x, MAX),
    "div": call(operator.truediv, x, MAX), "rsub": call(Tensor.__rsub__, x, MIN), "maximum": call(torch.clamp, x, min=MIN),
    "clamp": call(torch.clamp, x, -1e6, 1e6), "where": call(torch.where, mask, x, MIN), "lt": call(torch.lt, x, MAX),
    "masked_fill": call(torch.masked_fill, x, mask, MIN), "masked_fill int": call(torch.masked_fill, x, mask, -10**6),
    "masked_fill_": call(Tensor.masked_fill_, x, mask, MIN), "fill_": call(Tensor.fill_, x, MIN),
    "full_like": call(torch.full_like, x, MIN), "new_full": call(Tensor.new_full, x, (2,), MIN),
    "full_like dtype": call(torch.full_like, x, MIN, dtype=torch.float32), "pad": call(F.pad, x, (1, 1), value=MIN),
    "threshold": call(F.threshold, x, 0.5, MIN), "nan_to_num": call(torch.nan_to_num, x, 0.0, MAX, MIN),
    "hardtanh": call(F.hardtanh, x, MIN, MAX), "scatter": call(torch.scatter, x, 0, torch.zeros(1, 4, dtype=torch.int64), MIN),
    "index_fill": call(torch.index_fill, x, 0, torch.tensor([1]), MIN), "softmax": call(torch.softmax, x, -1),
    "addcmul": call(torch.addcmul, x, x, x, value=MAX), "leaky_relu": call(F.leaky_relu, x - 0.5, MAX),
    "add in place": call(operator.iadd, x, MIN), "inf": call(torch.add, x, -float("inf")), "pow": call(torch.pow, x, MAX),
}  # fmt: skip


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_numbers_beyond_the_range_of_half(half):
    failures = {}
    for name, (function, *given) in NUMBERS.items():
        given = tree_map(lambda a: a.to(half) if isinstance(a, Tensor) and a.is_floating_point() else a, given)
        if different := differences(in_graph(half, function, *given), in_eager(half, function, *given)):
            failures[name] = different
    assert not failures


def additive(q):
    return torch.zeros(4, 4).masked_fill(torch.ones(4, 4).bool().triu(1), torch.finfo(q.dtype).min)


PROGRAMS = {
    "mask added": lambda q: F.softmax(q @ q.mT + torch.finfo(torch.float32).min * additive(q).ne(0), -1),
    "mask of attention": lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.full((4, 4), MIN)),
    "mask by keyword, some infinite": lambda q: F.scaled_dot_product_attention(
        q, q, q, attn_mask=additive(q).masked_fill(torch.ones(4, 4).bool().triu(2), -float("inf"))),
    "mask of baddbmm": lambda q: torch.baddbmm(additive(q)[None], q, q.mT),
    "mask, moved and scaled": lambda q: torch.baddbmm((torch.zeros(4, 4) - 1.0).mul(MAX).unsqueeze(0).expand(2, 4, 4), q, q.mT),
    "chosen": lambda q: q.float() @ q.float().mT,
    "chosen, through views": lambda q: q.float().T.T[:, :2] @ torch.chunk(q.float(), 2, -1)[0].mT,
    "chosen, on one side": lambda q: q.float() @ q.mT,
    "chosen twice": lambda q: q.double() @ q.float().mT.double(),
    "of the dtype of another": lambda q: (q @ q.mT).type_as(q) @ q.to(torch.float32),
    "the call names a dtype": lambda q: F.softmax(q @ q.mT, -1, dtype=torch.float32) @ q,
    "in place": lambda q: (q @ q.mT).add_(q.sum()).mul_(torch.ones(4, 4)),
    "inplace=True": lambda q: F.relu(q @ q.mT, inplace=True) + 1,
    "out=": lambda q: torch.exp(q, out=torch.empty(2, 4, 4)),
    "out= of two": lambda q: torch.max(q @ q.mT, 0, out=(torch.empty(4, 4), torch.empty(4, 4, dtype=torch.int64)))[0],
    "out=None": lambda q: torch.sub(q @ q.mT, q.sum() + 4096.0, out=None) + 4096.0,
    "out=None in float": lambda q: torch.exp(q @ q.mT, out=None),
    "a residual of batch norm": lambda q: sync_batch_norm(q @ q, torch.ones(4), torch.zeros(4), residual=q @ q.mT, relu=True),
    "its own residual": lambda q: sync_batch_norm(h := q + 1, torch.ones(4).bfloat16(), residual=h),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@table(1, "half", HALVES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, half):
    program = PROGRAMS[name]
    q = torch.randn(2, 4, 4) if "T.T" not in name and "views" not in name else torch.randn(4, 4)
    with CastExecutor(half):
        eager = program(q)
    in_graph, recorder = compiled(program, lambda: precision("O1", half))
    graph = in_graph(q)
    assert torch.equal(graph.double(), eager.double()), (graph, eager)
    inside = recorder.graphs[0].graph.output_node().args[0][0]
    while inside.target is torch.ops.aten._to_copy.default:
        inside = inside.args[0]  # what leaves a graph keeps the dtype it was captured with
    assert inside.meta["val"].dtype == eager.dtype
