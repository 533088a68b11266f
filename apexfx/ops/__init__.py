"""torch.ops.apexfx.*: one op family a file, each with schema, reference, fake and autograd.

The pure-torch references are complete by themselves; compiled kernels only add a faster implementation
for the same names, and win by dispatch priority.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ._built_for import cuda_mismatch, machine, mismatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """One compiled library: where it was looked for, whether it is loaded, and why not."""

    device: str
    path: str
    loaded: bool
    reason: str  # "" when loaded; else one sentence, or the loader's own error


def missing(devices: Iterable[str]) -> list[str]:
    """Return a sentence for each of `devices` whose library is not loaded, unless APEXFX_EXT=0 asks for that."""
    if os.environ.get("APEXFX_EXT", "1") == "0":
        return []
    return [f"the compiled ops for {library.device} are not loaded ({library.reason}), so the slower references in torch run"
            for library in LIBRARIES if library.device in devices and not library.loaded]


def _load(device: str) -> Library:
    path = Path(__file__).resolve().parent.parent / f"_C_{device}.so"
    if os.environ.get("APEXFX_EXT", "1") == "0":
        return Library(device, str(path), False, "APEXFX_EXT=0 leaves compiled ops out")
    if device == "cuda" and torch.version.cuda is None:
        return Library(device, str(path), False, "this torch has no CUDA")
    if not path.exists():
        return Library(device, str(path), False, "not built")
    reason = ""
    try:
        library = path.read_bytes()
        if library[:4] == b"\x7fELF":  # the loader says what else it may be
            reason = mismatch(library) or (cuda_mismatch(library, torch.version.cuda, machine()) if device == "cuda" else "")
        if reason:
            command = "make lib" if device == "cpu" else "python csrc/compile_ops.py cuda --arch native"
            reason += f"; rebuild it with `{command}`, or by installing apexfx again"
        else:
            torch.ops.load_library(str(path))
    except OSError as error:
        reason = str(error.__cause__ or error)  # torch's own message leaves out what the loader said
    if reason:
        _log.warning("apexfx: %s is not loaded, the pure-torch references are used: %s", path.name, reason)
    return Library(device, str(path), not reason, reason)


# Every module of this folder whose name does not begin with an underscore is an op family; importing it registers it.
for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")

LIBRARIES: tuple[Library, ...] = (_load("cpu"), _load("cuda"))
