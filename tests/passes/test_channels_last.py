"""channels_last: the graph, what is left alone, numbers, and that Inductor's code copies no activation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import apexfx
from apexfx import passes
from apexfx.graph import order
from apexfx.graph.mutation import storages
from apexfx.graph.nodes import value
from apexfx.graph.printing import format_graph
from apexfx.passes.channels_last import ChannelsLast

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
IMAGE, WIDE, POINT = (2, 4, 5, 5), (4, 4, 3, 3), (4, 4, 1, 1)


def convolution(x, w):
    return aten.convolution.default(x, w, None, [1, 1], [1, 1] if w.shape[-1] == 3 else [0, 0], [1, 1], False, [0, 0], 1)


def convolution_backward(grad, x, w):
    padding = [1, 1] if w.shape[-1] == 3 else [0, 0]
    return aten.convolution_backward.default(grad, x, w, [0], [1, 1], padding, [1, 1], False, [0, 0], 1, [True, True, False])


def twice(x, wide, point):
    """Return two convolutions with a relu between them, and their gradients."""
    hidden = aten.relu.default(convolution(x, wide))
    out = convolution(hidden, point)
    grad_hidden, grad_point, _ = convolution_backward(aten.cos.default(out), hidden, point)
    grad_x, grad_wide, _ = convolution_backward(aten.threshold_backward.default(grad_hidden, hidden, 0), x, wide)
    return out, grad_x, grad_wide, grad_point


def traced(run, *shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    return make_fx(run, tracing_mode="fake")(*tensors), tensors


def is_channels_last(node):
    return value(node).is_contiguous(memory_format=torch.channels_last)


def test_printed_graph():
    gm, tensors = traced(twice, IMAGE, WIDE, POINT)
    expected = gm(*tensors)
    pass_ = ChannelsLast()
    assert pass_(gm).modified
    assert_expected_inline(format_graph(gm, only="clone|convolution"), """\
