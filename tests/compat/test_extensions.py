"""fused_layer_norm_cuda, fused_dense_cuda, mlp_cuda and syncbn as scripts call them, against autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from apexfx.compat import fused_dense_cuda, fused_layer_norm_cuda, mlp_cuda, syncbn
from apexfx.testing import assert_close

HALF = torch.bfloat16


def draw(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def exact(function, grad, *tensors):
    """Return the output of `function` in float64 and its gradients."""
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return output, *torch.autograd.grad(output, leaves, grad.double())


def compare(actual, expected, **options):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected):
        assert_close(ours, theirs, **options)


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", [(7,), (2, 3)], ids=str)
def test_layer_norm(shape, dtype, memory_efficient):
    x, dy, weight, bias = draw((5, 2, *shape), (5, 2, *shape), shape, shape, dtype=dtype)
    weight = weight.abs() + 0.5
    expected = exact(lambda x, w, b: F.layer_norm(x, shape, w, b), dy, x, weight, bias)
    output, mean, invvar = fused_layer_norm_cuda.forward_affine(x, shape, weight, bias, 1e-5)
    assert output.dtype == dtype and mean.shape == invvar.shape == (10,) and mean.dtype == torch.float32
    saved = (None, invvar, output) if memory_efficient else (mean, invvar, x)
    grads = fused_layer_norm_cuda.backward_affine(dy, *saved, shape, weight, bias, 1e-5, memory_efficient)
    compare([output, *grads], expected, dtype=dtype, scale=8)  # sums of 10 terms
    plain = exact(lambda x: F.layer_norm(x, shape), dy, x)
    output, mean, invvar = fused_layer_norm_cuda.forward(x, shape, 1e-5)
    saved = (None, invvar, output) if memory_efficient else (mean, invvar, x)
    compare([output, fused_layer_norm_cuda.backward(dy, *saved, shape, 1e-5, memory_efficient)], plain, dtype=dtype, scale=8)


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_rms_norm(dtype, memory_efficient):
    x, dy, weight = draw((5, 7), (5, 7), (7,), dtype=dtype)
    weight = weight.abs() + 0.5
    expected = exact(lambda x, w: F.rms_norm(x, (7,), w, 1e-5), dy, x, weight)
    output, invvar = fused_layer_norm_cuda.rms_forward_affine(x, (7,), weight, 1e-5)
    saved = (invvar, output) if memory_efficient else (invvar, x)
    grads = fused_layer_norm_cuda.rms_backward_affine(dy, *saved, (7,), weight, 1e-5, memory_efficient)
    compare([output, *grads], expected, dtype=dtype, scale=8)
    plain = exact(lambda x: F.rms_norm(x, (7,), None, 1e-5), dy, x)
    output, invvar = fused_layer_norm_cuda.rms_forward(x, (7,), 1e-5)
    saved = (invvar, output) if memory_efficient else (invvar, x)
    compare([output, fused_layer_norm_cuda.rms_backward(dy, *saved, (7,), 1e-5, memory_efficient)], plain, dtype=dtype, scale=8)


def test_mixed_norms_have_the_dtype_of_their_weight():
    x, weight, bias = draw((5, 7), (7,), (7,))
    for output, *_ in (fused_layer_norm_cuda.forward_affine_mixed_dtypes(x.to(HALF), (7,), weight, bias, 1e-5),
                       fused_layer_norm_cuda.rms_forward_affine_mixed_dtypes(x.to(HALF), (7,), weight, 1e-5)):
        assert output.dtype == torch.float32


def test_dense():
    x, w1, b1, w2, b2, dy = draw((5, 7), (3, 7), (3,), (2, 3), (2,), (5, 2))
    hidden = fused_dense_cuda.linear_bias_forward(x, w1, b1)
    grads = fused_dense_cuda.linear_bias_backward(hidden, w2, dy)
    compare([fused_dense_cuda.linear_bias_forward(hidden, w2, b2), *grads], exact(F.linear, dy, hidden, w2, b2), scale=4)
    output1, output2, gelu_in = fused_dense_cuda.linear_gelu_linear_forward(x, w1, b1, w2, b2)
    grads = fused_dense_cuda.linear_gelu_linear_backward(x, gelu_in, output1, w1, w2, dy)
    expected = exact(lambda x, w1, b1, w2, b2: F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2),
                     dy, x, w1, b1, w2, b2)  # fmt: skip
    compare([output2, *grads], expected, scale=4)


@pytest.mark.parametrize("bias", [0, 1])
def test_mlp(bias):
    x, w1, w2, b1, b2, dy = draw((5, 7), (3, 7), (2, 3), (3,), (2,), (5, 2))
    inputs = [x, w1, w2, *([b1, b2] if bias else [])]
    expected = exact(lambda x, w1, w2, b1=None, b2=None: F.linear(F.linear(x, w1, b1).relu(), w2, b2).relu(), dy, *inputs)
    outputs = mlp_cuda.forward(bias, 1, inputs)
    compare([outputs[0], *mlp_cuda.backward(bias, 1, dy, outputs, inputs)], expected, scale=4)


@pytest.mark.parametrize("c_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_syncbn_over_two_uneven_ranks(dtype, c_last):
    """The pieces in the order in which Apex's SyncBatchNorm calls them, against one batch norm of the whole batch."""
    x, dy, z = draw(*[(7, 3, 4, 5)] * 3, dtype=dtype)
    weight, bias = draw((3,), (3,))
    move, name = (lambda t: t.movedim(1, -1).contiguous(), "{}_c_last") if c_last else (lambda t: t, "{}")
    call = {each: getattr(syncbn, name.format(each)) for each in (
        "welford_mean_var", "batchnorm_forward", "reduce_bn", "batchnorm_backward")}  # fmt: skip
    ranks = [slice(0, 2), slice(2, 7)]
    means, variances = zip(*(call["welford_mean_var"](move(x[rows])) for rows in ranks))
    count = torch.tensor([2 * 20, 5 * 20], dtype=torch.int32)
    mean, var, inv_std = syncbn.welford_parallel(torch.stack(means), torch.stack(variances), count, 1e-5)
    assert mean.dtype == var.dtype == inv_std.dtype == torch.float32
    compare([mean, var], [x.double().mean((0, 2, 3)), x.double().var((0, 2, 3))], scale=4)

    def forward(rows, fuse_relu=False, residual=None):
        if c_last:
            return call["batchnorm_forward"](move(x[rows]), residual, mean, inv_std, weight, bias, fuse_relu)
        return call["batchnorm_forward"](x[rows], mean, inv_std, weight, bias)

    y, dx, dweight, dbias = exact(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), dy, x, weight, bias)
    parts = [call["reduce_bn"](move(dy[rows]), move(x[rows]), mean, inv_std, weight) for rows in ranks]
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = (sum(each) for each in zip(*parts))
    compare([grad_weight, grad_bias], [dweight, dbias], dtype=dtype, scale=16)  # sums of 140 terms
    for rows in ranks:
        ours = call["batchnorm_backward"](move(dy[rows]), move(x[rows]), mean, inv_std, weight, sum_dy, sum_dy_xmu, count)
        assert ours.dtype == dtype and ours.is_contiguous()
        compare([forward(rows), ours], [move(y[rows]), move(dx[rows])], dtype=dtype, scale=8)
    if c_last:
        activated = forward(ranks[1], True, move(z[ranks[1]]))
        compare([activated], [move(torch.relu(y + z.double())[ranks[1]])], dtype=dtype, scale=8)
        masked = syncbn.relu_bw_c_last(move(dy[ranks[1]]), move(x[ranks[1]]), move(z[ranks[1]]), mean, inv_std, weight, bias)
        assert torch.equal(masked, move(dy[ranks[1]]).masked_fill(activated == 0, 0))


def test_syncbn_without_a_weight():
    x, dy = draw((6, 3), (6, 3))
    mean, var = syncbn.welford_mean_var_c_last(x)
    inv_std = (var + 1e-5).rsqrt()
    y, dx = exact(lambda x: F.batch_norm(x, None, None, None, None, True), dy, x)
    sum_dy, sum_dy_xmu, *grads = syncbn.reduce_bn(dy, x, mean, inv_std, None)
    assert [grad.shape for grad in grads] == [(0,), (0,)]
    ours = syncbn.batchnorm_backward(dy, x, mean, inv_std, None, sum_dy, sum_dy_xmu, torch.tensor([6], dtype=torch.int32))
    compare([syncbn.batchnorm_forward(x, mean, inv_std, None, None), ours], [y, dx], scale=8)
