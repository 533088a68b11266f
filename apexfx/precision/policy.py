"""What both executors decide about one call beyond the table, and which rule holds at a node of a graph.

The functions know nothing of graphs: they are given names, dtypes and arguments, and the eager executor calls them too.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import tree_leaves
from ..config import HALVES, OptLevel
from ..graph.marks import KIND, NAME, OF_STEP, OTHER_NAMES, OUTSIDE_OF_MODEL
from ..graph.mutation import body_of
from ..graph.nodes import argument, module_paths, op_name
from ..graph.op_names import canonical_name
from . import argument_marks
from .rules import ADDITIVE_MASKS, FLOATS, RESIDUALS, RULES, STORED_NUMBERS, Rule, consistent, decide, lookup

_NAMED_DTYPES = {
    "float32": torch.float32, "float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "torch.float32": torch.float32, "torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16,
}  # fmt: skip
# Ops of these families compute nothing: an override of their module leaves them as they are.
NOTHING_TO_COMPUTE = ("view", "cast", "factory", "lookup", "in_place", "autograd", "step")
_LEFT_OUTSIDE = (*NOTHING_TO_COMPUTE, "foreign")  # of a half model: other ops there compute in float32

aten = torch.ops.aten
_CAST_METHODS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
_LARGEST = torch.finfo(torch.float32).max


# ---- casts that the user's code makes ---------------------------------------------------------------------------------------


def asked_dtype(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the floating dtype that a call of `name` casts its first argument to, None where it names none."""
    if name in _CAST_METHODS:
        return _CAST_METHODS[name]
    if name not in ("to", "type"):
        return None
    return next((x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.dtype) and x in FLOATS), None)


def is_user_cast(name: str, was: torch.dtype | None, asked: torch.dtype | None) -> bool:
    """Return whether a cast says in which dtype the user wants to compute: a choice that a matrix product respects.

    A cast that changes nothing says so only as `.float()`: `.to(x.dtype)` arrives as `.to(torch.float32)`.

    Args:
        name: of the function that casts.
        was: dtype of what is cast; in a graph, when it was captured.
        asked: from `asked_dtype`.
    """
    return asked is not None and (name == "float" or was != asked)


def left_to_user(rule: Rule, dtypes: Sequence[torch.dtype | None], user_cast: Sequence[bool]) -> bool:
    """Return whether an op computes in float32 because the user's code made every operand float32 by hand.

    Args:
        rule: that would hold otherwise.
        dtypes: of the operands, None for what is no floating tensor.
        user_cast: for each, whether the user's code cast it (`is_user_cast`), perhaps through views.
    """
    floating = [(dtype, by_user) for dtype, by_user in zip(dtypes, user_cast) if dtype in FLOATS]
    return rule.kind == "half" and bool(floating) and all(d == torch.float32 and by_user for d, by_user in floating)


# ---- numbers and masks beyond half's range ----------------------------------------------------------------------------------


