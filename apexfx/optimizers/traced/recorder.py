"""The recorder, which writes down a `step()` as a graph: ops over tensors, and a tensor in the place of each symbolic number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..._torch import FakeTensor, OpOverload, TorchDispatchMode, storage_address, tree_leaves, tree_map, unset_fake_temporarily
from ...graph.nodes import set_value
from .ops_of_numbers import OPS_OF_NUMBERS
from .symbolic_numbers import Condition, Host, Inputs, NotTraceable, Number

aten = torch.ops.aten
# What returns its argument, where nothing is written.
_SAME = (aten.clone.default, aten.detach.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
_CONDITIONS = 4  # along a path: each doubles how often a step is traced


class Recorder(TorchDispatchMode):
    """Record ops over fake tensors, below `torch.func.functionalize`; equal calls are recorded once.

    Args:
        inputs: the inputs of the graph.
        now: the numbers that the host sets, as they are now.

    Attributes:
        guards: (how the host computes a condition, its outcome) where numbers of the host decided.
        path: (a condition as a tensor, the outcome that is traced) where only the graph can decide.
    """

    def __init__(self, inputs: Sequence[Tensor], now: Inputs) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        for place, tensor in enumerate(inputs):
            self._nodes[id(tensor)] = self._graph.placeholder(f"input_{place}")
            set_value(self._nodes[id(tensor)], tensor)
        self._kept: list[Any] = [*inputs]  # so that no id is another's later
        self._now = now
        self.guards: list[tuple[Host, bool]] = []
        self.path: list[tuple[Tensor, bool]] = []
        self._decisions: dict[int, bool] = {}
        self._memo: dict[Any, Any] = {}

    def finish(self, outputs: Sequence[Tensor], written: Sequence[Tensor]) -> fx.GraphModule:
        """Return the graph that computes these, none of them in the memory of an input that is written with them."""
        memory = {storage_address(tensor.untyped_storage()) for tensor in written}
        self._graph.output([self._graph.call_function(aten.clone.default, (self._nodes[id(tensor)],))
                            if storage_address(tensor.untyped_storage()) in memory else self._nodes[id(tensor)]
                            for tensor in outputs])
        self._graph.eliminate_dead_code()
        return fx.GraphModule({}, self._graph)

    # ---- numbers ----------------------------------------------------------------------------------------------------------

    def symbolic(self, tensor: Tensor) -> torch.SymFloat:
        """Return the number that a 0-d tensor is."""
        return torch.SymFloat(Number(self, self._as(tensor, torch.float64)))

    def symbolic_input(self, tensor: Tensor, host: Host) -> torch.SymFloat:
        """The same of an input that the host sets, as functionalization has wrapped it."""
        number = tensor.item()
        number.node.host = host
        return number

    def number(self, function: Callable[..., Any], *operands: Number) -> Number:
        return Number(self, *self._computed(function, operands))

    def condition(self, function: Callable[..., Any], *operands: Number) -> Condition:
        return Condition(self, *self._computed(function, operands))

    @staticmethod
    def _computed(function: Callable[..., Any], operands: Sequence[Number]) -> tuple[Any, Host | None]:
        hosts = [operand.host for operand in operands]
        host = (lambda now: function(*(each(now) for each in hosts))) if None not in hosts else None
        return function(*(operand.tensor for operand in operands)), host

    def decide(self, condition: Condition) -> bool:
        """Return which branch of the program is traced."""
        if not isinstance(condition.tensor, Tensor):
            return bool(condition.tensor)
        if condition.host is not None:
            outcome = bool(condition.host(self._now))
            self.guards.append((condition.host, outcome))
            return outcome
        known = {id(tensor): outcome for tensor, outcome in self.path}
        if id(condition.tensor) in known:
            return known[id(condition.tensor)]
        outcome = self._decisions.get(len(self.path), True)
        self.path.append((condition.tensor, outcome))
        return outcome

    def along_branches(self, function: Callable[[], list[Tensor]], decisions: Mapping[int, bool] = {}) -> list[Tensor]:
        """Run `function` along all branches that `decisions` leaves open; return its results, chosen by the conditions.

        Raises:
            NotTraceable: one path has too many conditions.
        """
        self.path, self._decisions = [], decisions
        results, path = function(), self.path
        if len(path) > _CONDITIONS:
            raise NotTraceable(f"branches on what the graph computes, more than {_CONDITIONS} times")
        for place in reversed(range(len(decisions), len(path))):
            before = {earlier: outcome for earlier, (_, outcome) in enumerate(path[:place])}
            others = self.along_branches(function, {**before, place: False})
            results = [a if a is b else torch.where(path[place][0], a, b) for a, b in zip(results, others, strict=True)]
        return results

    # ---- ops --------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Sequence[Any] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        args, kwargs = tree_map(self._constant, (args, kwargs or {}))
        if func is aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return torch.SymBool(Condition(self, args[0]))
            with self:  # not by a view: each is another tensor
                return self.symbolic(aten.view_copy.default(args[0], []) if args[0].dim() else args[0])
        if func in _SAME:
            return args[0]
        if func._schema.is_mutable:  # what functionalization has left
            raise NotTraceable(f"writes by {func} what is neither a parameter nor state of one")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotTraceable(f"draws random numbers ({func})")
        if any(isinstance(leaf, torch.SymFloat) for leaf in tree_leaves((args, kwargs))) or _is_of_counts(func, args):
            with self:
                return self._of_tensors(func, args, kwargs)
        with self:
            if func.namespace == "aten" and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        key = None if func.is_view else (func, str(tree_map(_named, (args, kwargs))))  # autograd has each view be its own
        if key is None or key not in self._memo:
            self._memo[key] = self._recorded(func, args, kwargs)
        return self._memo[key]

    def _recorded(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            node = self._graph.call_function(func, *tree_map(self._node, (args, kwargs)))
            set_value(node, result)
            for place, leaf in enumerate(leaves):
                self._nodes[id(leaf)] = node if leaf is result else self._graph.call_function(operator.getitem, (node, place))
        self._kept += args, kwargs, result
        return result

    def _node(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) not in self._nodes:
            raise NotTraceable("reads a parameter that is not trained")
        return self._nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf

    def _constant(self, leaf: Any) -> Any:
        """Return a tensor that torch has just made of a number as one of the trace."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.numel() != 1:
            raise NotTraceable("uses a tensor that is neither of its state nor of its groups")
        with unset_fake_temporarily():
            number = leaf.item()
        with self:
            return torch.full(leaf.shape, number, dtype=leaf.dtype, device=leaf.device)

    def _as(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype:
            return tensor
        with self:
            return tensor.to(dtype)

    def _of_tensors(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an op with tensors in the place of symbolic numbers."""
        name = func._schema.name.partition("::")[2]
        named = {a.name: value for a, value in zip(func._schema.arguments, args)} | kwargs
        if name.startswith("_foreach_"):
            return self._one_by_one(func, name, named)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in OPS_OF_NUMBERS:
            return OPS_OF_NUMBERS[name](self, **named)
        slots = {a.name: str(a.type) for a in func._schema.arguments}
        if scalars := [slot for slot, value in named.items() if isinstance(value, torch.SymFloat) and slots[slot] != "Tensor"]:
            raise NotTraceable(f"gives {func} a number that changes as {scalars[0]}")
        own = [self.beside(x, tensors) if isinstance(x, torch.SymFloat) else x for x in args]
        return func(*own, **{k: self.beside(x, tensors) if isinstance(x, torch.SymFloat) else x for k, x in kwargs.items()})

    def beside(self, number: Any, tensors: Sequence[Tensor]) -> Any:
        """Return a number as the tensor that takes no part in the dtype of a result, as a number does."""
        tensor = number.node.tensor if isinstance(number, torch.SymFloat) else number
        if not isinstance(tensor, Tensor):
            return tensor
        if tensor.device != tensors[0].device:
            raise NotTraceable("mixes tensors of several devices")
        if not any(t.is_floating_point() or t.is_complex() for t in tensors):
            return self._as(tensor, torch.get_default_dtype())
        if any(t.dim() for t in tensors):
            return tensor
        return self._as(tensor, next(t.dtype for t in tensors if t.is_floating_point()))

    def _one_by_one(self, func: OpOverload, name: str, named: dict[str, Any]) -> Any:
        name = name.removeprefix("_foreach_")
        single = getattr(torch, name, None) or getattr(aten, name)
        first, *others = named.values()
        keywords = {a.name for a in func._schema.arguments if a.kwarg_only} | {"alpha", "value", "weight"}
        rows = []
        for place in range(len(first if isinstance(first, (list, tuple)) else others[0])):
            each = {k: v[place] if isinstance(v, (list, tuple)) else v for k, v in named.items()}
            if name in ("addcmul", "addcdiv") and "scalars" in each:
                each["value"] = each.pop("scalars")
            positional = [v for k, v in each.items() if k not in keywords]
            rows.append(single(*positional, **{k: v for k, v in each.items() if k in keywords}))
        return rows


def _is_of_counts(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an op over lists has 0-d tensors alone, which may be one that several parameters have in common."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return func._schema.name.startswith("aten::_foreach_") and not any(t.dim() for t in tensors)


def _named(leaf: Any) -> str:
    return f"<{id(leaf)}>" if isinstance(leaf, Tensor) else repr(leaf)
