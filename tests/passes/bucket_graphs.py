"""Backward graphs through the bucket_allreduce pass, on the fake process group of `conftest.py`.

Its allreduce leaves the buffer alone: with `gradient_average=False` the gradients must come out bitwise as without the pass.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from apexfx.config import BucketConfig
from apexfx.graph.nodes import value
from apexfx.passes.bucket_allreduce import BucketAllreduce
from tests.backward_graphs import record

F32, BF16 = torch.float32, torch.bfloat16


def make_passes(world_size=2, waits=False, **options):
    def make(placeholders):
        return [BucketAllreduce(placeholders=placeholders, config=BucketConfig(**options), group_name="0",
                                world_size=world_size, waits=waits)]
    return make


def rewritten(model, *inputs, loss=None, fullgraph=True, verify="final", **options):
    """Return the recorder of one step through the pass."""
    return record(model, *inputs, make_passes=make_passes(**options), loss=loss, fullgraph=fullgraph, verify=verify)


def issued(gm):
    """Return (dtype, elements) of every allreduce, in order."""
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce_.default)
    return [(value(n).dtype, value(n).numel()) for n in nodes]


def two_layers():
    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 7))


def check_local(model, *inputs, loss=None, num_graphs=1, **options):
    """Assert that a sum over a group that adds nothing gives the local gradients, bitwise and with the same strides."""
    reference = copy.deepcopy(model)
    out = torch.compile(reference, backend="aot_eager")(*inputs)
    (loss or (lambda o: o.float().square().mean()))(out).backward()
    torch._dynamo.reset()
    sums = {} if "plan" in options else {"gradient_average": False}  # which a plan decides
    recorder = rewritten(model, *inputs, loss=loss, fullgraph=num_graphs == 1, **sums, **options)
    assert len(recorder.backward) == num_graphs
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        assert torch.equal(ours.grad, theirs.grad), name
        assert ours.grad.dtype == theirs.grad.dtype and ours.grad.stride() == theirs.grad.stride(), name
    return recorder


def local_gradients(model, x):
    """Return the gradients of one step without the pass; the model's own stay None."""
    model(x).square().mean().backward()
    local = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return local


def scaling(gm):
    return [node for node in gm.graph.nodes if node.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor)
            and "apexfx_bucket" in node.meta]


def multiplications(gm):
    return [node.args[1] for node in scaling(gm)]
