"""Runs a pass over batch norms on what Dynamo captures."""

from __future__ import annotations

import copy
from unittest import mock

import torch

from apexfx.compiler import capture
from apexfx.graph import order
from apexfx.graph.nodes import graphs
from apexfx.graph.printing import format_graph


def text(gm):
    return "\n".join(format_graph(body) for body in graphs(gm))


def rewrite(model, *inputs, make, runs=True, least_elements=0):
    """Run a pass over what Dynamo captures of `model`; return the pass, the graph, and the rewritten call's result.

    Args:
        make: makes the pass.
        runs: False gives the result of the graph as captured, where the rewritten one has no ranks to talk to.
        least_elements: of an input of a batch norm that is fused.
    """
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
    with mock.patch("apexfx.passes.fuse_batchnorm.LEAST_ELEMENTS", least_elements):
        result = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return *kept, result
