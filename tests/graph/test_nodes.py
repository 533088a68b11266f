"""The vocabulary over fx graphs: arguments by name, values that follow an edit, what communicates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from apexfx.graph.collectives import issued
from apexfx.graph.nodes import argument, call, refake, set_value
from apexfx.ops import sync_batch_norm  # noqa: F401  registers the op


def graph_of(*names):
    """Return a graph with inputs of shape (3,)."""
    graph = fx.Graph()
    for name in names:
        set_value(graph.placeholder(name), torch.empty(3, device="meta"))
    return graph, list(graph.nodes)


@pytest.mark.parametrize("target, given, named", [
    (F.batch_norm, "input running_mean running_var weight bias", {}),
    (F.batch_norm, "input running_mean running_var", {"bias": "bias", "weight": "weight"}),
    (torch.batch_norm, "input weight bias running_mean running_var", {}),
    (torch.native_batch_norm, "input weight bias running_mean running_var", {}),
    (torch.ops.aten.batch_norm.default, "input weight bias running_mean running_var", {}),
])
def test_an_argument_is_found_however_it_was_passed(target, given, named):
    graph, nodes = graph_of("input", "weight", "bias", "running_mean", "running_var")
    by_name = {node.target: node for node in nodes}
    node = graph.call_function(target, tuple(by_name[n] for n in given.split()), {k: by_name[v] for k, v in named.items()})
    assert {name: argument(node, name) for name in by_name} == by_name
    assert argument(node, "no such parameter") is None


def test_an_argument_that_was_not_passed_is_its_default():
    graph, [x] = graph_of("x")
    assert argument(graph.call_function(F.batch_norm, (x, None, None)), "eps") == 1e-5
    assert argument(graph.call_function(torch.batch_norm, (x, None, None, None, None, True)), "training") is True
    assert argument(graph.call_function(F.rms_norm, (x, [3])), "eps") is None
    assert argument(graph.call_function(torch.mean, (x, 0)), "dtype") is None  # which has no single signature
    assert argument(graph.call_function(torch.Tensor.__eq__, (x, x)), "dtype") is None  # which is no op's name


def test_refake_follows_a_new_dtype():
    graph, [x] = graph_of("x")
    relu = call(graph, torch.relu, (x,), like=x)
    graph.output(relu)
    with graph.inserting_before(relu):
        relu.replace_input_with(x, call(graph, torch.ops.aten._to_copy.default, (x,), {"dtype": torch.float16}, like=relu))
    refake(fx.GraphModule(torch.nn.Module(), graph))
    assert relu.meta["val"].dtype == torch.float16


def test_what_communicates_is_described_by_op_module_and_group():
    graph, [x, w] = graph_of("x", "w")
    for group in ("7", ""):
        node = graph.call_function(torch.ops.apexfx.sync_batch_norm.default, (x, w, w, w, w, 0.1, 1e-5, group))
        node.meta["nn_module_stack"] = {"bn": ("layer1.bn", torch.nn.BatchNorm1d)}
    started = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "8"))
    graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (started,))
    graph.output(started)
    assert issued(fx.GraphModule(torch.nn.Module(), graph), ("8",)) == [
        ["apexfx.sync_batch_norm.default", "layer1.bn", "a group of the module's own"],
        ["_c10d_functional.all_reduce.default", "", "8"]]
