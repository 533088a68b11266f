"""What a node writes: calls of torch's functions and methods, as Dynamo captures them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from apexfx.graph.mutation import written

triton_kernel = torch.ops.higher_order.triton_kernel_wrapper_mutation


@pytest.mark.parametrize("call, names", [
    (lambda x, w: torch.add(x, 1.0, out=w), ["w"]),
    (lambda x, w: w.copy_(x), ["w"]),
    (lambda x, w: F.relu(w, inplace=True), ["w"]),
    (lambda x, w: F.relu(input=w, inplace=True), ["w"]),
    (lambda x, w: torch.fused_moving_avg_obs_fake_quant(x, x, x, w[0], w[1], w[2], w[3], 0.1, 0, 255, -1),
     ["getitem", "getitem_1", "getitem_2", "getitem_3"]),
    (lambda x, w: w.bitwise_and_(x), ["w"]),
    (lambda x, w: w & x, []),
    (lambda x, w: F.embedding(x.long(), w, max_norm=1.0), ["w"]),
    (lambda x, w: F.batch_norm(x, x[0], w[0], training=True), ["getitem", "getitem_1"]),
    (lambda x, w: torch.instance_norm(x, None, None, x[0], w[0], True, 0.1, 1e-5, False), ["getitem", "getitem_1"]),
    (lambda x, w: torch.native_batch_norm(x, None, None, x[0], w[0], True, 0.1, 1e-5), ["getitem", "getitem_1"]),
    (lambda x, w: torch.ops.aten.batch_norm.default(x, None, None, x[0], w[0], True, 0.1, 1e-5, False), ["getitem", "getitem_1"]),
    (lambda x, w: torch.ops.aten.lerp_.Scalar(w, x, 0.5), ["w"]),
    (lambda x, w: triton_kernel(kernel_idx=0, constant_args_idx=0, grid=[(1, 1, 1)], tma_descriptor_metadata={},
                                kwargs={"x": x, "out": w, "n": 3}), ["x", "w"]),
    (lambda x, w: F.embedding(x.long(), w), []),
    (lambda x, w: F.relu(w), []),
], ids=["out=", "method", "inplace=", "input=", "schema of a function", "bitwise_and_", "and", "max_norm=", "statistics",
        "instance_norm", "native_batch_norm", "aten.batch_norm", "schema", "triton", "embedding", "relu"])
def test_written(call, names):
    graph = torch.fx.symbolic_trace(call).graph
    last = [node for node in graph.nodes if node.op in ("call_function", "call_method")][-1]
    assert [node.name for node in dict.fromkeys(written(last))] == names