%0 = aten.clone.default(%x_1, memory_format=torch.channels_last) -> f32[2,4,5,5]
%1 = aten.clone.default(%wide_1, memory_format=torch.channels_last) -> f32[4,4,3,3]
%2 = aten.convolution.default(%0, %1, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1) -> f32[2,4,5,5]
%4 = aten.convolution.default(%3, %point_1, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1) -> f32[2,4,5,5]
%6 = aten.convolution_backward.default(%5, %3, %point_1, [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
%11 = aten.convolution_backward.default(%10, %0, %1, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])""")
    assert [match.detail for match in pass_.matches] == ["(2, 4, 5, 5) once, for forward and backward",
                                                         "(4, 4, 3, 3) once, for forward and backward"]
    images = [node for node in gm.graph.nodes if isinstance(value(node), torch.Tensor) and node.op != "placeholder"]
    assert all(map(is_channels_last, images))
    gm.recompile()
    torch.testing.assert_close(gm(*tensors), expected, rtol=1e-5, atol=1e-4)  # sums in another order
    assert not ChannelsLast()(gm).modified


def test_images_of_one_channel_say_that_they_are_channels_last():
    def run(x, w):
        y = convolution(x, w)
        return y, convolution_backward(y, x, w)[1]

    gm, tensors = traced(run, (2, 1, 5, 5), (4, 1, 3, 3))
    expected = gm(*tensors)
    pass_ = ChannelsLast()
    assert pass_(gm).modified and [match.detail for match in pass_.matches] == ["(2, 1, 5, 5) as a view, without a copy"]
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert all(map(is_channels_last, convolutions)) and not gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    gm.recompile()
    results = gm(*tensors)
    assert results[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-4)  # sums in another order
    assert not ChannelsLast()(gm).modified


def test_images_of_one_channel_that_are_not_contiguous_are_copied():
    gm, _ = traced(lambda x, w: (convolution(x.mT, w),), (2, 1, 5, 5), (4, 1, 3, 3))
    pass_ = ChannelsLast()
    assert pass_(gm).modified and [match.detail for match in pass_.matches] == ["(2, 1, 5, 5) once, for forward and backward"]
    assert all(map(is_channels_last, gm.graph.find_nodes(op="call_function", target=aten.convolution.default)))


def test_gradients_in_a_bucket_lie_where_they_lay():
    def run(x, w):
        y = convolution(x, w)
        gradient = convolution_backward(y, x, w)[1]
        rows = aten.view.default(gradient, [1, -1])
        flat = torch.ops.apexfx.flatten_bucket.default([gradient], [0], gradient.numel(), torch.float32)
        return rows, aten.view.default(aten.mul_.Tensor(flat, 0.5), gradient.shape)

    gm, tensors = traced(run, IMAGE, WIDE)
    expected, before = gm(*tensors), order.rows(gm.graph)
    pass_ = ChannelsLast()
    assert pass_(gm).modified
    order.check(before, order.rows(gm.graph), pass_.name)
    *_, rows, flat, scaled, whole = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert (rows.target, whole.target) == (aten.reshape.default, aten.view.default)  # of what lies otherwise; of the bucket
    assert storages(value(flat)) == storages(value(scaled)) == storages(value(whole))
    gm.recompile()
    torch.testing.assert_close(gm(*tensors), expected, rtol=1e-5, atol=1e-4)  # sums in another order


def reads_strides(x, w):
    y = convolution(x, w)
    return aten.as_strided.default(y, [3], [1])


def draws(x, w):
    return aten.bernoulli.p(convolution(x, w), 0.5)


def of_three_dimensions(x, w):
    return aten.convolution.default(x, w, None, [1], [1], [1], False, [0], 1)


def channels_last_already(x, w):
    x, w = (aten.clone.default(t, memory_format=torch.channels_last) for t in (x, w))
    return convolution(x, w)


@torch.library.custom_op("apexfx_test::reads_memory", mutates_args=())
def reads_memory(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((3,), (1,)).clone()


@reads_memory.register_fake
def _(x):
    return x.new_empty(3)


@pytest.mark.parametrize(("run", "shapes"), [
    (reads_strides, (IMAGE, WIDE)), (draws, (IMAGE, WIDE)), (lambda x, w: reads_memory(convolution(x, w)), (IMAGE, WIDE)),
    (of_three_dimensions, ((2, 4, 5), (4, 4, 3))), (channels_last_already, (IMAGE, WIDE)), (aten.mm.default, ((2, 3), (3, 4)))],
    ids=["as_strided", "random", "another package", "1-d", "channels_last", "no convolution"])
def test_left_alone(run, shapes):
    gm, _ = traced(run, *shapes)
    before = format_graph(gm)
    assert not ChannelsLast()(gm).modified and format_graph(gm) == before


def test_numbers_that_are_drawn_by_a_size_keep_nothing_back():
    def drops(x, w):
        y = convolution(x, w)
        kept = aten.gt.Scalar(aten.rand.default(list(y.shape), device="cpu", pin_memory=False), 0.5)
        return kept, convolution_backward(aten.mul.Tensor(y, kept), x, w)[1]

    gm, tensors = traced(drops, IMAGE, WIDE)
    torch.manual_seed(0)
    expected = gm(*tensors)
    assert ChannelsLast()(gm).modified
    gm.recompile()
    torch.manual_seed(0)
    torch.testing.assert_close(gm(*tensors), expected, rtol=1e-5, atol=1e-4)


def test_left_alone_where_inductor_keeps_the_layout():
    with torch._inductor.config.patch(layout_optimization=False):
        assert not ChannelsLast()(traced(twice, IMAGE, WIDE, POINT)[0]).modified


def test_asked_for_by_a_compiled_step_alone():
    for is_train_step in (True, False):
        for inner in ("inductor", "eager"):
            context = passes.Context((), None, None, False, is_train_step=is_train_step)
            names = [p.name for p in passes.schedule(passes.TransformConfig(inner=inner), context)]
            assert ("channels_last" in names) == (is_train_step and inner == "inductor")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(8 * 16 * 16, 8)

    def features(self, x):
        hidden = F.relu(self.first(x))
        return F.relu(self.second(hidden) + hidden)


class Grouped(Residual):
    """Ops whose layout follows others: grouped, transposed, normalized, pooled, concatenated."""

    def __init__(self):
        super().__init__()
        self.groups, self.up = nn.Conv2d(16, 8, 3, padding=1, groups=4), nn.ConvTranspose2d(8, 8, 2, 2)
        self.norm = nn.GroupNorm(2, 8)

    def features(self, x):
        hidden = super().features(x)
        both = torch.cat([self.norm(hidden), x.flip(2)], 1)
        return F.max_pool2d(self.up(self.groups(both)), 2) + F.interpolate(F.avg_pool2d(hidden, 2), (16, 16))


def objective(model, x, y):
    features = model.features(x)
    return F.cross_entropy(model.head(features.flatten(1)), y), {"features": features, "last": features.transpose(1, 3)}


@pytest.mark.long
@pytest.mark.parametrize(("make", "options"), [(Residual, {}), (Grouped, {}), (Grouped, {"dynamic": True})],
                         ids=["residual", "grouped", "dynamic"])
def test_inductor_copies_no_activation(make, options):
    torch.manual_seed(0)
    model = make()
    batches = [(torch.randn(n, 8, 16, 16), torch.randint(8, (n,))) for n in (4, 6)]
    sources, results = {}, {}
    for inner in ("inductor", "eager"):
        own = copy.deepcopy(model)
        step = apexfx.train_step(own, objective=objective, optimizer=torch.optim.SGD(own.parameters(), lr=0.1), opt_level="O0",
                                 inner=inner, **options)
        (loss, rest), sources[inner] = run_and_get_code(step, *batches[0])
        more = [step(*batch)[0] for batch in batches[:2 if options else 1]]
        results[inner] = [loss, rest, more, own.state_dict()], [tensor.stride() for tensor in rest.values()]
    assert step.report.graphs and results["inductor"][1] == results["eager"][1]
    torch.testing.assert_close(results["inductor"][0], results["eager"][0], rtol=1e-4, atol=1e-5)
    if make is Residual:  # the features that are returned alone
        assert sources["inductor"][0].count("empty_strided_cpu((4, 8, 16, 16), (2048, 256, 16, 1)") == 1


@pytest.mark.long
@pytest.mark.parametrize("opt_level", [pytest.param("O0", marks=pytest.mark.long), "O2"])
def test_a_float32_gradient_is_laid_out_as_its_parameter(opt_level):
    torch.manual_seed(0)
    model = Residual()
    half = {} if opt_level == "O0" else {"dtype": torch.bfloat16}
    x, y = torch.randn(4, 8, 16, 16), torch.randint(8, (4,))
    states = []
    for inner in ("inductor", "eager"):
        own = copy.deepcopy(model)
        step = apexfx.train_step(own, objective=lambda model, x, y: F.cross_entropy(model.head(model.features(x).flatten(1)), y),
                                 optimizer=torch.optim.SGD(own.parameters(), lr=0.1), opt_level=opt_level, inner=inner, **half)
        step(x, y)
        states.append(own.state_dict())
        laid_out = [match.detail for match in step.report.matched("channels_last") if "parameter" in match.detail]
        assert laid_out == (["(8, 8, 3, 3) as its parameter lies"] if (inner, opt_level) == ("inductor", "O0") else [])
    torch.testing.assert_close(*states, **({"rtol": 1e-4, "atol": 1e-5} if opt_level == "O0" else {"rtol": 2e-2, "atol": 2e-3}))
