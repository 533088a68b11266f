"""What ranks say of a backward that failed, through the group's store, and the error that is made of it on every rank."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .._torch import process_group_store
from .waiting import ALONE


def say(group: dist.ProcessGroup, key: str, mine: Any) -> None:
    """Leave this rank's words where `exchange` looks for them, and wait for nobody."""
    process_group_store(group).set(f"{key}/{dist.get_rank(group)}", json.dumps(mine))


def exchange(group: dist.ProcessGroup, key: str, mine: Any, timeout_s: float) -> list[Any]:
    """Return what every rank has to say, through the group's store; None for a rank that says nothing in time."""
    store, world = process_group_store(group), dist.get_world_size(group)
    say(group, key, mine)
    deadline = time.monotonic() + min(timeout_s, 30.0)
    said: list[Any] = []
    for rank in range(world):
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.05)))
            said.append(json.loads(store.get(f"{key}/{rank}")))
        except RuntimeError:
            said.append(None)
    return said


def explain(said: Sequence[Any]) -> str:
    """Put what the ranks said of a backward in words, the same on every rank."""
    lines = ["apexfx: the ranks disagree about this backward, so its gradients must not be used."]
    for rank, words in enumerate(said):
        if words is None:
            lines.append(f"  rank {rank}: no answer")
            continue
        if words["failed"]:
            lines.append(f"  rank {rank}: failed: {words['failed']}")
        unused = words["unused"]
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        lines.append(f"  rank {rank}: {words['forwards']} forwards so far"
                     + ("; holds gradients from inside no_sync()" if words["accumulated"] else "")
                     + (f"; no gradient for {shown}" if unused else ""))
    if len({words["accumulated"] for words in said if words}) > 1:
        lines.append(ALONE)
    elif len({words["forwards"] for words in said if words}) > 1:
        lines.append("A rank skipped a backward (or ran a training forward that the others did not). Every rank must run "
                     "backward equally often; to skip a step, skip it on all ranks, or use no_sync().")
    elif not any(words["failed"] for words in said if words):
        lines.append("With find_unused_parameters=False a parameter has a gradient in every backward on every rank, or in none. "
                     "Pass find_unused_parameters=True, or delay_allreduce=True, if that is meant.")
    return "\n".join(lines)
