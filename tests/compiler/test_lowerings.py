"""What Inductor makes of flatten_bucket and the backward of batch norms: the ops' own values, and no copy of a gradient."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from apexfx.compiler import lowerings
from apexfx.ops.bucket import flatten_bucket
from tests.tables import table


def compiled(function, *inputs):
    """Return what Inductor's code returns, and the body of its `call`."""
    torch._dynamo.reset()
    lowerings.register()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        result, codes = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    return result, codes[-1][codes[-1].index("def call("):]


@pytest.mark.long
def test_products_are_written_into_their_slots():
    def gradients(a, b, c):
        return flatten_bucket([a.t() @ b, c.sum(0), b.t() @ c], [0, 16, 24], 64, torch.float32)

    inputs = [torch.randint(-4, 5, (6, width)).float() for width in (3, 5, 8)]  # any order of summing is exact
    flat, code = compiled(gradients, *inputs)
    assert torch.equal(flat, gradients(*inputs))
    [buffer] = re.findall(r"(\w+) = empty_strided_cpu\(\(64, \)", code)
    slots = re.findall(rf"(\w+) = reinterpret_tensor\({buffer}, \((3, 5|5, 8)\)", code)
    assert sorted(re.findall(r"extern_kernels\.mm\(.*out=(\w+)\)", code)) == sorted(name for name, _ in slots)
    assert code.count("empty_strided_cpu") == 1  # no product has memory of its own


@pytest.mark.long
@pytest.mark.parametrize("reads_first", [False, True])
def test_what_others_read_keeps_its_own_memory(reads_first):
    def gradients(a, b):
        product = a @ b
        early = product * 2 if reads_first else None
        flat = flatten_bucket([product, b], [0, 16], 32, torch.float32)
        flat.mul_(3)
        return flat, early if reads_first else product * 2, product

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    for got, expected in zip(compiled(gradients, *inputs)[0], gradients(*inputs)):
        assert torch.equal(got, expected)


def _piece(kind, shape):
    """Return a gradient of `shape` as backward might leave it: a graph input, a product, a sum, a view, transposed."""
    if kind == "product":
        return lambda x: torch.ones(shape[0], 3) @ x.flatten()[: 3 * shape[-1]].view(3, shape[-1])
    made = {"input": lambda x: x, "pointwise": lambda x: x.relu() + 1, "view": lambda x: (x * 2).view(-1).view(shape),
            "transposed": lambda x: (x.t() + 1).t(), "sum": lambda x: torch.stack([x, x]).sum(0)}
    return made[kind]


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 12))])
def test_random_buckets(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64))
    inputs, makers, offsets, end = [], [], [], rng.choice((0, 4))
    for _ in range(rng.randint(1, 6)):
        shape = rng.randint(3, 9), rng.randint(1, 9)
        inputs.append(torch.randn(shape, dtype=dtype))
        kind = rng.choice(("product" if dtype == torch.float32 else "input", "input", "pointwise", "view", "transposed", "sum"))
        makers.append(_piece(kind, shape) if kind != "product" or shape[0] >= 3 else _piece("input", shape))
        offsets.append(end)
        end += inputs[-1].numel() + rng.choice((0, 0, 3))
    order = rng.sample(range(len(inputs)), len(inputs))

    def gradients(*inputs):
        made = [make(x) for make, x in zip(makers, inputs)]
        return flatten_bucket([made[i] for i in order], [offsets[i] for i in order], end + seed % 3, dtype)

    assert torch.equal(compiled(gradients, *inputs)[0], gradients(*inputs))


@table(1, ("dtype", "memory_format"), [
    (torch.float32, torch.channels_last), (torch.bfloat16, torch.contiguous_format), (torch.float64, torch.contiguous_format)])
def test_relu_backward_is_bitwise_and_joins_its_neighbours(dtype, memory_format):
    def backward(a, b, y):
        return torch.ops.apexfx.bn_relu_backward.default(a + b, y)

    torch.manual_seed(0)
    a, b, y = (torch.randn(3, 5, 4, 7, dtype=dtype).to(memory_format=memory_format) for _ in range(3))
    y[0, :, 0, 0] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")], dtype=dtype)
    got, code = compiled(backward, a, b, y)
    expected = backward(a, b, y)
    assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())
    assert "torch.ops" not in code and code.count("empty_strided_cpu") == 1 and got.is_contiguous(memory_format=memory_format)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "dynamic"), [
    ("channels_last", True), *(pytest.param(layout, dynamic, marks=pytest.mark.long) for layout, dynamic in (
        ("contiguous", False), ("permuted", False), ("contiguous", True), ("channels_last", False), ("permuted", True)))])
def test_a_gradient_is_computed_in_the_layout_of_the_batch_norm(layout, dynamic):
    def gradients(grad, x, weight, bias):
        x = (x + 1).permute(0, 3, 1, 2) if layout == "permuted" else x + 1
        _, stats = torch.ops.apexfx.bn_forward(x, weight, bias, None, 1e-5, True)
        return torch.ops.apexfx.bn_backward(grad.cumsum(0) * 2, x, stats, weight, bias, 1e-5, True)

    grad, x = torch.randn(4, 6, 5, 5), torch.randn((4, 5, 5, 6) if layout == "permuted" else (4, 6, 5, 5))
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(grad, 0)
    inputs = grad, x, torch.rand(6), torch.rand(6)
    result, code = compiled(gradients, *inputs)
    assert all(map(torch.equal, result, gradients(*inputs)))
    made = re.findall(r"empty_strided_cpu\(\((?:4|s\d+), 6, 5, 5\), \(150, ([^)]*)\)", code)
    assert made[-1] == ("25, 5, 1" if layout == "contiguous" else "1, 30, 6")
