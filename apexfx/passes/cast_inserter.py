"""How the rule table is applied to a graph: visit its nodes in order, decide, cast, and evaluate again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import HigherOrderOperator, below_functorch, free_unbacked_symbols, tree_leaves, tree_map
from ..config import HALVES
from ..errors import PassError
from ..graph.gradient_modes import gradient_modes
from ..graph.marks import RULE
from ..graph.mutation import body_of, storages, written, written_storages
from ..graph.nodes import call, evaluate, op_name, set_value, signature, value
from ..graph.op_names import canonical_name
from ..precision import argument_marks
from ..precision.casts import CastRow, dtype_of, insert_cast, insert_limits, is_inserted_cast, ledger_row, user_cast
from ..precision.policy import (
    Policy,
    additive_mask,
    decide_call,
    is_float32_limit,
    is_user_cast,
    keeps_float32_limits,
    left_to_user,
    limited,
)
from ..precision.rules import FLOATS, FOREIGN, SAME_DATA_FAMILIES, Rule, lookup

_CAPTURED = "the dtypes it was captured with"


def autocast_region(node: fx.Node) -> tuple[str, bool] | None:
    """Return the device for which `node` switches torch.autocast, and whether on or off; None for what begins no such region."""
    if node.op != "call_function" or canonical_name(node.target) != "_enter_autocast":
        return None
    device, _, enabled, _ = node.args
    return str(device), bool(enabled)


def device_types(values: Any) -> set[str]:
    """Return where the tensors in `values` are: "cpu", "cuda"."""
    return {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


class CastInserter:
    """Casts the arguments of every node as its rule says of the dtypes that they have by then, and evaluates it again.

    Args:
        gm: the outermost graph.
        policy: gives the rule of every node.
        record: takes every inserted cast and its row of the ledger.
        captured: what every node's value was before the pass.
        mode: the fake mode of the graph's values.

    Attributes:
        changed: nodes whose value is another than the captured one.
        edited: whether anything but casts was changed.
        not_cast: nodes that would be cast, were they not in a region of torch.autocast(enabled=False).
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        policy: Policy,
        record: Callable[[fx.Node, CastRow], None],
        captured: dict[fx.Node, Any],
        mode: Any,
    ) -> None:
        self.policy = policy
        self.record = record
        self.captured = captured
        self.written_memory = written_storages(gm)
        self.mode = mode
        self.changed: set[fx.Node] = set()
        self.user_casts: set[fx.Node] = set()  # cast to float32 by the user's code, perhaps viewed since
        self.float32_limits: set[fx.Node] = set()  # hold finite numbers beyond half's range: additive masks
        self.visited_bodies: set[int] = set()
        self.saturated: dict[tuple[fx.Node, torch.dtype, str], fx.Node] = {}
        self.unrecorded: list[tuple[fx.Node, CastRow]] = []
        self.modes: dict[fx.Node, str] = {}
        self.regions: dict[fx.Node, str] = {}  # where torch.autocast is switched off around a node, and for which device
        self.not_cast: list[fx.Node] = []
        self.levels: list[fx.Node] = []  # the nodes that opened the transforms of torch.func around a node
        self.body = ""
        self.edited = False

    def rewrite(self, gm: fx.GraphModule) -> None:
        """Visit the nodes of `gm`, and of the bodies that a pass may rewrite, in order."""
        self.modes.update(gradient_modes(gm.graph))
        for node in list(gm.graph.nodes):
            if node.op not in ("call_function", "call_method"):
                continue
            if (region := autocast_region(node)) and not region[1]:
                self.regions[node] = region[0]
            elif node.op == "call_function" and canonical_name(node.target) == "_exit_autocast":
                self.regions.pop(node.args[0], None)
            elif node.op == "call_function" and (name := canonical_name(node.target)).endswith("crement_nesting"):
                self.levels.append(node) if name.endswith("_increment_nesting") else self.levels.pop()
            elif isinstance(node.target, HigherOrderOperator):
                self._higher_order(node)
            else:
                self._node(node)
        self.edited |= argument_marks.take_out(gm.graph)

    def restore_outputs(self, gm: fx.GraphModule) -> None:
        """Cast what the graph returns back to the dtype it was captured with; what shared memory then still does."""
        output = gm.graph.output_node()
        returned = Counter(memory for node in output.all_input_nodes for memory in storages(self.captured.get(node)))
        shared = {memory for memory, count in returned.items() if count > 1}
        touched = written_storages(gm)
        new: dict[fx.Node, fx.Node] = {}

        def restored(node: fx.Node) -> fx.Node:
            if node not in new:
                source = self._viewed(node) if storages(self.captured.get(node)) & shared else None
                memory = [storages(value(each)) for each in (node, source) if each is not None]
                if frozenset.intersection(*memory) == frozenset() != touched & frozenset.union(*memory):
                    source = None  # a cast of the user's is a copy now, and one of the two is written
                new[node] = cast(node) if source is None else self._view_again(node, source, restored(source), output)
            return new[node]

        def cast(node: fx.Node) -> fx.Node:
            was = self.captured.get(node)
            if not isinstance(was, Tensor) or dtype_of(node) in (None, was.dtype):
                return node
            return self._cast(node, was.dtype, like=node, before=output, op="output", rule="output",
                              reason="what leaves the graph keeps the dtype it was captured with")

        output.args = fx.node.map_arg(output.args, restored)
        self._record_casts()
        if any(node is not old for old, node in new.items()):
            set_value(output, fx.node.map_arg(output.args[0], value))

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """Return the node of which `node` was a view as captured; None for what has memory of its own, or of a body."""
        if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
            return None
        memory = storages(self.captured.get(node))
        for source in node.all_input_nodes:
            tensor = isinstance(self.captured.get(source), Tensor)
            if storages(self.captured.get(source)) & memory and (tensor or self._viewed(source) is not None):
                return source
        return None

    def _view_again(self, node: fx.Node, source: fx.Node, new: fx.Node, output: fx.Node) -> fx.Node:
        """Return `node` as a view of `new`, which takes the place of its `source`."""
        if new is source or source in written(node):  # then it is the source
            return node if new is source else new
        with node.graph.inserting_before(output):
            was, seen = self.captured[source], self.captured[node]
            if isinstance(was, Tensor) and isinstance(seen, Tensor) and was.requires_grad and not seen.requires_grad:
                new = call(node.graph, torch.ops.aten.detach.default, (new,), like=node, mode=self.mode)  # viewed under no_grad
            again = node.graph.node_copy(node, lambda argument: new if argument is source else argument)
        set_value(again, evaluate(again, self.mode))
        return again

    def _node(self, node: fx.Node) -> None:
        cast_to = user_cast(node)
        name = canonical_name(node.target)
        rule = self._rule(node)
        self._follow(node, name, rule, cast_to)
        node.meta.pop(RULE, None)  # what is inserted for the node is not to inherit it
        # A gradient comes in the dtype of what it belongs to, whatever the dtype of what is differentiated.
        sources = tree_leaves(node.args[1:]) if name == "grad" else node.all_input_nodes
        stale = any(source in self.changed for source in sources if isinstance(source, fx.Node))
        if is_inserted_cast(node):
            if stale:
                self._evaluate(node)
            return
        if rule is FOREIGN:
            self._as_captured(node, "not torch's own op: it gets " + _CAPTURED)
        elif stale and _data_dependent(node):
            self._as_captured(node, "its shape depends on data: it gets " + _CAPTURED)
        elif stale and name == "grad":  # which fake values, without a history, cannot run
            with self.mode:
                set_value(node, tuple(old if old is None else torch.empty_like(value(leaf))
                                      for old, leaf in zip(value(node), tree_leaves(node.args[1]))))
            self.changed.add(node)
        elif self.levels and _in_functorch(node):  # which cannot be evaluated outside of the transform
            self._as_captured(node, "inside of a transform of torch.func it gets " + _CAPTURED)
        else:
            before = node.args, node.kwargs
            moved = self._cast_arguments(node, name, rule)
            if moved or stale:
                self._evaluate(node, before)
        node.meta.setdefault(RULE, (rule.kind, rule.family, rule.reason))
        self._record_casts()

    def _record_casts(self) -> None:
        for cast, row in self.unrecorded:
            self.record(cast, row)
        self.unrecorded.clear()

    def _rule(self, node: fx.Node) -> Rule:
        rule = self.policy.rule(node)
        if self.policy.level.patch_ops and rule.kind in ("half", "float", "banned") and self._in_a_region_without_casts(node):
            self.not_cast.append(node)
            kind = "half_if_mixed" if rule.kind == "half" else "promote"
            return Rule(kind, "inside autocast(enabled=False): only what would not fit together is cast", rule.family)
        if self.policy.level.patch_ops:
            operands = node.all_input_nodes
            if left_to_user(rule, [dtype_of(n) for n in operands], [n in self.user_casts for n in operands]):
                return Rule("passthrough", "the user's code made every operand float32", rule.family)
        return rule

    def _in_a_region_without_casts(self, node: fx.Node) -> bool:
        off = set(self.regions.values())
        return bool(off) and not off.isdisjoint(device_types([value(n) for n in (node, *node.all_input_nodes)]))

    def _follow(self, node: fx.Node, name: str, rule: Rule, cast_to: torch.dtype | None) -> None:
        """Carry the two properties of values that decisions further down depend on."""
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        was = self.captured.get(source)
        if is_user_cast(name, was.dtype if isinstance(was, Tensor) else None, cast_to):
            self.user_casts.add(node)
        elif cast_to is None and source in self.user_casts and rule.family in SAME_DATA_FAMILIES:
            self.user_casts.add(node)
        if any(map(is_float32_limit, tree_leaves((node.args, node.kwargs)))) \
                or keeps_float32_limits(rule) and any(n in self.float32_limits for n in node.all_input_nodes):
            self.float32_limits.add(node)

    def _cast_arguments(self, node: fx.Node, name: str, rule: Rule) -> bool:
        """Cast what the policy decides, and bring numbers that were within float32's range back into that of half."""
        before = tree_leaves((node.args, node.kwargs))
        targets, half = decide_call(rule, name, node.args, node.kwargs, list(map(dtype_of, before)), self.policy.half,
                                    dtype_of(node.kwargs.get("out")))
        mask = additive_mask(name, node.args, node.kwargs)
        moved = self._replace(node, targets, op=op_name(node), rule=rule.kind, reason=rule.reason, mask=mask)
        if half is None:
            return moved
        args, kwargs = tree_map(lambda leaf: limited(leaf, name, half), (tuple(node.args), dict(node.kwargs)))
        if any(isinstance(old, float | int) and new is not old for new, old in zip(tree_leaves((args, kwargs)), before)):
            node.args, node.kwargs, self.edited, moved = args, kwargs, True, True
        return moved

    def _replace(
        self, node: fx.Node, targets: Sequence[torch.dtype | None], *, op: str, rule: str, reason: str,
        mask: fx.Node | None = None,
    ) -> bool:
        """Cast the arguments of `node`, in flattened order, to `targets`; one cast serves an argument given twice."""
        if not any(targets):
            return False
        fixed = set(written(node))
        wanted, casts = iter(targets), {}

        def cast(argument: Any) -> Any:
            target = next(wanted)
            if target is None or argument in fixed:
                return argument
            if argument not in casts:
                source = argument
                if target in HALVES and (argument is mask or argument in self.float32_limits):
                    source = self._saturated(argument, target, node)
                casts[argument] = self._cast(source, target, like=node, before=node, op=op, rule=rule, reason=reason)
            return casts[argument]

        node.args, node.kwargs = tree_map(cast, (tuple(node.args), dict(node.kwargs)))
        return bool(casts)

    def _saturated(self, mask: fx.Node, half: torch.dtype, node: fx.Node) -> fx.Node:
        """Return `mask` with its finite values inside the range of `half`; made once, unless something writes it."""
        if dtype_of(mask) in HALVES:
            return mask
        key = (mask, half, self.modes[node])
        if key not in self.saturated or storages(value(mask)) & self.written_memory:
            self.saturated[key] = insert_limits(mask, half, before=node, like=node, mode=self.mode)
            self.captured[self.saturated[key]] = self.captured.get(mask)
        return self.saturated[key]

    def _cast(
        self, tensor: fx.Node, dtype: torch.dtype, *, like: fx.Node, before: fx.Node, op: str, rule: str, reason: str
    ) -> fx.Node:
        if self.levels and tensor < self.levels[0]:  # inside of a transform the result of a cast would belong to it
            before = self.levels[0]
        cast = insert_cast(tensor, dtype, before=before, like=like, mode=self.mode)
        self.captured[cast] = self.captured.get(tensor)
        if tensor in self.float32_limits:
            self.float32_limits.add(cast)
        row = ledger_row(cast, tensor, op=op, rule=rule, reason=reason, body=self.body)
        self.unrecorded.append((cast, row))
        return cast

    def _evaluate(self, node: fx.Node, before: tuple[Any, Any] | None = None) -> None:
        try:
            new = evaluate(node, self.mode)
        except Exception as error:  # an op refuses a dtype with any error
            if before is not None:
                self._undo(node, before)
            if not self._as_captured(node, f"it refuses the others ({type(error).__name__}): it gets {_CAPTURED}"):
                raise PassError("precision", f"does not run with its new dtypes: {error}", node) from error
            return
        # A cast that changed nothing gave its argument on, which one that changes something does not.
        memory = [storages(of(source)) for source in node.all_input_nodes for of in (value, self.captured.get)]
        aliases = bool(frozenset().union(*memory) & (storages(new) | storages(value(node))))
        if aliases or signature(new) != signature(value(node)):
            set_value(node, new)
            self.changed.add(node)

    def _undo(self, node: fx.Node, before: tuple[Any, Any]) -> None:
        """Give `node` the arguments it had, and take the casts made for it out again."""
        node.args, node.kwargs = before
        for cast, _ in reversed(self.unrecorded):
            cast.graph.erase_node(cast)
        self.unrecorded.clear()

    def _as_captured(self, node: fx.Node, reason: str) -> bool:
        """Cast every argument of `node` back to the dtype it was captured with; return whether any moved."""
        node.meta[RULE] = "captured", lookup(canonical_name(node.target), self.policy.rules).family, reason
        targets: list[torch.dtype | None] = []
        for leaf in tree_leaves((node.args, node.kwargs)):
            was = self.captured.get(leaf) if isinstance(leaf, fx.Node) else None
            now = dtype_of(leaf)
            moved = now is not None and isinstance(was, Tensor) and was.dtype in FLOATS and was.dtype != now
            targets.append(was.dtype if moved else None)
        return self._replace(node, targets, op=op_name(node), rule="captured", reason=reason)

    def _higher_order(self, node: fx.Node) -> None:
        pair = body_of(node)
        if pair is None:
            if self._as_captured(node, "its body is not rewritten: it gets " + _CAPTURED):
                given = frozenset().union(*(storages(value(source)) for source in node.all_input_nodes))
                with self.mode:  # what was a view of an argument is one of the cast, of which nothing else may be a view
                    set_value(node, tree_map(lambda leaf: leaf.clone() if storages(leaf) - given else leaf, value(node)))
                self.changed.add(node)
            for source in self.changed.intersection(written(node)):  # not cast, and perhaps returned
                was = storages(self.captured.get(source))
                set_value(node, tree_map(lambda leaf: value(source) if storages(leaf) & was else leaf, value(node)))
                self.changed.add(node)
            self._record_casts()
            return
        body, operands = pair
        inputs = body.graph.find_nodes(op="placeholder")
        if id(body) in self.visited_bodies:
            pairs = [(dtype_of(o), dtype_of(p)) for o, p in zip(operands, inputs)]
            targets = [None, *(p if o not in (None, p) else None for o, p in pairs)]
            targets += [None] * len(tree_leaves(node.kwargs))
            self._replace(node, targets, op=op_name(node), rule="captured", reason="its body serves another call too")
            self._record_casts()
        else:
            self.visited_bodies.add(id(body))
            for placeholder, operand in zip(inputs, operands):
                if operand in self.changed or signature(value(placeholder)) != signature(value(operand)):
                    self.changed.add(placeholder)
                set_value(placeholder, value(operand))
            outer, self.body = self.body, str(node.args[0].target)
            self.rewrite(body)
            self.body = outer
            body.recompile()
        new = fx.node.map_arg(body.graph.output_node().args[0], value)
        if isinstance(value(node), tuple) and isinstance(new, list):
            new = tuple(new)
        moved = any(source in self.changed for source in body.graph.output_node().all_input_nodes)
        if moved or signature(new) != signature(value(node)):
            set_value(node, new)
            self.changed.add(node)


def _in_functorch(node: fx.Node) -> bool:
    leaves = tree_leaves([value(n) for n in (node, *node.all_input_nodes)])
    return any([isinstance(leaf, Tensor) and below_functorch(leaf) is not leaf for leaf in leaves])


def _data_dependent(node: fx.Node) -> bool:
    return any(isinstance(leaf, Tensor) and free_unbacked_symbols(leaf) for leaf in tree_leaves(value(node)))
