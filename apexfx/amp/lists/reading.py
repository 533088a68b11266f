"""Which names of a module the rule table speaks about."""

from __future__ import annotations

from typing import Any

from ...graph.op_names import canonical_name
from ...precision.rules import RULES

# Apex's name of a list -> the kind of its rules.
KINDS = {"FP16_FUNCS": "half", "FP32_FUNCS": "float", "CASTS": "promote", "SEQUENCE_CASTS": "sequence_promote",
         "BANNED_FUNCS": "banned"}  # fmt: skip


def lists_of(module: Any) -> list[list[Any]]:
    """Return the callable names of `module` by the kind of their rule, in the order of `KINDS`, each list sorted.

    A banned name comes with what is done instead, as in Apex.
    """
    names: dict[str, list[Any]] = {kind: [] for kind in KINDS.values()}
    for name in dir(module):
        internal = name.startswith("_") and not name.startswith("__")
        if internal or name.endswith("_") and not name.startswith("__") or not callable(getattr(module, name, None)):
            continue
        rule = RULES.get(canonical_name(name))
        if rule is not None and rule.kind in names:
            names[rule.kind].append((name, "runs in float32 here") if rule.kind == "banned" else name)
    return list(names.values())
