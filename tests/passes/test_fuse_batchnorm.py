"""fuse_batchnorm: the printed graph, what is left alone, numbers, and what Inductor makes of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import apexfx
from apexfx._torch import has_kernel
from apexfx.graph.printing import format_graph
from apexfx.passes.fuse_batchnorm import LEAST_ELEMENTS, FuseBatchnorm
from apexfx.testing import assert_close
from tests.passes import batch_norm_graphs

# ruff: noqa: E501  printed graphs

SYNC = torch.ops.apexfx.sync_batch_norm.default
needs_kernel = pytest.mark.skipif(not has_kernel("apexfx::bn_forward", "CPU"), reason="the compiled CPU ops are not built")
pytestmark = needs_kernel


class Block(nn.Module):
    """Convolution, batch norm, ReLU, convolution, batch norm, and an add and a ReLU behind it."""

    def __init__(self, channels=8):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


def rewrite(model, *inputs, **options):
    return batch_norm_graphs.rewrite(model, *inputs, make=FuseBatchnorm, **options)


def test_printed_graph():
    pass_, gm, _ = rewrite(Block(), torch.randn(2, 8, 4, 4))
    assert_expected_inline(format_graph(gm, only="norm|relu|add"), """\
%1 = add_(%bn1.num_batches_tracked, 1) -> i64[]
%2 = apexfx.sync_batch_norm.default(%0, %bn1.weight, %bn1.bias, %bn1.running_mean, %bn1.running_var, 0.1, 1e-05, '', None, None, True) -> f32[2,8,4,4]
%4 = add_(%bn2.num_batches_tracked, 1) -> i64[]
%5 = apexfx.sync_batch_norm.default(%3, %bn2.weight, %bn2.bias, %bn2.running_mean, %bn2.running_var, 0.1, 1e-05, '', None, %x, True) -> f32[2,8,4,4]""")
    assert [match.detail for match in pass_.matches] == [
        "batch_norm + relu in one fused op, over this process's batch",
        "batch_norm + add + relu in one fused op, over this process's batch",
    ]


@pytest.mark.parametrize(("model", "options"), [
    (Block().eval(), {}),
    (Block(), {"dtype": torch.float64}),
    (Block(), {"least_elements": 2 * 8 * 4 * 4 + 1}),
    (nn.InstanceNorm2d(8, affine=True), {}),
], ids=["eval", "dtype", "smaller", "instance norm"])
def test_left_alone(model, options):
    dtype = options.pop("dtype", torch.float32)
    pass_, gm, _ = rewrite(model.to(dtype), torch.randn(2, 8, 4, 4, dtype=dtype), **options)
    assert not pass_.matches and not gm.graph.find_nodes(op="call_function", target=SYNC)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
def test_same_numbers(dtype, memory_format, residual):
    torch.manual_seed(0)
    norm, z = nn.BatchNorm2d(6), torch.randn(5, 6, 7, 3, dtype=dtype)
    twin = copy.deepcopy(norm)

    def forward(norm, x, z):
        y = norm(x)
        return F.relu(y + z if residual else y)

    x = torch.randn(5, 6, 7, 3, dtype=dtype).contiguous(memory_format=memory_format)
    got, expected = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
    pass_, _, y = rewrite(lambda x, z: forward(norm, x, z), got, z)
    assert len(pass_.matches) == 1
    # In float32, which rounds the half result once as the kernel does.
    exact = F.relu(twin(expected.float()) + z.float() if residual else twin(expected.float())).to(dtype)
    grad = torch.randn_like(y)
    y.backward(grad)
    exact.backward(grad)
    assert_close(y, exact)
    assert y.is_contiguous(memory_format=memory_format)
    assert_close(got.grad, expected.grad)
    assert norm.num_batches_tracked == twin.num_batches_tracked == 1
    assert_close(norm.running_mean, twin.running_mean)
    assert_close(norm.running_var, twin.running_var)
    assert_close(norm.weight.grad, twin.weight.grad)
    assert_close(norm.bias.grad, twin.bias.grad)


def test_a_reader_of_the_statistics_stays_behind_them():
    norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 3, 3)
    twin = copy.deepcopy(norm)

    def forward(norm, x):
        y = norm(x)
        seen = norm.running_mean * 2
        return F.relu(y), seen

    _, _, actual = rewrite(lambda x: forward(norm, x), x)
    for one, other in zip(actual, forward(twin, x)):
        assert_close(one, other)


@pytest.mark.long
def test_inductor_gets_the_op():
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 8, 12, 12)
    twin = copy.deepcopy(model)
    transformed = apexfx.transform(model, opt_level="O0")
    y, expected = transformed(x), twin(x)
    y.square().mean().backward()
    expected.square().mean().backward()
    assert_close(y, expected)
    for p, q in zip(model.parameters(), twin.parameters()):
        assert_close(p.grad, q.grad)
    [entry] = [p for g in transformed.report.graphs for s in g.stages for p in s.passes if p.name == "fuse_batchnorm"]
    assert len(entry.matches) == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_images_on_which_nothing_is_won_stay(dynamic):
    for batch, fires in ((7, False), (8, True)):  # 8 * 8 * 12 * 12 elements are the least
        x = torch.randn(batch, 8, 12, 12)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        pass_, gm, _ = rewrite(Block(), x, least_elements=LEAST_ELEMENTS)
        assert len(pass_.matches) == 2 * fires
        assert not dynamic or isinstance(next(iter(gm.graph.output_node().args[0])).meta["val"].shape[0], torch.SymInt)


def test_a_batch_norm_without_gradient_stays_without():
    norm = nn.BatchNorm2d(4)

    def forward(x):
        with torch.no_grad():
            y = norm(x)
        return F.relu(y) * norm.weight.sum()

    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    pass_, _, y = rewrite(forward, x)
    assert [match.detail for match in pass_.matches] == ["batch_norm in one fused op, over this process's batch"]
    y.sum().backward()
    assert x.grad is None and norm.bias.grad is None
    assert_close(norm.weight.grad, y.sum() / norm.weight.sum() * torch.ones(4), scale=8)


@pytest.mark.parametrize(("transformed", "shape"), [
    (torch.vmap, (3, 2, 4, 5)),
    (lambda f: torch.func.grad(lambda t: f(t).pow(3).sum()), (2, 4, 5)),
    (lambda f: torch.func.grad(lambda t: torch.func.grad(lambda s: f(s).pow(3).sum())(t).square().sum()), (2, 4, 5)),
], ids=["vmap", "grad", "grad of grad"])
def test_torch_func_keeps_torchs_norm(transformed, shape):
    torch.manual_seed(0)
    x, f = torch.randn(shape), transformed(lambda x: F.relu(F.batch_norm(x, None, None, torch.ones(4), None, True)))
    pass_, _, y = rewrite(f, x)
    assert not pass_.matches
    assert_close(y, f(x), scale=16)


def test_one_value_a_channel_is_left_to_torch():
    def forward(x):
        return torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)

    x = torch.randn(1, 4)
    pass_, _, y = rewrite(forward, x)
    assert not pass_.matches and torch.equal(y, forward(x))
