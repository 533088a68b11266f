"""What the eager executor cast, in the words of the compiled ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from apexfx.precision.rules import Rule
from apexfx.printing import short_dtype

_LONG = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double"}


@dataclass(frozen=True)
class EagerCast:
    """One cast: the op that needed it, the rule and its reason, dtypes as "f32", bytes written (0 from the cache)."""

    op: str
    rule: str
    reason: str
    source_dtype: str
    target_dtype: str
    bytes: int
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
        written = 0 if cached else tensor.numel() * dtype.itemsize
        self.append(EagerCast(op, rule.kind, rule.reason, short_dtype(tensor.dtype), short_dtype(dtype), written, cached))
