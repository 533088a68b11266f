"""Computing in float64 on copies, where a difference is none of rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from ..config import HALVES
from ..graph.nodes import graphs
from ..passes.base import Pass

TOLERANCE = 1e-6  # of what may compute a few ops in float32
CASTS = {Tensor.float: Tensor.double, Tensor.half: Tensor.double, Tensor.bfloat16: Tensor.double}


class KeepFloat64(Pass):
    """Keep float64 where the program casts to a narrower dtype, as the loop's mode does.

    Before:  y = x.float(); z = softmax(x, -1, dtype=torch.float32)
    After:   y = x.double(); z = softmax(x, -1, dtype=torch.float64)
    """

    name = "keep_float64"
    numeric = "changes_dtype"

    def call(self, gm: fx.GraphModule) -> PassResult:
        for node in (node for each in graphs(gm) for node in each.graph.nodes):
            if node.op == "call_method" and (cast := CASTS.get(getattr(Tensor, node.target, None))) is not None:
                node.target = cast.__name__
            if node.target != "view":
                node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), widened)
        return PassResult(gm, True)


def widened(given: Any) -> Any:
    """Return float64 for a narrower dtype; other values as they are."""
    return torch.float64 if isinstance(given, torch.dtype) and given in (*HALVES, torch.float32) else given


def copied(x: Any, exact: bool = True) -> Any:
    """Return a copy of a tensor, in float64 where that is asked for and it is floating; other values as they are."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().to(torch.float64 if exact and x.is_floating_point() else x.dtype, copy=True)


def relative(difference: Tensor, reference: Tensor, least: float = 1e-300) -> float:
    """Return the norm of a difference over that of the reference, or over `least` where that is more."""
    return float(difference.norm()) / max(float(reference.norm()), least, 1e-300)


@contextlib.contextmanager
def explained(note: str) -> Iterator[None]:
    """Add a note to what copies in float64 raise."""
    try:
        yield
    except (ArithmeticError, IndexError, RuntimeError, TypeError) as error:
        error.add_note(f"apexfx: {note}")
        raise
