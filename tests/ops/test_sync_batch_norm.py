"""sync_batch_norm on one process: values, gradients, running buffers, traced graphs, checkpointing, bad arguments."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from apexfx._torch_compilers import aot_autograd
from apexfx.graph.printing import format_graph
from apexfx.ops.sync_batch_norm import group_name, sync_batch_norm
from apexfx.testing import assert_close
from tests.ops.test_batch_norm import DTYPES, LAYOUTS, draw

SHAPES = ((5, 7), (4, 8, 16), (3, 5, 7, 9), (2, 3, 2, 3, 4))


def differentiate(function, tensors, grad):
    """Return the value of `function` at fresh leaves, and the gradient of each leaf."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    return y, torch.autograd.grad(y, leaves, grad)


def full_batch(x, weight, bias, residual=None, *, relu=False, running=(None, None), momentum=0.1):
    """The oracle: torch's own batch norm, in the dtype it is given."""
    y = F.batch_norm(x, *running, weight, bias, True, momentum)
    y = y if residual is None else y + residual
    return y.relu() if relu else y


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_float64(shape, dtype, layout):
    x, grad, residual, weight, bias = draw(shape, dtype, layout)
    for relu, extra in itertools.product((False, True), ((), (residual,))):
        tensors = (x, weight, bias, *extra)
        running = torch.zeros(shape[1]), torch.ones(shape[1])
        expected_running = [r.double() for r in running]

        def op(x, weight, bias, residual=None):
            return sync_batch_norm(x, weight, bias, *running, residual=residual, relu=relu)

        def oracle(*wide):
            return full_batch(*wide, relu=relu, running=expected_running)

        y, grads = differentiate(op, tensors, grad)
        wide_y, wide_grads = differentiate(oracle, [t.double() for t in tensors], grad.double())
        assert y.dtype == dtype and y.stride() == torch.empty_like(x).stride()
        assert_close(y, wide_y, scale=4)  # terms of up to 4 that may cancel
        kept = ((y > 0) == (wide_y > 0)).all() if relu else True  # half input may round a tiny value to 0
        for leaf, got, want in zip(tensors, grads, wide_grads):
            assert got.dtype == leaf.dtype and got.shape == leaf.shape
            if kept:
                assert_close(got, want, dtype=dtype, scale=4)  # sums over the batch
        for got, want in zip(running, expected_running):
            assert_close(got, want, dtype=torch.float32)


@pytest.mark.parametrize("parameters", [torch.float16, torch.float32, None], ids=str)
@pytest.mark.parametrize("buffers", [torch.float16, torch.float64, None], ids=str)
def test_parameter_and_buffer_dtypes(parameters, buffers):
    x, grad, _, weight, bias = draw((6, 4, 5), torch.float16)
    affine = () if parameters is None else (weight.to(parameters), bias.to(parameters))
    running = (None, None) if buffers is None else (torch.zeros(4, dtype=buffers), torch.ones(4, dtype=buffers))
    wide_running = [None if r is None else r.double() for r in running]

    def op(x, weight=None, bias=None):
        return sync_batch_norm(x, weight, bias, *running)

    def oracle(x, weight=None, bias=None):
        return full_batch(x, weight, bias, running=wide_running)

    y, grads = differentiate(op, (x, *affine), grad)
    wide_y, wide_grads = differentiate(oracle, [t.double() for t in (x, *affine)], grad.double())
    assert_close(y, wide_y)
    for got, want, leaf in zip(grads, wide_grads, (x, *affine)):
        assert got.dtype == leaf.dtype
        assert_close(got, want, scale=4)
    for got, want in zip(running, wide_running):
        if got is not None:
            assert_close(got, want)


def test_wider_residual_is_added_in_its_own_dtype():
    x, grad, residual, weight, bias = draw((6, 4, 5), torch.float16)
    tensors, grad = (x, weight, bias, residual.float()), grad.float()
    y, grads = differentiate(lambda x, w, b, r: sync_batch_norm(x, w, b, residual=r, relu=True), tensors, grad)
    want, wanted = differentiate(lambda x, w, b, r: (sync_batch_norm(x, w, b) + r).relu(), tensors, grad)
    assert y.dtype == torch.float32 and torch.equal(y, want)
    assert all(torch.equal(got, expected) for got, expected in zip(grads, wanted))


