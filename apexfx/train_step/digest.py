"""One sha256 of all that a training step has: two steps that have the same bits have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from .._torch import is_dtensor
from ..config import is_number
from ..ops.checksum import checksum

_OF_RUN = ("num_ranks", "kept", "slices")  # what a checkpoint has besides


def digest(state: Mapping[str, Any], others: Sequence[Tensor | None]) -> str:
    """Return the sha256 of a checkpoint, but for what it has of the run, and of other tensors.

    Where ranks have rows of tensors, all of them call it at once.
    """
    leaves = list(_leaves("", [{name: held for name, held in state.items() if name not in _OF_RUN}, *others]))
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    lines = [f"{path} {leaf}" for path, leaf in leaves if not isinstance(leaf, Tensor)]
    for device in dict.fromkeys(leaf.device for _, leaf in tensors):
        here = [(path, leaf.detach()) for path, leaf in tensors if leaf.device == device]
        numbers = checksum([leaf for _, leaf in here if not is_dtensor(leaf)]).tolist()[::-1]
        # What ranks share is gathered one tensor at a time.
        lines += [f"{path} {leaf.dtype} {list(leaf.shape)} "
                  f"{checksum([leaf.full_tensor()]).item() if is_dtensor(leaf) else numbers.pop()}" for path, leaf in here]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _leaves(path: str, held: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers and texts, and where they are; of anything else the class."""
    if isinstance(held, (Mapping, list, tuple)):
        items = sorted(held.items(), key=str) if isinstance(held, Mapping) else enumerate(held)
        for name, each in items:
            yield from _leaves(f"{path}.{name}", each)
    else:
        is_plain = held is None or isinstance(held, (Tensor, str, bool)) or is_number(held)
        yield path, held if is_plain else type(held).__name__
