"""The unscale_clip_update pass: the update stands behind whatever reads what it writes. What it computes: tests/train_step."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apexfx._torch import PlainAOTInput
from apexfx.compiler.pipeline import Pipeline
from apexfx.ops.apply_gradients import StepPlan, UpdateRow
from apexfx.passes.unscale_clip_update import UnscaleClipUpdate

PLAN = StepPlan(groups=(UpdateRow("sgd_", 1, 0, masters=False, lr=0, step=None, numbers=(0.0, 0.0, 0.0, False, False, False)),),
                max_grad_norm=1.0).to_json()


def end_of_a_step(gradient, writes=False):
    """Return a graph that ends a step; a reader of the parameter was moved behind the node, which does not say that it writes.

    Args:
        gradient: of the parameter and an input.
        writes: whether the graph writes that input then.
    """
    def run(w, x, lr):
        found_inf, norm, _ = torch.ops.apexfx.apply_gradients([w], [gradient(w, x)], [], [lr], PLAN)
        if writes:
            torch.ops.aten.add_.Tensor(x, 1.0)
        return found_inf, norm, w * 2.0

    gm = make_fx(run, tracing_mode="fake")(torch.ones(3), torch.ones(3), torch.ones(()))
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.meta["desc"] = PlainAOTInput(place)
    return gm


def rewritten(gm):
    pipeline = Pipeline([UnscaleClipUpdate()], verify="final")
    pipeline.run("step", gm)
    names = [node.name for node in gm.graph.nodes]
    assert not UnscaleClipUpdate()(gm).modified
    return names


def test_an_update_stands_behind_every_reader():
    names = rewritten(end_of_a_step(lambda w, x: x * 3.0))
    assert names.index("mul_1") < names.index("sgd__default") and "clone_default" not in names


@pytest.mark.parametrize("gradient", [lambda w, x: w.view(3), lambda w, x: w], ids=["view", "itself"])
def test_a_gradient_in_the_memory_of_a_parameter_is_copied(gradient):
    names = rewritten(end_of_a_step(gradient))
    assert names.index("clone_default") < names.index("multi_tensor_l2norm_default") < names.index("sgd__default")


def test_a_gradient_in_the_memory_of_an_input_that_is_written_is_copied():
    assert "clone_default" not in rewritten(end_of_a_step(lambda w, x: x.view(3)))
    names = rewritten(end_of_a_step(lambda w, x: x.view(3), writes=True))
    assert names.index("clone_default") < names.index("add_") < names.index("sgd__default")
