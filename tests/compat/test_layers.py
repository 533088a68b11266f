"""apex.mlp, fused_dense, contrib.group_norm, layer_norm and xentropy against torch's own and float64, and in graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import apexfx
from apexfx.compat.fused_dense import DenseNoBias, FusedDense, FusedDenseGeluDense
from apexfx.compat.group_norm import GroupNorm
from apexfx.compat.layer_norm import FastLayerNorm
from apexfx.compat.mlp import MLP
from apexfx.compat.xentropy import SoftmaxCrossEntropyLoss
from apexfx.testing import assert_close
from tests.forward_graphs import compiled, precision

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
xentropy = SoftmaxCrossEntropyLoss.apply


def with_gradients(function, *tensors):
    """Return the output, and the gradients of the tensors for an output gradient that is not the same everywhere."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape)
    return output, torch.autograd.grad(output, leaves, weights)


def drawn(module, dtype):
    """Return a copy of `module` in `dtype` and with seeded parameters, so that no ReLU cuts a half and keeps its exact value."""
    module, generator = copy.deepcopy(module), torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.5, 0.5, generator=generator)
    return module.to(dtype)


def both(module, written, x):
    """Return output and gradients, of x and of the parameters, of a module, and of `written(x, parameters)` in float64."""
    names, parameters = zip(*module.named_parameters())
    ours = with_gradients(lambda x, *p: torch.func.functional_call(module, dict(zip(names, p)), (x,)), x, *parameters)
    exact = with_gradients(lambda x, *p: written(x, dict(zip(names, p))), *(t.double() for t in (x, *parameters)))
    return *ours, *exact


def written_mlp(activation):
    def run(x, p):
        for i in range(2):
            x = activation(x @ p[f"weight_{i}"].t() + p.get(f"bias_{i}", 0.0))
        return x

    return run


LAYERS = {f"MLP {name} {bias}": (MLP([7, 5, 3], bias, name), written_mlp(activation)) for bias in (True, False)
          for name, activation in (("none", lambda x: x), ("relu", torch.relu), ("sigmoid", torch.sigmoid))} | {
    "FusedDense": (FusedDense(7, 3), lambda x, p: x @ p["weight"].t() + p["bias"]),
    "DenseNoBias": (DenseNoBias(7, 3), lambda x, p: x @ p["weight"].t()),
    "FusedDenseGeluDense": (FusedDenseGeluDense(7, 5, 3), lambda x, p: F.gelu(
        x @ p["weight1"].t() + p["bias1"], approximate="tanh") @ p["weight2"].t() + p["bias2"]),
    "FastLayerNorm": (FastLayerNorm(7), lambda x, p: F.layer_norm(x, (7,), p["weight"], p["bias"])),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 0])
@pytest.mark.parametrize("layer", LAYERS)
def test_values_and_gradients_against_float64(layer, rows, dtype):
    module, written = LAYERS[layer]
    x = torch.randn(7, rows, generator=torch.Generator().manual_seed(0)).to(dtype).t()  # not contiguous
    output, gradients, exact, exact_gradients = both(drawn(module, dtype), written, x)
    assert output.dtype == dtype and output.shape == exact.shape
    assert_close(output, exact, scale=4)  # sums of 7 products, twice
    for gradient, other in zip(gradients, exact_gradients):
        assert_close(gradient, other, scale=4)