def test_cumulative_average_equals_torch():
    torch.manual_seed(0)
    module = torch.nn.BatchNorm1d(3, momentum=None)
    mean, var, tracked = torch.zeros(3), torch.ones(3), torch.tensor(0)
    for _ in range(4):
        x = torch.randn(8, 3)
        tracked += 1
        y = sync_batch_norm(x, module.weight, module.bias, mean, var, momentum=None, num_batches_tracked=tracked)
        assert_close(y, module(x))
    assert_close(mean, module.running_mean)
    assert_close(var, module.running_var)


def test_empty_batch():
    x, weight, bias = torch.zeros(0, 3, 4), torch.rand(3), torch.rand(3)
    running = torch.rand(3), torch.rand(3)
    before = [r.clone() for r in running]
    y, grads = differentiate(lambda *t: sync_batch_norm(*t, *running, relu=True), (x, weight, bias), x)
    assert y.shape == x.shape and grads[0].shape == x.shape
    assert all(torch.equal(g, torch.zeros(3)) for g in grads[1:])
    assert all(torch.equal(r, b) for r, b in zip(running, before))


@pytest.mark.parametrize("options", [(), (None, None, 0.1, 1e-5, "", None, "residual", True)], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck(dtype, options):
    x, _, residual, weight, bias = draw((3, 4, 5), dtype)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    running = torch.zeros(4), torch.ones(4)
    options = [residual if o == "residual" else o for o in options] or [*running, 0.1, 1e-5, ""]
    torch.library.opcheck(torch.ops.apexfx.sync_batch_norm.default, (*tensors, *options))


def captured(function, *inputs):
    """Return {"dynamo", "forward", "backward": text} and the loss, of `function` compiled for aot_eager."""
    text = {}

    def keep(name, only):
        def compiler(gm, _):
            text[name] = format_graph(gm, only=only)
            return make_boxed_func(gm.forward)

        return compiler

    def backend(gm, example_inputs):
        for node in gm.graph.nodes:
            node.meta["val"] = node.meta.get("example_value")
        text["dynamo"] = format_graph(gm, only="apexfx|checkpoint")
        return aot_autograd(fw_compiler=keep("forward", "apexfx"), bw_compiler=keep("backward", "apexfx"))(gm, example_inputs)

    torch.compile(function, backend=backend, fullgraph=True)(*inputs).sum().backward()
    return text


def test_one_node_in_the_captured_graph_and_three_in_the_traced_ones():
    x, weight, bias = torch.randn(4, 3, 5), torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    running = torch.zeros(3), torch.ones(3)
    text = captured(lambda x: sync_batch_norm(x * weight[:, None], weight, bias, *running), x)
    assert text["dynamo"].count("\n") == 0 and "apexfx.sync_batch_norm.default" in text["dynamo"]
    calls = {name: [line.split(" = ")[1].split("(")[0] for line in text[name].splitlines()] for name in text}
    assert calls["forward"] == ["apexfx.bn_forward.default", "apexfx.bn_running_stats.default"]
    assert calls["backward"] == ["apexfx.bn_backward.default"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_equals_eager_bitwise_with_a_dynamic_batch(backend):
    weight, bias = torch.rand(3), torch.rand(3)

    def run(function):
        running = torch.zeros(3), torch.ones(3)
        results = []
        for batch in (4, 6, 9):
            generator = torch.Generator().manual_seed(batch)
            leaves = [torch.randn(batch, 3, 5, generator=generator) for _ in range(2)] + [weight, bias]
            leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
            for leaf in leaves[:2]:
                torch._dynamo.mark_dynamic(leaf, 0)
            y = function(*leaves, running)
            results += [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape, generator=generator))]
        return [*results, *running]

    def fused(x, residual, weight, bias, running):
        return sync_batch_norm(x, weight, bias, *running, residual=residual, relu=True)

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(fused, backend=counter, fullgraph=True)
    for got, want in zip(run(compiled), run(fused), strict=True):
        assert torch.equal(got, want)
    assert counter.frame_count == 1


def test_checkpointing_updates_running_buffers_once():
    x, weight, bias = torch.randn(4, 3, 5), torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    running = torch.zeros(3), torch.ones(3)
    expected = [r.clone() for r in running]
    grads = torch.autograd.grad(full_batch(x, weight, bias, running=expected).sin().sum(), (weight, bias))

    def block(x):
        return sync_batch_norm(x, weight, bias, *running).sin()

    text = captured(lambda x: checkpoint(block, x, use_reentrant=False), x)
    assert "checkpoint" in text["dynamo"] and "bn_forward" in text["backward"]  # it is computed again there
    for got, want in zip((*running, weight.grad, bias.grad), (*expected, *grads)):
        assert_close(got, want, scale=4)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5)])
