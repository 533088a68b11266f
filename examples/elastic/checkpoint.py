"""Checkpoints that are whole or not there: written aside, listed with sizes and hashes, renamed at the end.

`torch.distributed.checkpoint` writes one file a rank. A rank may die while it writes, a disk may fill up: `newest` takes
the last checkpoint of which every byte is as it was written, and says why it passed over a later one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

MANIFEST = "manifest.json"


def save(folder: Path, step: int, state: dict[str, Any], *, keep: int = 2) -> None:
    """Write `state` as `folder/step_<step>`; every rank calls it. Older checkpoints beyond `keep` are removed."""
    final, partial = folder / f"step_{step:08d}", folder / f"step_{step:08d}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=partial)
    dist.barrier()
    if dist.get_rank() == 0:
        manifest = {path.name: [path.stat().st_size, _hash(path)] for path in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in _steps(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def newest(folder: Path) -> Path | None:
    """Return the last intact checkpoint, the same on every rank, or None."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        for path in reversed(_steps(folder)):
            if (why := damage(path)) is None:
                found = [str(path)]
                break
            print(f"checkpoint {path.name} is passed over: {why}", flush=True)
    dist.broadcast_object_list(found, src=0)
    return Path(found[0]) if found[0] is not None else None


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, (size, digest) in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} holds {file.stat().st_size} bytes of {size}"
        if _hash(file) != digest:
            return f"the content of {name} has changed"
    return None


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.suffix != ".partial")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