def narrow(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Return the half type of an op whose floating tensors are all of that one, else None: there `limited` holds."""
    floating = {dtype for dtype in dtypes if dtype in FLOATS}
    return floating.pop() if len(floating) == 1 and floating <= {*HALVES} else None


def limited(number: Any, name: str, half: torch.dtype) -> Any:
    """Return an argument of the op called `name`, whose tensors are `half`: a number beyond that range becomes its limit.

    That concerns finite numbers that the op stores as the tensor's dtype, and in every op the limits of float32: what
    `torch.finfo(x.dtype).min` was while x was float32. The same line gives half's limit where x is half.
    """
    kinds = (int, float) if name.startswith("masked_fill") else float  # elsewhere an int may be an index
    if not isinstance(number, kinds) or isinstance(number, bool) or not math.isfinite(number):
        return number
    limit = torch.finfo(half).max
    beyond = abs(number) > limit and (name in STORED_NUMBERS or abs(number) >= _LARGEST)
    return math.copysign(limit, number) if beyond else number


def is_float32_limit(number: Any) -> bool:
    """Return whether a number among the arguments of an op is a limit of float32, as additive masks are made of."""
    return isinstance(number, float) and math.isfinite(number) and abs(number) >= _LARGEST


def keeps_float32_limits(rule: Rule) -> bool:
    """Return whether an op hands on that a tensor may hold limits of float32: not one that computes with all its elements."""
    return rule.kind not in ("half", "float")


def additive_mask(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the additive mask among the arguments of the attention op called `name`, None for other ops.

    Its most negative finite value must not become -inf in half, or a row that is masked throughout turns into nan.
    """
    if name not in ADDITIVE_MASKS:
        return None
    position, keyword = ADDITIVE_MASKS[name]
    return kwargs.get(keyword, args[position] if position < len(args) else None)


def decide_call(rule: Rule, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dtypes: Sequence[torch.dtype | None],
                half: torch.dtype, out: torch.dtype | None) -> tuple[tuple[torch.dtype | None, ...], torch.dtype | None]:
    """Return the dtype that each argument of a call of `name` is cast to, and the half type that its numbers have to fit.

    Args:
        dtypes: of the arguments in order, nested sequences flattened; None for what is no tensor.
        half: the half type.
        out: the dtype of `out=`, where that is given.
    """
    if kwargs.get("out") is not None:
        targets = decide(rule, [out, *dtypes], half)[1:]
    else:
        residuals = RESIDUALS.get(name, ())  # which are added whatever their dtype
        places = (*range(len(args)), *kwargs) if residuals else (None,) * len(dtypes)
        targets = decide(rule, [None if place in residuals else dtype for place, dtype in zip(places, dtypes)], half)
    return targets, None if "dtype" in kwargs else narrow([target or dtype for target, dtype in zip(targets, dtypes)])


def saturated(tensor: Any, half: torch.dtype, call: Callable[..., Any] = lambda op, *args: op(*args)) -> Any:
    """Return `tensor` with its finite values brought into the range of `half`; infinities stay. The dtype stays too.

    Args:
        call: runs an op, or adds a node for it.
    """
    limits = torch.finfo(half)
    infinite = call(aten.isinf.default, tensor)
    return call(aten.where.self, infinite, tensor, call(aten.clamp.default, tensor, limits.min, limits.max))


# ---- the rule of a node -----------------------------------------------------------------------------------------------------


class Policy:
    """The rule of every node.

    Args:
        level: a row of the O0-O3 table.
        half: the half type.
        overrides: module path pattern or op name -> dtype (or its name, "half", "promote", "passthrough"). A path
            covers the module and everything below it: what runs while the module is called, or while a method of it is, where
            the method's class tells which module that is; `missed` says what this may leave out. An op is named plainly
            ("gelu"), as torch spells it ("F.gelu"), or as the cast ledger prints it. Where two keys cover one op, the later one
            wins. A `Rule` of amp's takes the place of the table's row for the op of that name, see `canonical_name`.

    Raises:
        TypeError: a key that is no string.
        ValueError: a value that is none of the above.
    """

    def __init__(self, level: OptLevel, half: torch.dtype, overrides: Mapping[str, Any]) -> None:
        self.level = level
        self.half = half
        marks = {name: Rule(kind, f"amp.{kind}_function") for name, kind in argument_marks.NAMES.items()}
        self.rules = {**RULES, **marks, **{key: rule for key, rule in overrides.items() if isinstance(rule, Rule)}}
        self.overrides = {key: self._override(key, value) for key, value in overrides.items() if not isinstance(value, Rule)}
        self.used: set[str] = set()

    def _override(self, key: Any, value: Any) -> Rule:
        if not isinstance(key, str):
            raise TypeError(f"apexfx: precision={{{key!r}: ...}} was given, expected a module path, a pattern or an op "
                            "name as the key")
        reason = f"override precision[{key!r}]"
        if value in ("promote", "passthrough"):
            return Rule(value, reason)
        dtype = self.half if value == "half" else _NAMED_DTYPES.get(value, value) if isinstance(value, str) else value
        if dtype not in (torch.float32, *HALVES):
            raise ValueError(f"apexfx: precision={{{key!r}: {value!r}}} was given, expected torch.float32, torch.float16, "
                             "torch.bfloat16, 'float32', 'float16', 'bfloat16', 'half', 'promote' or 'passthrough'")
        return Rule("dtype", reason, dtype=dtype)

    def rule(self, node: fx.Node) -> Rule:
        """Return the rule for a call node of torch's; overrides first, then the table as the level reads it."""
        name = canonical_name(node.target)
        base = lookup(name, self.rules, in_place=bool(argument(node, "inplace")), out=node.kwargs.get("out") is not None,
                      names_dtype=any(isinstance(a, torch.dtype) for a in tree_leaves((node.args, node.kwargs))),
                      equation=next(iter(node.args), None))
        override = self._override_of(node, name, base)
        if override is not None:
            return override
        if node.meta.get(OF_STEP) and base.family not in ("autograd", "foreign"):
            return Rule("passthrough", "of the step itself, in the dtype of its gradients", "step")
        if self.level.cast_model and node.meta.get(OUTSIDE_OF_MODEL) and base.family not in _LEFT_OUTSIDE:
            return Rule("float", "outside of the model, which is what is half", base.family)
        return base if self.level.patch_ops else consistent(base, to_half=self.level.cast_model)

    def overridden(self, node: fx.Node) -> bool:
        """Return whether a user's override decides about `node`."""
        name = canonical_name(node.target)
        return self._override_of(node, name, lookup(name, self.rules)) is not None

    def _override_of(self, node: fx.Node, name: str, base: Rule) -> Rule | None:
        override = None
        if node.meta.get(OF_STEP):
            return None
        for key, rule in self.overrides.items():
            if self._covers(key, node, name.rstrip("_")):
                self.used.add(key)
                if base.family not in NOTHING_TO_COMPUTE or rule.kind != "dtype":
                    override = Rule(rule.kind, rule.reason, base.family, rule.dtype)
        return override

    @staticmethod
    def _covers(key: str, node: fx.Node, op: str) -> bool:
        """Return whether `key` is a pattern of the op's name, plain or as reports print it, or of a path of its module."""
        if key.startswith(("torch.", "F.")) and canonical_name(key.rpartition(".")[2]).rstrip("_") == op.removeprefix("apexfx."):
            return True  # in any spelling: the ledger prints F.linear, which is written in C, as torch.linear
        if any(fnmatch.fnmatchcase(name, key) for name in (op, op.rpartition(".")[2], op_name(node))):
            return True
        return _is_under(module_paths(node), key)

    def missed(self, node: fx.Node) -> list[str]:
        """Return the override keys that cover a module of which `node` has a parameter, but not `node`.

        Dynamo records no module where a method of it is called alone. A checkpoint hands parameters on: the nodes of its body are
        asked instead.
        """
        if body_of(node) is not None:
            return []
        name = canonical_name(node.target).rstrip("_")
        possible = list(_owners_elsewhere(node))
        if not possible or lookup(name, self.rules).family in NOTHING_TO_COMPUTE:
            return []
        return [key for key in self.overrides if any(_is_under(paths, key) for paths in possible)
                and not self._covers(key, node, name)]

    def unused(self) -> list[str]:
        """Return the override keys that covered nothing in the graphs seen so far."""
        return [key for key in self.overrides if key not in self.used]


def _is_under(paths: Sequence[str], key: str) -> bool:
    """Return whether `key` is a pattern of one of a module's paths, or of one of a module above it."""
    return any(covers(key, path) for path in paths)


def covers(key: str, path: str) -> bool:
    """Return whether `key` is a pattern of a module's path, or of that of a module above it."""
    return bool(path) and fnmatch.fnmatchcase(path, key) or fnmatch.fnmatchcase(path, f"{key}.*")


def and_above(path: str) -> Iterator[str]:
    """Yield a module path and those of the modules that hold it, without the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _owners_elsewhere(node: fx.Node) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the modules that hold the parameters given to `node`, where it was traced in none of them."""
    for source in node.all_input_nodes:
        if source.meta.get(KIND) == "param":
            names = (source.meta[NAME], *source.meta.get(OTHER_NAMES, ()))
            owners = tuple(name.rpartition(".")[0] for name in names)
            if not any(not owner or f"{path}.".startswith(f"{owner}.") for owner in owners for path in module_paths(node)):
                yield owners
