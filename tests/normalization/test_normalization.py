"""apexfx.normalization: names, defaults, dtypes, autocast, torch.compile, and torch.nn as the oracle."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import apexfx.normalization as normalization
from apexfx.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from apexfx.normalization import fused_layer_norm as module
from apexfx.normalization.fused_layer_norm import fused_layer_norm
from apexfx.testing import assert_close

PAIRS = [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)]
MODULES = [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm]


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def randomize(module):
    """Give the parameters seeded values other than ones and zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return module


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [24, (4, 6), [24], torch.Size([4, 6])], ids=str)
@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_equals_torch_nn(ours, theirs, shape, affine, memory_efficient):
    module = randomize(ours(shape, 1e-5, affine, memory_efficient))
    reference = theirs(shape, 1e-5, affine)
    reference.load_state_dict(module.state_dict())  # the same names
    x = draw(5, *([24] if shape in (24, [24]) else [4, 6]))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [m(i) for m, i in zip((module, reference), inputs)]
    assert_close(*outputs)
    for output in outputs:
        output.backward(x.flip(0))
    assert_close(inputs[0].grad, inputs[1].grad, scale=4)  # sums of 24 terms
    for name, parameter in module.named_parameters():
        assert_close(parameter.grad, reference.get_parameter(name).grad, scale=4)


def test_names_defaults_and_repr():
    assert list(FusedLayerNorm(3).state_dict()) == ["weight", "bias"]
    assert list(FusedRMSNorm(3).state_dict()) == ["weight"]
    assert FusedLayerNorm(3, elementwise_affine=False).weight is None
    assert set(normalization.__all__) < set(module.__all__)
    for name in module.__all__:
        parameters = inspect.signature(getattr(module, name)).parameters
        if "memory_efficient" in parameters:
            is_class = isinstance(getattr(module, name), type)
            assert parameters["eps"].default == (1e-5 if is_class else 1e-6), name
            assert parameters["memory_efficient"].default is False
    assert repr(FusedLayerNorm((2, 3))) == "FusedLayerNorm((2, 3), eps=1e-05, elementwise_affine=True)"


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_output_dtypes(half):
    x = draw(3, 8, dtype=half)
    assert FusedLayerNorm(8)(x).dtype == FusedRMSNorm(8)(x).dtype == half
    assert FusedRMSNorm(8, elementwise_affine=False)(x).dtype == half
    assert MixedFusedLayerNorm(8)(x).dtype == MixedFusedRMSNorm(8)(x).dtype == torch.float32
    assert MixedFusedLayerNorm(8).to(half)(x.float()).dtype == half
    expected = nn.functional.layer_norm(x.float(), (8,))
    assert_close(MixedFusedLayerNorm(8)(x), expected)  # not rounded to half on the way


@pytest.mark.parametrize("mixed", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_modules_are_always_affine(mixed):
    with pytest.warns(UserWarning, match="elementwise_affine"):
        mixed(8, elementwise_affine=True)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=f"{mixed.__name__} does not support"):
        mixed(8, elementwise_affine=False)


