"""onednn_products: the printed graph, what is left alone, the reports, and numbers."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from apexfx import passes
from apexfx.buckets.flops import node_flops
from apexfx.compiler.pipeline import Pipeline
from apexfx.graph.printing import format_graph
from apexfx.ops.onednn_mm import onednn_mm
from apexfx.passes.onednn_products import OnednnProducts
from apexfx.report.node_places import node_places
from apexfx.testing import assert_close
from tests.backward_graphs import record

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
pytestmark = needs_onednn


def layers():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7))


def rewritten(model, x, *, least_flops=0, verify="final"):
    return record(model, x, make_passes=lambda _: [OnednnProducts(least_flops=least_flops)], verify=verify)


def test_printed_graph():
    recorder = rewritten(layers(), torch.randn(4, 5))
    assert_expected_inline(format_graph(recorder.backward[0], only="mm"), """\
%1 = apexfx.onednn_mm.default(%tangents_1, %0) -> f32[4,6]
%3 = apexfx.onednn_mm.default(%2, %relu) -> f32[7,6]
%11 = apexfx.onednn_mm.default(%10, %primals_3) -> f32[6,5]""")
    [report] = recorder.reports[0].passes
    assert [match.detail for match in report.matches] == ["(4, 7) times (7, 6)", "(7, 4) times (4, 6)", "(6, 4) times (4, 5)"]


def test_a_product_stays_with_its_module():
    backward = rewritten(layers(), torch.randn(4, 5)).backward[0]
    module_of = node_places(backward).module_of
    products = backward.graph.find_nodes(op="call_function", target=torch.ops.apexfx.onednn_mm.default)
    assert [module_of[node.name] for node in products] == ["2", "2", "0"]


def test_its_flops_are_counted_as_those_of_a_product():
    recorder = rewritten(layers(), torch.randn(4, 5))
    found = recorder.backward[0].graph.find_nodes(op="call_function", target=torch.ops.apexfx.onednn_mm.default)
    assert [node_flops(node) for node in found] == [2 * 4 * 7 * 6, 2 * 7 * 4 * 6, 2 * 6 * 4 * 5]
    with FlopCounterMode(display=False) as counter:
        onednn_mm(torch.randn(4, 7), torch.randn(7, 6))
    assert counter.get_total_flops() == 2 * 4 * 7 * 6


def test_twice_equals_once():
    recorder = rewritten(layers(), torch.randn(4, 5))
    before = format_graph(recorder.backward[0])
    report = Pipeline(recorder.passes).run("backward", recorder.backward[0]).passes[0]
    assert format_graph(recorder.backward[0]) == before and not report.matches


@pytest.mark.parametrize(("dtype", "least_flops"), [(torch.float32, 2 * 4 * 7 * 6 + 1), (torch.bfloat16, 0), (torch.float64, 0)])
def test_left_alone(dtype, least_flops):
    recorder = rewritten(layers().to(dtype), torch.randn(4, 5, dtype=dtype), least_flops=least_flops)
    assert not recorder.reports[0].passes[0].matches


def test_asked_for_where_onednn_is_wider(monkeypatch):
    context = passes.Context((), None, None, False)
    for wider in (True, False):
        monkeypatch.setattr(passes, "onednn_is_wider", lambda wider=wider: wider)
        for inner in ("inductor", "eager"):
            names = [p.name for p in passes.schedule(passes.TransformConfig(inner=inner), context)]
            assert ("onednn_products" in names) == (wider and inner == "inductor")


@pytest.mark.parametrize("seed", range(6))
def test_gradients_as_eager(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [rng.randint(1, 40) for _ in range(4)]
    model = nn.Sequential(*(layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.Tanh())))
    twin, shape = copy.deepcopy(model).double(), [rng.randint(1, 9) for _ in range(rng.randint(1, 2))]
    x = torch.randn(*shape, sizes[0])
    recorder = rewritten(model, x, verify="each")
    twin(x.double()).square().mean().backward()
    assert recorder.reports[0].passes[0].matches
    for p, q in zip(model.parameters(), twin.parameters()):
        assert_close(p.grad, q.grad.float())


def _matrix(rng, rows, columns):
    kind = rng.choice(("rows", "columns", "sliced", "expanded", "strided"))
    if kind == "columns":
        return torch.randn(columns, rows).t()
    if kind == "sliced":
        return torch.randn(rows, columns + 3)[:, 1:columns + 1]
    if kind == "expanded":
        return torch.randn(1, columns).expand(rows, columns)
    return torch.randn(rows, 2 * columns)[:, ::2] if kind == "strided" else torch.randn(rows, columns)


@pytest.mark.parametrize("seed", range(20))
def test_the_op_takes_any_strides(seed):
    rng = random.Random(seed)
    rows, inner, columns = (rng.choice((0, 1, 2, 17, 64)) for _ in range(3))
    a, b = _matrix(rng, rows, inner), _matrix(rng, inner, columns)
    expected = (a.double() @ b.double()).float()
    assert_close(onednn_mm(a, b), expected)


def test_the_op_by_torchs_own_checks():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    torch.library.opcheck(torch.ops.apexfx.onednn_mm.default, (a, b))
    with pytest.raises(ValueError, match=r"onednn_mm: a is torch.float32 \[3, 4\] on cpu and b torch.float32 \[3, 4\] on cpu"):
        onednn_mm(a, a)
