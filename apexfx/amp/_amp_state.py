"""The state Apex's scripts reach into: what the latest `initialize` set up, and the verbosity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..ranks import rank


class AmpState:
    """Attributes as in Apex. `opt_properties`, `loss_scalers` and `handle` exist after `initialize`.

    They describe the latest call; models and optimizers of earlier calls keep their own (see `session.Session`).
    """

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24

    @staticmethod
    def maybe_print(message: str, rank0: bool = False) -> None:
        maybe_print(message, rank0)


_amp_state = AmpState()


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless verbosity is 0; with `rank0`, on the first rank only."""
    if _amp_state.verbosity > 0 and not (rank0 and rank() != 0):
        print(message)


def warn_or_err(message: str) -> None:
    """Raise RuntimeError, or print a warning where `_amp_state.hard_override` was set by hand."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print(f"Warning:  {message}")


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield what the optimizer updates, in group order: float32 masters at O2, the model's own parameters elsewhere."""
    for group in optimizer.param_groups:
        yield from group["params"]
