"""Which rule holds at a node: the table at an opt level, under a user's overrides."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .._torch import tree_leaves
from ..config import OptLevel
from ..fx import argument, module_paths, op_name
from .op_names import canonical_name
from .rules import HALVES, Rule, consistent, lookup

_NAMED_DTYPES = {
    "float32": torch.float32, "float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "torch.float32": torch.float32, "torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16,
}  # fmt: skip
# Ops of these families compute nothing: an override of their module leaves them as they are.
_NOTHING_TO_COMPUTE = ("view", "cast", "factory", "lookup", "in_place")


class Policy:
    """The rule of every node.

    Args:
        level: a row of the O0-O3 table.
        half: the half type.
        overrides: module path pattern or op name -> dtype (or its name, "half", "promote", "passthrough"). A path
            covers the module and everything below it. An op is named plainly ("gelu"), as torch spells it ("F.gelu"),
            or as the cast ledger prints it. Where two keys cover one op, the later one wins.

    Raises:
        TypeError: a key that is no string.
        ValueError: a value that is none of the above.
    """

    def __init__(self, level: OptLevel, half: torch.dtype, overrides: Mapping[str, Any]) -> None:
        self.level = level
        self.half = half
        self.overrides = {key: self._override(key, given) for key, given in overrides.items()}
        self.used: set[str] = set()

    def _override(self, key: Any, given: Any) -> Rule:
        if not isinstance(key, str):
            raise TypeError(f"apexfx: precision={{{key!r}: ...}} was given, expected a module path, a pattern or an op "
                            "name as the key")
        reason = f"override precision[{key!r}]"
        if given in ("promote", "passthrough"):
            return Rule(given, reason)
        dtype = self.half if given == "half" else _NAMED_DTYPES.get(given, given) if isinstance(given, str) else given
        if dtype not in (torch.float32, *HALVES):
            raise ValueError(f"apexfx: precision={{{key!r}: {given!r}}} was given, expected torch.float32, "
                             "torch.float16, torch.bfloat16, their names, 'half', 'promote' or 'passthrough'")
        return Rule("dtype", reason, dtype=dtype)

    def rule(self, node: fx.Node) -> Rule:
        """Return the rule for a call node of torch's; overrides first, then the table as the level reads it."""
        name = canonical_name(node.target)
        base = lookup(name, in_place=bool(argument(node, "inplace")), out="out" in node.kwargs)
        override = self._override_of(node, name, base)
        if override is not None:
            return override
        arguments = tree_leaves((node.args, node.kwargs))
        if base.kind in ("float", "banned") and any(isinstance(a, torch.dtype) for a in arguments):
            return Rule("passthrough", "the call names the dtype it computes in", base.family)
        return base if self.level.patch_ops else consistent(base, to_half=self.level.cast_model)

    def overridden(self, node: fx.Node) -> bool:
        """Return whether a user's override decides about `node`."""
        name = canonical_name(node.target)
        return self._override_of(node, name, lookup(name)) is not None

    def _override_of(self, node: fx.Node, name: str, base: Rule) -> Rule | None:
        found = None
        for key, rule in self.overrides.items():
            if self._covers(key, node, name.rstrip("_")):
                self.used.add(key)
                if base.family not in _NOTHING_TO_COMPUTE or rule.kind != "dtype":
                    found = Rule(rule.kind, rule.reason, base.family, rule.dtype)
        return found

    @staticmethod
    def _covers(key: str, node: fx.Node, op: str) -> bool:
        """Return whether `key` is a pattern of the op's name, plain or as reports print it, or of a path of its module."""
        if key.startswith(("torch.", "F.")) and canonical_name(key.rpartition(".")[2]).rstrip("_") == op:
            return True  # in any spelling: the ledger prints F.linear, which is written in C, as torch.linear
        names = (op.rpartition(".")[2], op_name(node), *filter(None, module_paths(node)))
        return any(fnmatch.fnmatchcase(name, key) for name in names) or any(
            fnmatch.fnmatchcase(path, f"{key}.*") for path in module_paths(node))

    def unused(self) -> list[str]:
        """Return the override keys that covered nothing in the graphs seen so far."""
        return [key for key in self.overrides if key not in self.used]
