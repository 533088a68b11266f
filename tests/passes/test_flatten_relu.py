"""flatten_relu: the printed graph, what is left alone, bitwise numbers, and that backward keeps no mask."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import apexfx
from apexfx import passes
from apexfx.compiler import capture
from apexfx.config import TransformConfig
from apexfx.passes.flatten_relu import FlattenRelu
from tests.forward_graphs import compiled


class FeedForward(nn.Module):
    def __init__(self, width=6, p=0.0, act=F.relu):
        super().__init__()
        self.wide, self.narrow, self.p, self.act = nn.Linear(width, 8), nn.Linear(8, width), p, act

    def forward(self, x):
        return x + self.narrow(F.dropout(self.act(self.wide(x)), self.p, self.training))


class TwoReaders(FeedForward):
    def forward(self, x):
        h = torch.relu(self.wide(x))
        return self.narrow(h) * F.linear(h, self.narrow.weight).sigmoid()


class OtherReader(FeedForward):
    def forward(self, x):
        h = self.wide(x).relu()
        return self.narrow(h).sum() + h.mean()


def rewritten(model, *inputs, dynamic=None):
    """Return the graph after the pass, the report, and the result; running the pass again changes nothing."""
    torch._dynamo.reset()
    _, recorder = compiled(model, FlattenRelu, FlattenRelu, verify="each")
    run = torch.compile(model, backend=recorder, dynamic=dynamic, fullgraph=True)
    result = run(*inputs)
    first, second = recorder.reports[:2]
    assert not second.matches
    return recorder, first, result


def test_printed_graph():
    recorder, report, _ = rewritten(FeedForward(), torch.randn(2, 3, 6))
    assert_expected_inline(recorder.text("linear|relu|flatten|reshape|dropout"), """\
%0 = torch.linear(%x, %wide.weight, %wide.bias) -> f32[2,3,8]
%1 = torch.flatten(%0, 0, -2) -> f32[6,8]
%2 = torch.relu(%1) -> f32[6,8]
%3 = torch.linear(%2, %narrow.weight, %narrow.bias) -> f32[6,6]
%4 = torch.reshape(%3, [2, 3, 6]) -> f32[2,3,6]""")
    assert [match.detail for match in report.matches] == ["relu of 3 dimensions in front of 1 linear"]


@pytest.mark.parametrize(("model", "shape"), [
    (FeedForward(), (4, 6)),
    (FeedForward(act=F.gelu), (2, 3, 6)),
    (FeedForward(act=nn.ReLU(inplace=True)), (2, 3, 6)),
    (FeedForward(p=0.5), (2, 3, 6)),
    (OtherReader(), (2, 3, 6)),
    (nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 1)), (1, 2, 3, 3)),
], ids=["matrix", "gelu", "in place", "dropout", "another reader", "convolution"])
def test_left_alone(model, shape):
    recorder, report, _ = rewritten(model, torch.randn(shape))
    assert not report.matches and "flatten" not in recorder.text()


class VectorWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return F.linear(F.relu(x), self.weight)


class Mapped(FeedForward):
    def forward(self, x):
        return torch.func.vmap(lambda row: self.narrow(F.relu(self.wide(row))))(x)


@pytest.mark.parametrize("model, x", [
    (VectorWeight(), torch.randn(2, 3, 6)),
    (Mapped(), torch.randn(4, 2, 3, 6)),
    (FeedForward(), torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=torch.jagged)),
], ids=["a vector as weight", "inside of vmap", "nested"])
def test_what_it_cannot_flatten_still_compiles(model, x):
    torch._dynamo.reset()
    result, expected = apexfx.transform(model, opt_level="O0", inner="inductor")(x), model(x)
    pair = (result.values(), expected.values()) if x.is_nested else (result, expected)
    torch.testing.assert_close(*pair)


def test_dropout_that_is_off_in_eval():
    _, report, _ = rewritten(FeedForward(p=0.5).eval(), torch.randn(2, 3, 6))
    assert len(report.matches) == 1


@pytest.mark.parametrize("seed", range(8))
def test_bitwise_as_eager(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = rng.choice((FeedForward, TwoReaders))()
    twin = copy.deepcopy(model)
    x = torch.randn(*(rng.randint(1, 5) for _ in range(rng.randint(2, 3))), 6)
    if rng.random() < 0.5:
        x = x.transpose(0, 1)
    x, y = x.detach().requires_grad_(), x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    recorder, report, got = rewritten(model, x, dynamic=rng.choice((None, False)))
    expected = twin(y)
    got.square().sum().backward()
    expected.square().sum().backward()
    assert len(report.matches) == 1
    assert torch.equal(got, expected) and got.stride() == expected.stride()
    for a, b in zip((x, *model.parameters()), (y, *twin.parameters())):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dynamic_dims", [(0,), (0, 1)])
def test_dynamic_sizes(dynamic_dims):
    x = torch.randn(4, 3, 6)
    for dim in dynamic_dims:
        torch._dynamo.mark_dynamic(x, dim)
    model = FeedForward()
    _, report, got = rewritten(model, x)
    assert len(report.matches) == 1 and torch.equal(got, model(x))


@pytest.mark.parametrize("fires", [True, False])
def test_backward_keeps_no_mask(fires):
    saved = []

    def keep(graph, inputs):
        saved.extend(node.meta["val"].dtype for node in graph.graph.output_node().args[0] if node is not None)
        return graph.forward

    def backend(gm, example_inputs):
        capture.annotate(gm, example_inputs)
        if fires:
            FlattenRelu()(gm)
            gm.recompile()
        compiler = aot_autograd(fw_compiler=keep, bw_compiler=lambda graph, inputs: graph.forward,
                                partition_fn=min_cut_rematerialization_partition,
                                decompositions=torch._inductor.decomposition.select_decomp_table())
        return compiler(gm, example_inputs)

    torch._dynamo.reset()
    torch.compile(FeedForward(64), backend=backend)(torch.randn(16, 32, 64)).sum().backward()
    assert (torch.bool in saved) != fires


def test_asked_for_by_inductor_alone():
    context = passes.Context((), None, None, False)
    for inner in ("inductor", "eager"):
        names = [p.name for p in passes.schedule(TransformConfig(inner=inner), context)]
        assert ("flatten_relu" in names) == (inner == "inductor")
