"""What is evaluated in a wide dtype, or on one rank alone, where no graph of the CPU shows it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from apexfx.observe.beside_float64 import BesideFloat64
from apexfx.observe.wide_ops import WideOps


@torch.library.custom_op("apexfx_tests::narrowing", mutates_args=())
def narrowing(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(torch.float32) * 1


@pytest.mark.parametrize("op, args, function", [
    (torch.ops.aten._softmax.default, (-1, True), lambda x: x.softmax(-1)),  # of half on a device: True widens it to float32
    (torch.ops.aten._log_softmax.default, (-1, True), lambda x: x.log_softmax(-1)),
    (torch.ops.apexfx_tests.narrowing.default, (), lambda x: x),
], ids=["softmax", "log_softmax", "casts of an op in Python"])
def test_nothing_narrows(op, args, function):
    x = torch.randn(3, 4, dtype=torch.float64)
    result = WideOps(torch.float64).evaluate(fx.Graph().call_function(op), None, (x, *args), {})
    torch.testing.assert_close(result, function(x), rtol=0, atol=0)


def test_what_one_rank_cannot_compute_is_refused_before_anything_runs():
    graph = fx.Graph()
    gather = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
    graph.output(graph.call_function(gather, ([graph.placeholder("x")], 2, "a group")))
    with pytest.raises(ValueError, match="coalesced.* communicates, and cannot be computed on one rank alone"):
        BesideFloat64(fx.GraphModule({}, graph))
