"""The file of an artifact: a line that says what it is, a digest of the rest, and a zip archive of JSON and shared libraries."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ArtifactMismatch

_KIND = b"apexfx training step, artifact version 1\n"
_DIGEST_BYTES = 65  # in hexadecimal, and the end of the line
_PROGRAM = "program.json"
_UNFINISHED_SECONDS = 3600  # after which whoever was writing a file was killed


def write(path: Path, program: Mapping[str, Any], libraries: Mapping[str, bytes]) -> None:
    """Write an artifact in the place of any at `path`, all of it or nothing.

    Args:
        program: what JSON can hold.
        libraries: shared libraries by name.

    Raises:
        OSError: it cannot be written.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr(_PROGRAM, json.dumps(program))
        for name, library in libraries.items():
            file.writestr(name, library)
    content, unfinished = archive.getvalue(), f".{path.name}.apexfx-"
    for left in path.parent.glob(f"{glob.escape(unfinished)}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _UNFINISHED_SECONDS:
                left.unlink()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=unfinished)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_KIND + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read(path: Path) -> tuple[dict[str, Any], dict[str, bytes], str]:
    """Return what `write` was given, and the digest; nothing of it is run.

    Raises:
        FileNotFoundError: there is none.
        ArtifactMismatch: it cannot be read, is something else, damaged, or cut.
    """
    advice = "delete the file, and the step compiles anew and writes it, or give another path"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArtifactMismatch(f"apexfx: the artifact {str(path)!r} cannot be read ({error.strerror}); {advice}") from error
    if not data.startswith(_KIND):
        what = "is empty" if not data else "is no artifact of this version of apexfx"
        raise ArtifactMismatch(f"apexfx: {str(path)!r} {what}; {advice}")
    start = len(_KIND) + _DIGEST_BYTES
    digest = hashlib.sha256(data[start:]).hexdigest()
    if data[len(_KIND):start] != f"{digest}\n".encode():
        raise ArtifactMismatch(f"apexfx: the artifact {str(path)!r} is damaged or cut: its digest is another; {advice}")
    with zipfile.ZipFile(io.BytesIO(data[start:])) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    return json.loads(contents.pop(_PROGRAM)), contents, digest


def summary(path: Path) -> str:
    """Return what is in an artifact, as text; nothing of it is run.

    Raises:
        ArtifactMismatch, FileNotFoundError: as `read`.
    """
    content, libraries, digest = read(path)
    program, calls = content["program"], content["calls"]
    lines = [f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {len(calls)} calls, {len(libraries)} kernels, sha256 {digest[:12]}"]
    of_state = [name for name in program if name.partition(" ")[0] in ("parameter", "buffer", "state")]
    lines += [f"{name}: {text}" for name, text in program.items() if name not in (*of_state, "trained") and text != "null"]
    lines.append(f"made for {len(of_state)} parameters, buffers and tensors of the optimizer's state")
    for number, call in enumerate(calls):
        kind, accumulated, _, structure, *leaves = call["key"].split("\n")
        lines += [f"call {number}, which {kind}{f' after others ({accumulated})' if accumulated else ''}: {', '.join(leaves)}",
                  f"  {len(call['kernels'])} kernels, {len(call['inputs'])} inputs, {len(call['facts'])} facts about Python; "
                  + ", ".join(f"{name} {value}" for name, value in call["process"].items())]
    return "\n".join(lines)
