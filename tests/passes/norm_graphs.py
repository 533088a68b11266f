"""Runs the passes over norms on what Dynamo captures: measurements that fire everywhere, inputs, a norm as users write it."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch

from apexfx._torch import has_kernel
from apexfx.compiler import capture
from apexfx.graph import order
from apexfx.graph.nodes import graphs
from apexfx.graph.printing import format_graph
from apexfx.passes.fuse_norm import FuseNorm

NORMS = ("layer_norm", "rms_norm", "written_rms_norm")
EVERYWHERE = {
    (op, "cpu", dtype): (2.0, 2.0)
    for op in ("batch_norm", *NORMS, *(f"add_{name}" for name in NORMS))
    for dtype in ("float32", "bfloat16", "float16", "float64")
}
needs_kernel = pytest.mark.skipif(not has_kernel("apexfx::rms_norm", "CPU"), reason="the compiled CPU ops are not built")


def text(gm):
    return "\n".join(format_graph(body) for body in graphs(gm))


def measured(ratios=EVERYWHERE, least_elements=None):
    """Return a context in which these are the measurements."""
    return mock.patch.multiple("apexfx.passes.fuse_norm", RATIO=ratios, LEAST_ELEMENTS=least_elements or {})


def rewrite(model, *inputs, pass_type=FuseNorm, make=None, autocast=None, runs=True, **measurements):
    """Run a pass over what Dynamo captures of `model`; return the pass, the graph, and the rewritten call's result.

    Args:
        make: makes the pass, by default of `pass_type`.
        runs: False gives the result of the graph as captured, where the rewritten one has no ranks to talk to.
    """
    make = make or pass_type
    kept = []

    def backend(gm, example_inputs):
        capture.annotate(gm, example_inputs)
        original, before, order_before = copy.deepcopy(gm), text(gm), order.rows(gm.graph)
        pass_ = make()
        assert pass_(gm).modified == (text(gm) != before)
        gm.graph.lint()
        order.check(order_before, order.rows(gm.graph), pass_.name)
        after = text(gm)
        assert not make()(gm).modified and text(gm) == after  # twice is once
        kept[:] = [pass_, gm]
        gm.recompile()
        return gm.forward if runs else original.forward

    torch._dynamo.reset()
    with measured(**measurements), torch.autocast("cpu", autocast, enabled=autocast is not None):
        result = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return *kept, result


def fused(gm):
    return [str(n.target) for body in graphs(gm) for n in body.graph.nodes if "apexfx" in str(n.target)]


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def llama(x, weight, eps=1e-6):
    """transformers' LlamaRMSNorm."""
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x.to(dtype)