@pytest.mark.parametrize("module", MODULES)
def test_autocast_casts_first(module):
    norm, x = randomize(module(16)), draw(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    expected = copy.deepcopy(norm).to(torch.bfloat16)(x.to(torch.bfloat16))
    assert torch.equal(y, expected)
    with torch.autocast("cpu", torch.bfloat16):  # float64 is left alone, as torch and Apex do
        assert copy.deepcopy(norm).double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("module", MODULES)
def test_compiles_to_one_full_graph(module):
    norm, graphs = randomize(module(16)), []

    def backend(graph_module, _):
        graphs.append([str(n.target) for n in graph_module.graph.nodes if "apexfx" in str(n.target)])
        return graph_module

    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    x = draw(4, 16)
    assert torch.equal(compiled(x), norm(x))
    op = "apexfx.layer_norm.default" if "LayerNorm" in module.__name__ else "apexfx.rms_norm.default"
    assert graphs == [[op]]
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16


def test_functions_by_apex_names():
    x, weight, bias = draw(3, 8), torch.full((8,), 2.0), torch.ones(8)
    layer, rms = nn.functional.layer_norm(x, (8,), weight, bias), nn.functional.rms_norm(x, (8,), weight, 1e-5)
    plain = nn.functional.layer_norm(x, (8,)), nn.functional.rms_norm(x, (8,), None, 1e-5)
    half = x.bfloat16()
    assert_close(module.FusedLayerNormAffineFunction.apply(x, weight, bias, (8,), 1e-5), layer)
    assert_close(module.FusedRMSNormAffineFunction.apply(x, weight, 8, 1e-5, True), rms)
    assert_close(module.FusedLayerNormFunction.apply(x, (8,), 1e-5), plain[0])
    assert_close(module.FusedRMSNormFunction.apply(x, (8,), 1e-5), plain[1])
    assert_close(module.FastLayerNormFN.apply(x, weight, bias, 1e-5), layer)
    assert_close(module.FastLayerNorm(8)(x), plain[0])
    mixed = module.FusedLayerNormAffineMixedDtypesFunction.apply(half, weight, bias, (8,), 1e-5)
    assert mixed.dtype == torch.float32
    mixed = module.FusedRMSNormAffineMixedDtypesFunction.apply(half, weight, (8,), 1e-5)
    assert mixed.dtype == torch.float32


def test_manual_rms_norm_keeps_apex_dtypes():
    x = draw(3, 8, dtype=torch.float16)
    assert normalization.manual_rms_norm(x, (8,), None, 1e-5).dtype == torch.float32
    assert normalization.manual_rms_norm(x, (8,), torch.ones(8), 1e-5).dtype == torch.float32
    assert normalization.manual_rms_norm(x, (8,), torch.ones(8).half(), 1e-5).dtype == torch.float16
    expected = nn.functional.rms_norm(x.float(), (8,), None, 1e-5)
    assert_close(normalization.manual_rms_norm(x.float(), 8, None, 1e-5), expected)


@pytest.mark.parametrize("call, error, message", [
    (lambda: fused_layer_norm(torch.ones(2, 3), 4), ValueError, r"shape \[2, 3\].*normalized_shape=\[4\]"),
    (lambda: fused_layer_norm(torch.ones(2, 3), (5, 2, 3)), ValueError, "normalized_shape"),
    (lambda: fused_layer_norm(torch.ones(2, 3), ()), ValueError, "normalized_shape"),
    (lambda: fused_layer_norm([1.0], 1), TypeError, "input is a list"),
    (lambda: FusedLayerNorm(1.5), TypeError, "normalized_shape=1.5"),
    (lambda: FusedRMSNorm(3, eps=-1.0)(torch.ones(2, 3)), ValueError, "rms_norm: eps=-1.0"),
    (lambda: FusedLayerNorm(3)(torch.ones(2, 3, dtype=torch.int64)), TypeError, "layer_norm: x is torch.int64"),
    (lambda: FusedLayerNorm(3, device="meta")(torch.ones(2, 3)), ValueError, "layer_norm: weight is on meta"),
])
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_torch_func_differentiates_as_it_does_torchs(ours, theirs):
    modules = [randomize(cls(5, eps=1e-5).double()) for cls in (ours, theirs)]
    x, tangent = draw(3, 5, dtype=torch.float64), draw(5, 3, dtype=torch.float64).t()
    for transform in (lambda f: torch.func.jvp(f, (x,), (tangent,))[1], lambda f: torch.func.grad(lambda x: f(x).pow(3).sum())(x),
                      lambda f: torch.func.vmap(f)(x), lambda f: torch.func.hessian(lambda x: f(x).pow(3).sum())(x)):
        assert_close(*map(transform, modules))
