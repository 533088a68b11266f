"""Bundles of steps that were skipped: which folder each goes to, and what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..observe import bundle
from .graphs import StepGraphs
from .last_call import LastCall
from .non_finite import graph_of


def write_record(path: Path, graphs: StepGraphs, call: LastCall, *, scale_factor: float, device: torch.device,
                 about: Mapping[str, Any]) -> None:
    """Write a bundle of a call; arguments as of `non_finite.search` and `bundle.write`, errors too."""
    gm, inputs = graph_of(graphs, call, scale_factor=scale_factor)
    bundle.write(path, gm, inputs, random=call.random, random_of_device=call.random_of_device, device=device,
                 about={"rank": _rank(), **about})


def free_record(folder: str | Path, max_records: int, call: int) -> Path | None:
    """Return where the bundle of a call goes; None where this rank has enough of them."""
    own = f"rank-{_rank()}"
    present = len(list(Path(folder).glob(f"call-*-{own}")))
    return Path(folder) / f"call-{call}-{own}" if present < max_records else None


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
