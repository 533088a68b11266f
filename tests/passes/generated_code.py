"""Reads back from Inductor's generated code what really runs between a collective's start and its wait."""

from __future__ import annotations

import re
from typing import NamedTuple


class Event(NamedTuple):
    """One call in compiled code: kind is "start", "wait" or "compute"; name the op or kernel; buffer its first argument."""

    kind: str
    name: str
    buffer: str


_COLLECTIVE_CALL = re.compile(r"torch\.ops\._c10d_functional\.(\w+)\.default\((?:\[)?(\w+)")
_COMPUTE_CALL = re.compile(
    r"^\s*(?:\w+ = )?"
    r"(extern_kernels\.\w+|torch\.ops\.\w+\.\w+(?:\.\w+)?|cpp_fused\w*|triton_\w+)(?:\.run)?\((\w*)"
)


def collective_order(code: str) -> list[Event]:
    """Return the calls of Inductor's generated code in order: what really runs between a start and its wait.

    Args:
        code: one of the sources that `torch._inductor.utils.run_and_get_code` returns.
    """
    events = []
    for line in code[max(code.find("def call("), 0):].splitlines():
        if line.lstrip().startswith("#"):
            continue
        if found := _COLLECTIVE_CALL.search(line):
            name = found[1]
            events.append(Event("wait" if name == "wait_tensor" else "start", name, found[2]))
        elif found := _COMPUTE_CALL.match(line):
            events.append(Event("compute", found[1], found[2]))
    return events
