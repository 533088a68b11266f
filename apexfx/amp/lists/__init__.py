"""Apex's lists of function names, read off the rule table; edits to them count at the next `initialize` or `init`.

`functional_overrides.FP32_FUNCS.remove("softmax")` leaves softmax alone, `.FP16_FUNCS.append(name)` has it run in half.
"""

from __future__ import annotations

from types import ModuleType

from ...graph.op_names import canonical_name
from ...precision.rules import Rule
from . import functional_overrides as functional_overrides
from . import tensor_overrides as tensor_overrides
from . import torch_overrides as torch_overrides
from .reading import KINDS

_MODULES = (torch_overrides, functional_overrides, tensor_overrides)


def _names(module: ModuleType, attribute: str) -> list[str]:
    return [entry[0] if isinstance(entry, tuple) else entry for entry in getattr(module, attribute, ())]


_ORIGINAL = {(module, attribute): tuple(_names(module, attribute)) for module in _MODULES for attribute in KINDS}


def edited_rules() -> dict[str, Rule]:
    """Return the rules that edits of the lists ask for: canonical op name -> rule."""
    removed, added = {}, {}
    for (module, attribute), original in _ORIGINAL.items():
        now, where = set(_names(module, attribute)), f"{module.__name__.rpartition('.')[2]}.{attribute}"
        for name in set(original) - now:
            removed[canonical_name(name)] = Rule("passthrough", f"removed from amp.lists.{where}")
        for name in now - set(original):
            added[canonical_name(name)] = Rule(KINDS[attribute], f"added to amp.lists.{where}")
    return {**removed, **added}