def test_derivatives_of_derivatives(shape, relu):
    x, residual = torch.randn(2, *shape, dtype=torch.float64).requires_grad_().unbind()
    weight, bias = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for added in (None, residual):
        found = []
        for ours in (True, False):
            if ours:
                y = sync_batch_norm(x, weight, bias, residual=added, relu=relu)
            else:
                dims, of_channels = [d for d in range(x.dim()) if d != 1], (-1, *(1 for _ in shape[2:]))
                centered = x - x.mean(dims, keepdim=True)
                y = centered * (centered.square().mean(dims, keepdim=True) + 1e-5).rsqrt()  # torch's third derivative is wrong
                y = y * weight.view(of_channels) + bias.view(of_channels) + (0.0 if added is None else added)
                y = y.relu() if relu else y
            derivatives = y,
            for _ in range(3):
                of = sum(d.sin().sum() for d in derivatives)
                derivatives = torch.autograd.grad(of, (x, weight, bias), create_graph=True)
            found.append(derivatives)
        torch.testing.assert_close(*found)


class Backwards(TorchDispatchMode):
    """Keeps what every bn_backward is given."""

    def __init__(self):
        super().__init__()
        self.arguments = []

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        if function is torch.ops.apexfx.bn_backward.default:
            self.arguments.append(arguments)
        return function(*arguments, **(kwargs or {}))


@pytest.mark.parametrize("needs", [n for n in itertools.product((False, True), repeat=4) if any(n)], ids=str)
def test_gradients_of_whatever_needs_them(needs):
    x, grad, residual, weight, bias = draw((3, 4, 5), torch.float64)
    tensors = [t.requires_grad_(needed) for t, needed in zip((x, weight, bias, residual), needs)]

    def block(x, weight, bias, residual):
        return sync_batch_norm(x, weight, bias, residual=residual, relu=True)

    torch.autograd.gradcheck(block, tensors)
    with Backwards() as backwards:
        got = torch.autograd.grad(block(*tensors), [t for t in tensors if t.requires_grad], grad)
    for arguments in backwards.arguments:
        assert arguments[7:] == (() if needs[0] else (False,))  # a default is left out
    everything = differentiate(block, (x, weight, bias, residual), grad)[1]
    assert len(backwards.arguments) == 1
    for gradient, want in zip(got, itertools.compress(everything, needs), strict=True):
        assert torch.equal(gradient, want)


def test_frozen_input_is_said_in_the_graph():
    x, weight, bias = torch.randn(4, 3), torch.rand(3, requires_grad=True), torch.rand(3)
    text = captured(lambda x: sync_batch_norm(x, weight, bias), x)["backward"]
    assert text.count("bn_backward") == 1 and text.strip().endswith("1e-05, False, False)")  # relu, needs_x


def test_group_name_is_empty_without_other_ranks():
    assert group_name() == ""


@pytest.mark.parametrize("change, error, message", [
    ({"x": torch.zeros(4, 3, dtype=torch.int32)}, TypeError, "x is torch.int32"),
    ({"x": torch.zeros(4)}, ValueError, "x has shape"),
    ({"x": torch.zeros(1, 3)}, ValueError, "more than 1 value per channel"),
    ({"weight": torch.zeros(4)}, ValueError, "weight has shape"),
    ({"bias": torch.zeros(3, dtype=torch.int32)}, TypeError, "bias is torch.int32"),
    ({"running_var": None}, ValueError, "both or neither"),
    ({"residual": torch.zeros(3)}, ValueError, "residual is torch.float32 of"),
    ({"residual": torch.zeros(4, 3).int()}, ValueError, "residual is torch.int32"),
    ({"momentum": None}, ValueError, "num_batches_tracked"),
    ({"eps": -1.0}, ValueError, "eps is -1.0"),
], ids=lambda value: str(list(value)[0]) if isinstance(value, dict) else None)
def test_bad_arguments(change, error, message):
    arguments = {"x": torch.zeros(4, 3), "weight": torch.ones(3), "bias": torch.zeros(3),
                 "running_mean": torch.zeros(3), "running_var": torch.ones(3), **change}  # fmt: skip
    with pytest.raises(error, match=message):
        sync_batch_norm(**arguments)
