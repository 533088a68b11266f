"""Runs a graph op by op in its own dtypes and, beside it, in float64, on one rank alone: what code made of it is held to.

Where the code hands tensors to an op that it calls, and that writes them (an optimizer's update, a collective), both go on with
what the code has handed over: an update that divides a gradient by its own size says nothing of the gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._torch import OpOverload, TorchDispatchMode, tree_flatten, tree_leaves, tree_unflatten
from ..graph.collectives import starts_collective
from .inductor_random import as_kernels_draw
from .interpreter import Interpreter, evaluate, of_one_rank, on_one_rank
from .wide_ops import NO_KERNEL, WideOps, is_as_run


class Handed(NamedTuple):
    """A tensor that the code has handed to an op: its node, what the ops and float64 give for it, and what it is."""

    node: fx.Node
    place: int
    code: Tensor
    ops: Tensor
    wide: Tensor


class CallsOfCode(TorchDispatchMode):
    """Answers the collectives that code calls as if all ranks held what this one holds, and keeps what it hands to ops.

    Attributes:
        handed: op -> for each call of one that writes in place, or communicates, the tensors among its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handed: dict[Any, list[list[Tensor]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = of_one_rank(func, args, kwargs or {})
        if is_handed_over(func):  # and not what it writes, of which shapes are enough
            self.handed[func].append([x.detach().clone() if read else x.detach().to("meta")
                                      for x, read in _tensors(func, args, kwargs)])
        answered = on_one_rank(func, args)
        if answered is None:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            for x, answer in zip(tree_leaves(args[0]), tree_leaves(answered)):
                x.copy_(answer)
            return args[0]
        return answered


def is_handed_over(target: Any) -> bool:
    """Return whether an op is called by code as it is, and writes or communicates."""
    is_ours = isinstance(target, OpOverload) and target.namespace == "apexfx"
    return starts_collective(target) or is_ours and target._schema.is_mutable


class BesideFloat64(Interpreter):
    """Evaluates a graph in its own dtypes and in float64.

    Args:
        gm: the graph.
        handed: what the code handed over, as `CallsOfCode` has it; what the ops get is theirs without it.
        observe: called with each node that calls something, and its values in both dtypes; what it returns, if not None, is what
            the ops get in the place of theirs.
        widens: False leaves float64 out, at a third of the cost: what the ops give is in its place.

    Attributes:
        pairs: of what was handed over.
        wide_inputs, wide_outputs: in float64, the inputs as they are left.
    """

    def __init__(self, gm: fx.GraphModule, handed: Mapping[Any, Sequence[list[Tensor]]] | None = None,
                 observe: Callable[[fx.Node, Any, Any], Any] | None = None, *, widens: bool = True) -> None:
        super().__init__(gm)
        self._widens, self._ops = widens, WideOps(torch.float64)
        self._handed = {target: list(calls) for target, calls in (handed or {}).items()}
        self._observe = observe
        self._wide: dict[fx.Node, Any] = {}
        self.pairs: list[Handed] = []
        self.wide_inputs: list[Any] = []
        self.wide_outputs: Sequence[Any] = ()

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            self.wide_outputs = fx.node.map_arg(n.args[0], lambda node: self._wide[node])
            return super().run_node(n)
        if n.op != "call_function":
            result = super().run_node(n)
            self._wide[n] = self._ops.lifted(result, copy=True) if self._widens else result
            if n.op == "placeholder":
                self.wide_inputs.append(self._wide[n])
            return result
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        wide_args, wide_kwargs = fx.node.map_arg((n.args, n.kwargs), lambda node: self._wide[node])
        if (calls := self._handed.get(n.target)) and (handed := _nearest(calls, _tensors(n.target, args, kwargs))):
            (args, kwargs), (wide_args, wide_kwargs) = self._as_handed(n, handed, (args, kwargs), (wide_args, wide_kwargs))
        draw = as_kernels_draw(n.target)
        result = draw(*args, **kwargs) if draw is not None else evaluate(n, args, kwargs)
        self._wide[n] = self._wider(n, result, (args, kwargs), (wide_args, wide_kwargs)) if self._widens else result
        if self._observe is not None and (other := self._observe(n, result, self._wide[n])) is not None:
            result = other
        for dead in self.user_to_last_uses.get(n, ()):
            self._wide.pop(dead, None)
        return result

    def _wider(self, node: fx.Node, got: Any, call: Any, wide_call: Any) -> Any:
        """Return what a node gives in float64; random numbers are those of the run."""
        if is_as_run(node):
            return self._ops.lifted(got)
        try:
            return self._ops.evaluate(node, got, *wide_call)
        except NO_KERNEL:
            return self._ops.rounded(node, call, wide_call)

    def _as_handed(self, node: fx.Node, handed: list[Tensor], call: Any, wide_call: Any) -> tuple[Any, Any]:
        """Note what the code has handed over beside what it should be, and return calls with it, but for what they write."""
        code = {id(own): x for (own, read), x in zip(_tensors(node.target, *call), handed) if read}
        (narrow, structure), wide = tree_flatten(call), tree_leaves(wide_call)
        for place, (plain, own) in enumerate(zip(list(narrow), list(wide))):
            if (x := code.get(id(plain))) is not None:
                ops = plain.clone()
                self.pairs.append(Handed(node, place, x, ops, own.clone() if self._widens else ops))
                narrow[place], wide[place] = x, self._ops.lifted(x) if self._widens else x
        return tree_unflatten(narrow, structure), tree_unflatten(wide, structure)


def _tensors(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, bool]]:
    """Return the tensors that an op is called with, in the order of its schema, each with whether it is no more than read."""
    arguments = op._schema.arguments
    given = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args):])]
    return [(x, starts_collective(op) or not (argument.alias_info is not None and argument.alias_info.is_write))
            for argument, values in zip(arguments, given) for x in tree_leaves(values) if isinstance(x, Tensor)]


def _nearest(calls: list[list[Tensor]], own: Sequence[tuple[Tensor, bool]]) -> list[Tensor] | None:
    """Take from `calls` that whose tensors have the shapes of `own` and are nearest to them; None where none has."""
    fitting = [call for call in calls if [x.shape for x in call] == [x.shape for x, _ in own]]
    if len(fitting) > 1:
        fitting.sort(key=lambda call: sum(float((x.double() - y.double()).nan_to_num().norm())
                                          for x, (y, read) in zip(call, own) if read and not x.is_complex()))
    if fitting:
        calls[:] = [call for call in calls if call is not fitting[0]]
    return fitting[0] if fitting else None


class OpByOp(fx.Interpreter):
    """Runs a graph op by op over all its ranks, with the random numbers that Inductor's code draws."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (as_kernels_draw(target) or target)(*args, **kwargs)

