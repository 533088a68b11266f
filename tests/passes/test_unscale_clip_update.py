"""The unscale_clip_update pass: the update stands behind whatever reads what it writes. What it computes: tests/train_step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apexfx._torch import PlainAOTInput
from apexfx.compiler.pipeline import Pipeline
from apexfx.graph.nodes import value
from apexfx.ops.apply_gradients import Plan, registered
from apexfx.passes.unscale_clip_update import UnscaleClipUpdate
from apexfx.train_step.parts.apply_update import ApplyUpdate
from apexfx.train_step.parts.norm import Clip, Norm

L2NORM, SGD_OP = torch.ops.apexfx.multi_tensor_l2norm.default, torch.ops.apexfx.sgd_.default
SGD = ApplyUpdate("sgd_", 0, 1, (), "lr", None, (0.0, 0.0, 0.0, False, False, False))
PLAN = Plan((Norm(), Clip(1.0), SGD), (("lr", None),))


def end_of_a_step(gradient, writes=False, plan=PLAN):
    """Return a graph that ends a step; a reader of the parameter was moved behind the node, which does not say that it writes.

    Args:
        gradient: of the parameter and an input.
        writes: whether the graph writes that input then.
    """
    plan = registered(plan)

    def run(w, x, lr):
        verdict, norm, kept = torch.ops.apexfx.apply_gradients([w], [gradient(w, x)], [lr], plan.text)
        if writes:
            torch.ops.aten.add_.Tensor(x, 1.0)
        return verdict, norm, w * 2.0, *kept

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
    assert names.index("mul_1") < names.index("sgd_") and "clone_default" not in names


@pytest.mark.parametrize("gradient", [lambda w, x: w.view(3), lambda w, x: w], ids=["view", "itself"])
def test_a_gradient_in_the_memory_of_a_parameter_is_copied(gradient):
    names = rewritten(end_of_a_step(gradient))
    assert names.index("clone_default") < names.index("multi_tensor_l2norm") < names.index("sgd_")


def test_a_gradient_in_the_memory_of_an_input_that_is_written_is_copied():
    assert "clone_default" not in rewritten(end_of_a_step(lambda w, x: x.view(3)))
    names = rewritten(end_of_a_step(lambda w, x: x.view(3), writes=True))
    assert names.index("clone_default") < names.index("add_") < names.index("sgd_")


def widened(w, x):
    return (x * 3.0).bfloat16().float()


def widened_and_written(w, x):
    half = (x * 3.0).bfloat16()
    wide = half.float()
    torch.ops.aten.add_.Tensor(half, 1.0)
    return wide


def test_a_half_gradient_is_read_before_it_is_widened():
    gm = end_of_a_step(widened)
    values, copies = ([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 0.3]), torch.tensor(0.5)] for _ in range(2))
    expected = gm(*copies)
    rewritten(gm)
    assert [value(node.args[0][0]).dtype for node in gm.graph.find_nodes(op="call_function", target=L2NORM)] == [torch.bfloat16]
    assert [value(node.args[1][0]).dtype for node in gm.graph.find_nodes(op="call_function", target=SGD_OP)] == [torch.bfloat16]
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)) == 1  # that to half
    gm.recompile()
    torch.testing.assert_close([*gm(*values)[:2], values[0]], [*expected[:2], copies[0]], rtol=0, atol=0)


@pytest.mark.parametrize(("gradient", "plan"), [
    (widened_and_written, PLAN), (widened, dataclasses.replace(PLAN, keeps_gradients=True))], ids=["written", "kept"])
def test_a_widened_gradient_is_read_where_its_half_is_not_the_same(gradient, plan):
    gm = end_of_a_step(gradient, plan=plan)
    rewritten(gm)
    assert [value(node.args[0][0]).dtype for node in gm.graph.find_nodes(op="call_function", target=L2NORM)] == [torch.float32]
