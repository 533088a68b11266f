"""Mixed precision as cast nodes: O0-O3 over a captured forward graph."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_leaves, tree_map

from .._torch import free_unbacked_symbols
from ..config import OptLevel
from ..fx import evaluate, fake_mode, op_name, set_value, signature, value
from ..pipeline import Pass, PassError
from .casts import CastRow, additive_mask, dtype_of, insert_cast, is_inserted_cast, ledger_row, user_cast
from .model_casts import cast_entries
from .mutation import argument, bodies, body_of, written
from .op_names import canonical_name, is_foreign
from .precision_policy import Policy
from .precision_rules import FLOATS, HALVES, STORED_NUMBERS, Rule, decide

log = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float32).max
_CAPTURED = "the dtypes it was captured with"


class Precision(Pass):
    """Cast per op by rule (O1), or everything once at entry (O2, O3), or halves up to float32 (O0).

    Parameters keep their storage, name and dtype: the cast node is the model's copy, and its backward brings the
    gradient to the parameter's dtype. The outputs keep the dtype the graph was captured with, so that code after a
    graph break meets what Dynamo promised it.

    Before:  h: f32 = linear(x: f32, weight: f32); y: f32 = softmax(h)
    After:   h: bf16 = linear(_to_copy(x, bf16), _to_copy(weight, bf16)); y: f32 = softmax(_to_copy(h, f32))

    Args:
        level: a row of the O0-O3 table.
        half_dtype: torch.float16 or torch.bfloat16.
        overrides: module path pattern or op name -> dtype; see `Policy`.
    """

    name = "precision"
    stage = "forward"
    numeric = "changes_dtype"
    provides = ("precision",)

    def __init__(self, *, level: OptLevel, half_dtype: torch.dtype, overrides: Mapping[str, Any] = {}) -> None:
        super().__init__()
        if half_dtype not in HALVES:
            raise ValueError(f"apexfx: half_dtype={half_dtype} was given, expected torch.float16 or torch.bfloat16")
        self.policy = Policy(level, half_dtype, overrides)
        self.rows: list[CastRow] = []

    def begin(self) -> None:
        super().begin()
        self.rows = []

    def call(self, gm: fx.GraphModule) -> PassResult:
        level = self.policy.level
        if level.patch_ops or level.cast_model:
            _refuse_autocast(gm)
        before = len(self.rows)
        mode = fake_mode(gm.graph)
        captured = {node: value(node) for body in bodies(gm) for node in body.graph.nodes}
        walk = _Walk(self, captured, mode)
        if not level.patch_ops:
            made = cast_entries(gm, self.policy, self.note, mode)
            captured.update({node: captured[original] for node, original in made.items()})
            walk.changed.update(made)
        walk.rewrite(gm)
        walk.restore_outputs(gm)
        for key in self.policy.unused():
            log.warning("apexfx: precision[%r] covers no module path and no op of this graph", key)
        return PassResult(gm, len(self.rows) > before or walk.edited)

    def note(self, cast: fx.Node, row: CastRow) -> None:
        """Put an inserted cast into the ledger."""
        self.rows.append(row)
        cast.meta["apexfx_cast"] = row.as_json()
        self.record(cast, f"{row.op}: {row.tensor} {row.source_dtype} -> {row.target_dtype} ({row.rule})")

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        level = self.policy.level
        if not (level.patch_ops or level.cast_model):
            return None
        floating = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "placeholder") and dtype_of(n)]
        if not floating:
            return "the graph has no floating tensor of 16, 32 or 64 bits"
        ops = sorted({op_name(n) for n in floating if n.op != "placeholder"})
        return (f"every op already gets the dtype its rule asks for, or has no rule ({', '.join(ops[:6])}"
                f"{', ...' if len(ops) > 6 else ''})")

    def artifacts(self) -> dict[str, Any]:
        return {"casts": [row.as_json() for row in self.rows]}

    def options(self) -> dict[str, Any]:
        overrides = {k: [r.kind, str(r.dtype)] for k, r in self.policy.overrides.items()}
        return {"level": self.policy.level.summary, "keep_batchnorm_fp32": self.policy.level.keep_batchnorm_fp32,
                "half": str(self.policy.half), "overrides": overrides}


def _refuse_autocast(gm: fx.GraphModule) -> None:
    """Raise ValueError where torch.autocast would cast what this pass has cast."""
    devices = {leaf.device.type for n in gm.graph.nodes for leaf in tree_leaves(value(n)) if isinstance(leaf, Tensor)}
    ambient = [d for d in sorted(devices) if d != "meta" and torch.is_autocast_enabled(d)]
    inner = [n for body in bodies(gm) for n in body.graph.nodes if _enters_autocast(n)]
    if ambient or inner:
        where = f"torch.autocast({ambient[0]!r}) is active around the call" if ambient else \
            f"the model enters torch.autocast itself (node {inner[0].name!r})"
        raise ValueError(f"apexfx: {where}, and opt_level asks for casts too: every op would be cast twice. Leave the "
                         "autocast out, or use opt_level='O0'; torch.autocast(..., enabled=False) regions are fine")


def _enters_autocast(node: fx.Node, *, enabled: bool = True) -> bool:
    if node.op != "call_function" or canonical_name(node.target) != "_enter_autocast":
        return False
    return bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)) is enabled


class _Walk:
    """One visit of every node in order: decide its casts from what its inputs are now, then re-evaluate it.

    Args:
        captured: what every node's value was before the pass.
    """

    def __init__(self, pass_: Precision, captured: dict[fx.Node, Any], mode: Any) -> None:
        self.pass_ = pass_
        self.policy = pass_.policy
        self.captured = captured
        self.mode = mode
        self.changed: set[fx.Node] = set()
        self.chosen: set[fx.Node] = set()  # made float32 by the user's own words, through any number of views
        self.extreme: set[fx.Node] = set()  # holds finite numbers beyond half's range: an additive mask
        self.entered: set[int] = set()
        self.body = ""
        self.edited = False

    def rewrite(self, gm: fx.GraphModule) -> None:
        regions: set[fx.Node] = set()
        for node in list(gm.graph.nodes):
            if node.op not in ("call_function", "call_method"):
                continue
            if _enters_autocast(node, enabled=False):
                regions.add(node)
            elif node.op == "call_function" and canonical_name(node.target) == "_exit_autocast":
                regions.discard(node.args[0])
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                self._higher_order(node)
            else:
                self._node(node, casts_off=bool(regions) and self.policy.level.patch_ops)

    def restore_outputs(self, gm: fx.GraphModule) -> None:
        """Cast what the graph returns back to the dtype it was captured with."""
        output = gm.graph.output_node()
        casts: dict[fx.Node, fx.Node] = {}

        def restored(node: fx.Node) -> fx.Node:
            was = self.captured.get(node)
            if not isinstance(was, Tensor) or dtype_of(node) in (None, was.dtype):
                return node
            if node not in casts:
                reason = "what leaves the graph keeps the dtype it was captured with"
                casts[node] = self._cast(node, was.dtype, like=node, before=output, op="output", rule="output", reason=reason)
            return casts[node]

        output.args = fx.node.map_arg(output.args, restored)
        if casts:
            set_value(output, fx.node.map_arg(output.args[0], value))

    def _node(self, node: fx.Node, *, casts_off: bool) -> None:
        cast_to = user_cast(node)
        name = canonical_name(node.target)
        rule = self._rule(node, name, casts_off=casts_off)
        self._follow(node, name, rule, cast_to)
        stale = any(source in self.changed for source in node.all_input_nodes)
        if is_inserted_cast(node):
            if stale:
                self._evaluate(node)
            return
        if (is_foreign(name) and rule.family == "foreign") or (stale and self._data_dependent(node)):
            self._as_captured(node, "not torch's own op: it gets " + _CAPTURED if is_foreign(name)
                              else "its shape depends on data: it gets " + _CAPTURED)
            return
        moved = self._cast_arguments(node, name, rule)
        moved |= self._limit_numbers(node, name)
        if moved or stale:
            self._evaluate(node)

    def _rule(self, node: fx.Node, name: str, *, casts_off: bool) -> Rule:
        rule = self.policy.rule(node)
        if casts_off and rule.kind in ("half", "float", "banned"):
            kind = "half_if_mixed" if rule.kind == "half" else "promote"
            return Rule(kind, "inside autocast(enabled=False): only what would not fit together is cast", rule.family)
        if rule.kind == "half" and self.policy.level.patch_ops:
            floating = [n for n in node.all_input_nodes if dtype_of(n)]
            if floating and all(n in self.chosen for n in floating):
                return Rule("passthrough", "the user's code made every operand float32", rule.family)
        return rule

    def _follow(self, node: fx.Node, name: str, rule: Rule, cast_to: torch.dtype | None) -> None:
        """Carry the two properties of values that decisions further down depend on."""
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if cast_to == torch.float32:
            # `.to(x.dtype)` arrives as `.to(torch.float32)`: where nothing changed at capture, it may be no choice.
            was = self.captured.get(source)
            if node.target == "float" or not isinstance(was, Tensor) or was.dtype != torch.float32:
                self.chosen.add(node)
        elif cast_to is None and source in self.chosen and rule.family in ("view", "cast"):
            self.chosen.add(node)
        numbers = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, float)]
        if any(math.isfinite(a) and abs(a) >= _LARGEST for a in numbers):
            self.extreme.add(node)
        elif rule.kind not in ("half", "float") and any(n in self.extreme for n in node.all_input_nodes):
            self.extreme.add(node)

    def _cast_arguments(self, node: fx.Node, name: str, rule: Rule) -> bool:
        dtypes = [dtype_of(a) for a in tree_leaves((node.args, node.kwargs))]
        if "out" in node.kwargs:
            targets = decide(rule, [dtype_of(node.kwargs["out"]), *dtypes], self.policy.half)[1:]
        else:
            targets = decide(rule, dtypes, self.policy.half)
        return self._replace(node, targets, op=op_name(node), rule=rule.kind, reason=rule.reason, mask=additive_mask(node, name))

    def _replace(self, node: fx.Node, targets: Any, *, op: str, rule: str, reason: str, mask: fx.Node | None = None) -> bool:
        """Cast the arguments of `node`, in flattened order, to `targets`; one cast serves an argument given twice."""
        if not any(targets):
            return False
        fixed = set(written(node))
        wanted, made = iter(targets), {}

        def cast(argument: Any) -> Any:
            target = next(wanted)
            if target is None or argument in fixed:
                return argument
            if argument not in made:
                saturate = target in HALVES and dtype_of(argument) not in HALVES and \
                    (argument is mask or argument in self.extreme)
                made[argument] = self._cast(argument, target, like=node, before=node, op=op, rule=rule, reason=reason,
                                            saturate=saturate)
            return made[argument]

        node.args, node.kwargs = tree_map(cast, (tuple(node.args), dict(node.kwargs)))
        return bool(made)

    def _cast(self, tensor: fx.Node, dtype: torch.dtype, *, like: fx.Node, before: fx.Node, op: str, rule: str,
              reason: str, saturate: bool = False) -> fx.Node:
        cast = insert_cast(tensor, dtype, before=before, like=like, mode=self.mode, saturate=saturate)
        self.captured[cast] = self.captured.get(tensor)
        if tensor in self.extreme:
            self.extreme.add(cast)
        self.pass_.note(cast, ledger_row(cast, tensor, op=op, rule=rule, reason=reason, body=self.body))
        return cast

    def _limit_numbers(self, node: fx.Node, name: str) -> bool:
        """Bring Python numbers that were float32's limits at capture back into the range of a tensor that is half now."""
        dtypes = {dtype_of(n) for n in node.all_input_nodes} - {None}
        if len(dtypes) != 1 or not dtypes <= set(HALVES) or "dtype" in node.kwargs:
            return False
        limit = torch.finfo(dtypes.pop()).max
        stored, edited = name in STORED_NUMBERS, False
        kinds = (int, float) if name.startswith("masked_fill") else float  # elsewhere an int may be an index

        def limited(a: Any) -> Any:
            nonlocal edited
            number = isinstance(a, kinds) and not isinstance(a, bool) and math.isfinite(a)
            if not number or abs(a) <= limit or not (stored or abs(a) >= _LARGEST):
                return a
            edited = True
            return math.copysign(limit, a)

        args, kwargs = tree_map(limited, (tuple(node.args), dict(node.kwargs)))
        if edited:
            node.args, node.kwargs = args, kwargs
            self.edited = True
        return edited

    def _evaluate(self, node: fx.Node) -> None:
        try:
            new = evaluate(node, self.mode)
        except Exception as error:  # noqa: BLE001  an op may refuse a dtype with any error; captured dtypes are its way out
            if not self._as_captured(node, f"it refuses the others ({type(error).__name__}): it gets {_CAPTURED}"):
                raise PassError(self.pass_.name, f"does not run with its new dtypes: {error}", node) from error
            return
        if signature(new) != signature(value(node)):
            set_value(node, new)
            self.changed.add(node)

    def _as_captured(self, node: fx.Node, reason: str) -> bool:
        """Cast every argument of `node` back to the dtype it had when the graph was captured; return whether any moved."""
        targets = []
        for argument in tree_leaves((node.args, node.kwargs)):
            was = self.captured.get(argument) if isinstance(argument, fx.Node) else None
            now = dtype_of(argument)
            targets.append(was.dtype if now and isinstance(was, Tensor) and was.dtype in FLOATS and was.dtype != now else None)
        return self._replace(node, targets, op=op_name(node), rule="captured", reason=reason)

    @staticmethod
    def _data_dependent(node: fx.Node) -> bool:
        return any(isinstance(leaf, Tensor) and free_unbacked_symbols(leaf) for leaf in tree_leaves(value(node)))

    def _higher_order(self, node: fx.Node) -> None:
        pair = body_of(node)
        if pair is None:
            self._as_captured(node, "its body is not rewritten: it gets " + _CAPTURED)
            return
        body, operands = pair
        inputs = body.graph.find_nodes(op="placeholder")
        if id(body) in self.entered:
            targets = [None, *(dtype_of(p) if dtype_of(o) not in (None, dtype_of(p)) else None
                               for o, p in zip(operands, inputs))]
            targets += [None] * len(tree_leaves(node.kwargs))
            self._replace(node, targets, op=op_name(node), rule="captured", reason="its body is shared with an earlier call")
        else:
            self.entered.add(id(body))
            for placeholder, operand in zip(inputs, operands):
                if signature(value(placeholder)) != signature(value(operand)):
                    self.changed.add(placeholder)
                set_value(placeholder, value(operand))
            outer, self.body = self.body, str(node.args[0].target)
            self.rewrite(body)
            self.body = outer
            body.recompile()
        result = fx.node.map_arg(body.graph.output_node().args[0], value)
        new = tuple(result) if isinstance(value(node), (tuple, list)) and isinstance(result, (tuple, list)) else result
        if signature(new) != signature(value(node)):
            set_value(node, new)
            self.changed.add(node)
