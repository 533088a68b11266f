"""What the eager executor cast, in the words of the compiled ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.printing import short_dtype
from ..precision.casts import CastRow, num_bytes
from ..precision.rules import Rule

_LONG = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double"}


@dataclass(frozen=True, kw_only=True)
class EagerCast(CastRow):
    """One cast; `cached` where the weight cache had it, which writes no bytes."""

    cached: bool


class EagerLedger(list[EagerCast]):
    """The casts in the order they were made.

    Args:
        printer: gets a line a cast, as Apex printed them ("Float->Half (linear)").
    """

    def __init__(self, printer: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.printer = printer

    def note(self, op: str, rule: Rule, tensor: Tensor, dtype: torch.dtype, cached: bool) -> None:
        """Add a row, or print it."""
        if self.printer is not None:
            self.printer(f"{_LONG[tensor.dtype]}->{_LONG[dtype]} ({op}{', cache hit' if cached else ''})")
            return
        self.append(EagerCast(op=op, rule=rule.kind, reason=rule.reason, source_dtype=short_dtype(tensor.dtype),
                              target_dtype=short_dtype(dtype), bytes=0 if cached else num_bytes(tensor, dtype), cached=cached))
