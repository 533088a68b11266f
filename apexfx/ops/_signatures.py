"""What a compiled library was built for: the types of every op, which csrc/compile_ops.py writes into it.

A kernel built for another schema registers without complaint and fails, or worse, when it is called; so the types are
compared before a library is loaded, by reading the file.
"""

from __future__ import annotations

import re

import torch

_MARK = re.compile(rb"apexfx signatures:((?:\n[^\n\0]+)*)\n\0")


def mismatch(library: bytes) -> str:
    """Return what keeps `library` from being used with the ops as they are registered, or "" where nothing does."""
    mark = _MARK.search(library)
    if mark is None:
        return "it does not say which ops it was built for"
    for signature in mark[1].decode().split("\n")[1:]:
        name = signature.split("(")[0]
        op = getattr(torch.ops.apexfx, name, None)
        if op is None or _signature(op.default._schema) != signature:
            return f"it was built for another version of apexfx::{name}"
    return ""


def _signature(schema: torch.FunctionSchema) -> str:
    """Return name(types) -> types, as `signatures` in csrc/compile_ops.py."""
    sides = (", ".join(str(value.type) for value in values) for values in (schema.arguments, schema.returns))
    return f"{schema.name.removeprefix('apexfx::')}({') -> ('.join(sides)})"
