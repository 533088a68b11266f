"""Which names of a module the rule table speaks about."""

from __future__ import annotations

from typing import Any

from ...graph.op_names import canonical_name
from ...precision.rules import RULES


def names_of_kind(module: Any, kind: str) -> list[str]:
    """Return the callable names of `module` whose rule is of `kind`, sorted."""
    found = []
    for name in dir(module):
        internal = name.startswith("_") and not name.startswith("__")
        if internal or name.endswith("_") and not name.startswith("__") or not callable(getattr(module, name, None)):
            continue
        rule = RULES.get(canonical_name(name))
        if rule is not None and rule.kind == kind:
            found.append(name)
    return found