def test_mlp_has_apexs_names_and_first_values():
    torch.manual_seed(0)
    mlp = MLP([400, 600, 200])
    assert list(mlp.state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    assert (mlp.num_layers, mlp.mlp_sizes, mlp.bias, mlp.activation) == (2, [400, 600, 200], 1, 1)
    assert mlp.weights[1] is mlp.weight_1 and mlp.biases[0] is mlp.bias_0 and MLP([2, 2], bias=False).biases == []
    assert abs(mlp.weight_0.std() / (2 / 1000) ** 0.5 - 1) < 0.02 and abs(mlp.bias_1.std() / (1 / 200) ** 0.5 - 1) < 0.2
    assert str(mlp) == "MLP(MLP sizes: [400, 600, 200], Bias=1, activation=1)"
    assert mlp.half().weights[0].dtype == torch.float16
    with pytest.raises(TypeError, match="activation='tanh'"):
        MLP([2, 2], activation="tanh")


def test_dense_has_apexs_names():
    assert list(FusedDense(2, 3).state_dict()) == ["weight", "bias"] and FusedDense(2, 3, bias=False).bias is None
    dense = FusedDenseGeluDense(2, 3, 4)
    assert {name: tuple(p.shape) for name, p in dense.named_parameters()} == {
        "weight1": (3, 2), "bias1": (3,), "weight2": (4, 3), "bias2": (4,)}  # fmt: skip
    assert (dense.in_features, dense.intermediate_features, dense.out_features) == (2, 3, 4)
    with pytest.raises(AssertionError, match="without biases"):
        FusedDenseGeluDense(2, 3, 4, bias=False)


@pytest.mark.parametrize("act", [None, "silu", "SWISH"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                    (torch.float16, torch.float16), (torch.float32, torch.bfloat16)], ids=str)  # fmt: skip
def test_group_norm(dtypes, memory_format, act):
    x_dtype, dtype = dtypes
    norm = drawn(GroupNorm(3, 6, act=act), dtype)
    x = torch.randn(2, 6, 5, 3, generator=torch.Generator().manual_seed(0)).to(x_dtype).contiguous(memory_format=memory_format)

    def written(x, p):
        y = F.group_norm(x, 3, p["weight"], p["bias"])
        return F.silu(y) if act else y

    output, gradients, exact, exact_gradients = both(norm, written, x)
    assert output.dtype == x_dtype and output.is_contiguous(memory_format=memory_format)
    lower = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    assert_close(output, exact, dtype=lower, scale=4)
    for gradient, other in zip(gradients, exact_gradients):
        assert_close(gradient, other, dtype=lower, scale=16)  # sums of 30 terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_group_norm_of_channels_last_images_that_need_no_gradient(dtype):
    """Where torch.nn.GroupNorm crashes in backward (torch 2.13, CPU)."""
    norm = GroupNorm(2, 4)
    images = torch.randn(3, 4, 5, 2).to(dtype).contiguous(memory_format=torch.channels_last)
    output = norm(images)
    output.float().square().sum().backward()
    expected = torch.autograd.functional.jacobian(lambda w: F.group_norm(images.double().contiguous(), 2, w).square().sum(),
                                                  norm.weight.detach().double())  # fmt: skip
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert_close(norm.weight.grad, expected, dtype=dtype, scale=16)


def test_group_norm_has_apexs_names_and_errors():
    assert str(GroupNorm(2, 4, act="silu")).startswith("GroupNorm(2, 4, eps=1e-05, affine=True")
    assert "act=silu" in str(GroupNorm(2, 4, act="SiLU")) and "act" not in str(GroupNorm(2, 4))
    assert GroupNorm(2, 4, affine=False)(torch.randn(1, 4, 2)).shape == (1, 4, 2)
    GroupNorm(2, 4).load_state_dict(nn.GroupNorm(2, 4).state_dict())
    with pytest.raises(ValueError, match="must be divisible"):
        GroupNorm(3, 4)
    with pytest.raises(ValueError, match="act='relu'"):
        GroupNorm(2, 4, act="relu")


def exact_losses(logits, labels, smoothing, padding_idx):
    """Return the losses as Apex's kernel writes them down."""
    log_sum_exp, rows = torch.logsumexp(logits, 1), torch.arange(len(labels))
    losses = (log_sum_exp - logits.mean(1)) * smoothing + (log_sum_exp - logits[rows, labels.clamp(min=0)]) * (1 - smoothing)
    return losses.masked_fill(labels == padding_idx, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding_idx", [0, 2, -100, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(6, 11), (1, 1), (0, 3)], ids=str)
def test_xentropy(shape, smoothing, padding_idx, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(shape, generator=generator)).to(dtype)
    labels = torch.randint(shape[1], shape[:1], generator=generator)
    if padding_idx == -100:
        labels[::2] = -100
    half_to_float = dtype == torch.float16
    losses, [gradient] = with_gradients(lambda x: xentropy(x, labels, smoothing, padding_idx, half_to_float), logits)
    exact, [exact_gradient] = with_gradients(lambda x: exact_losses(x, labels, smoothing, padding_idx), logits.double())
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and gradient.dtype == dtype
    assert_close(losses, exact, scale=4)  # a sum of 11 exponentials
    assert_close(gradient, exact_gradient)


def test_xentropy_by_default_ignores_class_0():
    assert xentropy(torch.randn(3, 4), torch.tensor([0, 1, 0])).ne(0).tolist() == [False, True, False]


@pytest.mark.parametrize("logits, labels, half_to_float, message", [
    (torch.ones(2, 3, 4), torch.ones(2, 4, dtype=torch.int64), False, "expected .N, classes."),
    (torch.ones(2, 3), torch.ones(3, dtype=torch.int64), False, "expected .N, classes."),
    (torch.ones(2, 3), torch.ones(2, dtype=torch.int32), False, "labels of torch.int64"),
    (torch.ones(2, 3), torch.ones(2, 3), False, "expected .N, classes."),
    (torch.ones(2, 3), torch.ones(2, dtype=torch.int64), True, "logits of torch.float32, expected a half"),
])  # fmt: skip
def test_xentropy_refuses_what_apex_refuses(logits, labels, half_to_float, message):
    with pytest.raises(RuntimeError, match=message):
        xentropy(logits, labels, 0.0, 0, half_to_float)


class Network(nn.Module):
    """All of them, one after the other."""

    def __init__(self):
        super().__init__()
        self.norm = GroupNorm(2, 4, act="silu")
        self.mlp = MLP([8, 6], activation="relu")
        self.dense = FusedDenseGeluDense(6, 5, 6)
        self.layer_norm = FastLayerNorm(6)

    def forward(self, x, labels):
        x = self.layer_norm(self.dense(self.mlp(self.norm(x).flatten(1))))
        return SoftmaxCrossEntropyLoss.apply(x, labels, 0.1)


def test_a_graph_has_plain_nodes_that_o1_casts_by_their_rules():
    network, recorder = compiled(Network(), lambda: precision("O1"))
    network(torch.randn(3, 4, 2), torch.tensor([1, 2, 0]))
    assert_expected_inline(recorder.text(), """\
%0 = F.group_norm(%x, 2, %norm.weight, %norm.bias, 1e-05) -> f32[3,4,2]
%1 = F.silu(%0) -> f32[3,4,2]
%2 = flatten(%1, 1) -> f32[3,8]
%3 = aten._to_copy.default(%2, dtype=bfloat16) -> bf16[3,8]
%4 = aten._to_copy.default(%mlp.weight_0, dtype=bfloat16) -> bf16[6,8]
%5 = aten._to_copy.default(%mlp.bias_0, dtype=bfloat16) -> bf16[6]
%6 = torch.linear(%3, %4, %5) -> bf16[3,6]
%7 = torch.relu(%6) -> bf16[3,6]
%8 = aten._to_copy.default(%dense.weight1, dtype=bfloat16) -> bf16[5,6]
%9 = aten._to_copy.default(%dense.bias1, dtype=bfloat16) -> bf16[5]
%10 = torch.linear(%7, %8, %9) -> bf16[3,5]
%11 = aten._to_copy.default(%10, dtype=float32) -> f32[3,5]
%12 = torch.gelu(%11, approximate='tanh') -> f32[3,5]
%13 = aten._to_copy.default(%12, dtype=bfloat16) -> bf16[3,5]
%14 = aten._to_copy.default(%dense.weight2, dtype=bfloat16) -> bf16[6,5]
%15 = aten._to_copy.default(%dense.bias2, dtype=bfloat16) -> bf16[6]
%16 = torch.linear(%13, %14, %15) -> bf16[3,6]
%17 = apexfx.layer_norm.default(%16, %layer_norm.weight, %layer_norm.bias, 1, 1e-05, None, False)
%18 = operator.getitem(%17, 0) -> bf16[3,6]
%19 = aten._to_copy.default(%18, dtype=float32) -> f32[3,6]
%20 = F.cross_entropy(%19, %labels, ignore_index=0, label_smoothing=0.1, reduction='none') -> f32[3]
out  [%20]""")


def test_training_is_one_graph_with_the_numbers_of_eager():
    torch.manual_seed(0)
    eager = Network()
    model = apexfx.transform(copy.deepcopy(eager), opt_level="O0", fullgraph=True, inner="eager")
    x, labels = torch.randn(3, 4, 2), torch.tensor([1, 2, 0])
    for each in (eager, model):
        each(x, labels).mean().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters()):
        assert_close(ours.grad, theirs.grad)
    assert len(model.report.graphs) == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_autocast_gives_its_dtype(layer):
    module, _ = LAYERS[layer]
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(2, 7)).dtype == torch.bfloat16
        assert xentropy(torch.randn(2, 3).bfloat16(), torch.ones(2, dtype=torch.int64)).dtype == torch.float32
        assert GroupNorm(2, 4)(torch.randn(2, 4, 3).bfloat16()).dtype == torch.bfloat16
