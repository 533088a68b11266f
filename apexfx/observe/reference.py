"""Runs each node of a graph in a wide dtype beside the run itself: which error a node inherits, and which it introduces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import is_without_derivative, tree_flatten, tree_leaves, tree_map
from ..graph.mutation import written
from .interpreter import evaluate
from .wide_ops import NO_KERNEL, WideOps, is_as_run

_WRONG = 0.5  # relative: an element that is so far off is wrong, and not rounded
Call = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs


@dataclass(frozen=True)
class NodeErrors:
    """How far the result of a node is from the reference's: norms over all its floating elements that are finite in both.

    Where a result has no floating elements, they are the shares of elements that differ.

    Attributes:
        introduced: between the result and what the node gives in the wide dtype for the inputs that it got.
        inherited: between that and what it gives for the reference's inputs.
        scale: norm of the result, or of the reference's where that is larger.
        of_inputs: the largest relative error of its inputs.
        is_lost: whether something is not finite where the reference is, though all inputs were as finite as the reference's.
        is_measured: False where the node cannot run in the wide dtype, and what it introduces is not known.
    """

    introduced: float
    inherited: float
    scale: float
    of_inputs: float
    is_lost: bool = False
    is_measured: bool = True


@dataclass
class _Values:
    """What a node gave in the run, and in the reference's; how far they are apart, relatively; whether something was lost."""

    got: Any
    wide: Any
    error: float = 0.0
    lost: bool = False


class Reference:
    """Observer: evaluates each node a second time in a wide dtype on what it got, and a third time on the reference's values.

    Random numbers are those of the run. An op that is written in Python (`torch.library.custom_op`) is evaluated so that none of
    its own casts narrows.

    Args:
        dtype: torch.float64 or torch.float32; what is as wide or wider stays.

    Attributes:
        errors: of each node that calls something, in order.
        outputs: of the graph, those of the run.
        wide_outputs: the reference's.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._ops = WideOps(dtype)
        self._values: dict[fx.Node, _Values] = {}
        self._constant_arguments: dict[Any, list[int]] = {}  # kind of a call -> places of those that it has no derivative by
        self._roots: list[Tensor] = []
        self._deltas: dict[fx.Node, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self.errors: dict[fx.Node, NodeErrors] = {}
        self.outputs: Sequence[Any] = ()
        self.wide_outputs: Sequence[Any] = ()

    def __call__(self, node: fx.Node, result: Any) -> None:
        if node.op == "output":
            self.outputs = fx.node.map_arg(node.args[0], lambda n: self._values[n].got)
            self.wide_outputs = fx.node.map_arg(node.args[0], lambda n: self._values[n].wide)
        elif node.op != "call_function":
            self._values[node] = _Values(result, tree_map(_detached, self._ops.lifted(result, copy=True)))
        else:
            self._values[node] = self._evaluate(node, result)

    # ---- one node --------------------------------------------------------------------------------------------------------

    def _evaluate(self, node: fx.Node, got: Any) -> _Values:
        sources = [self._values[source] for source in node.all_input_nodes]
        inputs = _Values(None, None, max((s.error for s in sources), default=0.0), any(s.lost for s in sources))
        call: Call = fx.node.map_arg((node.args, node.kwargs), lambda n: self._values[n].got)
        wide_call: Call = fx.node.map_arg((node.args, node.kwargs), lambda n: self._values[n].wide)
        if is_as_run(node) or "empty" in str(node.target):
            return _Values(got, tree_map(_detached, self._ops.lifted(got)))
        with torch.enable_grad():
            wide, measured = self._wide(node, wide_call, call, got)
        exact = not inputs.error and not inputs.lost
        with torch.no_grad():
            local = wide if exact or not measured else self._wide(node, self._ops.lifted(call), call, got)[0]
        if written(node):  # at the end of a graph, buffers: nothing that errors are counted for
            return _Values(got, wide, inputs.error, inputs.lost)
        return self._measured(node, _Values(got, wide, inputs.error, inputs.lost), local, wide_call, call, measured)

    def _wide(self, node: fx.Node, wide: Call, got_call: Call, got: Any) -> tuple[Any, bool]:
        """Return what a node gives for arguments in the wide dtype, and whether it could be run in that."""
        if node.target is torch.ops.aten.detach.default:  # of what is saved for backward, which errors go through
            return wide[0][0], True
        if writes := written(node):
            own = {id(self._values[source].wide): self._values[source].wide.detach().clone() for source in writes}
            wide = tree_map(lambda x: own.get(id(x), x), wide)
        try:
            result = self._ops.evaluate(node, got, *wide)
            if constants := set() if writes else self._without_derivative(node, result, wide):
                result = self._ops.evaluate(node, got, *tree_map(lambda x: x.detach() if id(x) in constants else x, wide))
        except NO_KERNEL:
            with torch.no_grad():
                return self._ops.rounded(node, got_call, wide), False
        name = str(node.target)
        if isinstance(result, tuple) and "norm" in name and "backward" not in name:  # its backward's derivative knows statistics
            result = (result[0], *map(_detached, result[1:]))
        return tree_map(lambda x: _detached(x) if isinstance(x, Tensor) and is_without_derivative(x) else x, result), True

    def _without_derivative(self, node: fx.Node, result: Any, call: Call) -> set[int]:
        """Return what `_without_derivative` returns, which is asked once for each kind of call."""
        leaves, structure = tree_flatten(call)
        first = {id(x): place for place, x in reversed([*enumerate(leaves)])}  # of op(x, x) both are x
        kind = (node.target, structure,
                *((x.dtype, x.dim(), x.requires_grad, first[id(x)]) if isinstance(x, Tensor) else repr(x) for x in leaves))
        if kind not in self._constant_arguments:
            constants = _without_derivative(result, call)
            self._constant_arguments[kind] = [place for place, x in enumerate(leaves) if id(x) in constants]
        return {id(leaves[place]) for place in self._constant_arguments[kind]}

    def _measured(self, node: fx.Node, values: _Values, local: Any, wide_call: Call, call: Call, measured: bool) -> _Values:
        inputs_error, inputs_lost = values.error, values.lost
        leaves = [leaf for leaf in zip(*map(tree_leaves, (values.got, values.wide, local))) if isinstance(leaf[0], Tensor)]
        floating = [leaf for leaf in leaves if _is_floating(leaf[0])]
        values.lost = any(_lost(got, wide) for got, wide, _ in floating)
        if inputs_lost or values.lost:  # compare what the node gives for the reference's values
            narrow = tree_map(lambda x, like: x.detach().to(like.dtype) if isinstance(like, Tensor) else x, wide_call, call)
            with contextlib.suppress(RuntimeError), torch.no_grad():
                again = _floating_leaves(evaluate(node, *narrow))
                own = _floating_leaves(self._wide(node, self._ops.lifted(narrow), narrow, values.got)[0])
                floating = [(new, wide, new_own) for new, (_, wide, _), new_own in zip(again, floating, own)]
        is_first = not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(wide_call))
        introduced, inherited, scale = [], [], []
        for got, wide, own in floating:
            got, own, plain = self._ops.lifted(got).detach(), own.detach(), wide.detach()
            first, second = _difference(got, own), _difference(own, plain)
            introduced.append(float(first.norm()))
            inherited.append(float(second.norm()))
            scale.append(max(float(_finite(plain).norm()), float(_finite(got).norm())))
            if is_first and not wide.requires_grad:
                self._roots.append(wide.requires_grad_())
            if wide.requires_grad:
                self._deltas.setdefault(node, []).append((wide, first, second))
        num_elements = sum(got.numel() for got, _, _ in floating)
        if not floating and leaves:
            num_elements = sum(got.numel() for got, _, _ in leaves)
            shares = [(float((got != own).sum()), float((own != wide).sum())) for got, wide, own in leaves
                      if got.shape == wide.shape == own.shape]
            introduced, inherited = zip(*shares) if shares else ((0.0,), (0.0,))
            scale = [float(num_elements or 1)]
        norms = [math.hypot(*column) for column in (introduced, inherited, scale)]
        errors = NodeErrors(*norms, inputs_error, values.lost and not inputs_lost, measured)
        values.error = relative(math.hypot(errors.introduced, errors.inherited), errors.scale)
        self.errors[node] = errors
        return values

    # ---- back from a node ------------------------------------------------------------------------------------------------

    def source_of_loss(self, node: fx.Node) -> fx.Node:
        """Return the node whose error makes `node` the first that is not finite: itself, or one upstream.

        It follows elements, not norms: from the lost ones back through each op that would be wrong in the wide dtype, too, for
        the inputs that it got, to the input that is farthest off there.
        """
        elements = _lost_elements(_as_one(self._values[node].got), _as_one(self._values[node].wide))
        while True:
            got, wide, local = map(_as_one, (self._values[node].got, self._values[node].wide, self._for_inputs_of_run(node)))
            if bool((wrong := elements & (_relative_errors(got, wide) > _WRONG)).any()):
                elements = wrong
            if _largest(_relative_errors(got, local), elements) >= _largest(_relative_errors(local, wide), elements):
                return node
            is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and isinstance(self._values[node].got, Tensor)
            candidates = []
            for source in node.all_input_nodes:
                errors = _relative_errors(_as_one(self._values[source].got), _as_one(self._values[source].wide))
                if source.op == "call_function" and not written(source) and errors.numel():
                    read = elements.long().sum_to_size(errors.shape) > 0 if is_pointwise else torch.ones_like(errors) > 0
                    candidates.append((_largest(errors, read), source, read))
            error, source, read = max(candidates, key=lambda candidate: candidate[0], default=(0.0, node, elements))
            if not error:
                return node
            node, elements = source, read

    def _for_inputs_of_run(self, node: fx.Node) -> Any:
        """Return what a node gives in the wide dtype for the inputs that it got in the run."""
        call: Call = fx.node.map_arg((node.args, node.kwargs), lambda n: self._values[n].got)
        with torch.no_grad():
            return self._wide(node, self._ops.lifted(call), call, self._values[node].got)[0]

    # ---- all of them -----------------------------------------------------------------------------------------------------

    def contributions(self, weights: Mapping[int, float]) -> dict[fx.Node, tuple[float, float]]:
        """Return what each node has contributed to the error of the outputs, to first order: introduced, and inherited.

        It takes one backward through the reference. Those introduced add up to the weighted sum of the outputs' norms of errors.

        Args:
            weights: of outputs, by their place.

        Raises:
            RuntimeError: an op has no derivative.
        """
        total, scores = torch.zeros((), dtype=torch.float64), {node: [0.0, 0.0] for node in self._deltas}
        with torch.enable_grad():
            for place, weight in weights.items():
                wide = self.wide_outputs[place]
                difference = _difference(self._ops.lifted(self.outputs[place]).detach(), wide.detach())
                if _lost(self.outputs[place], wide):
                    difference = wide.detach()
                size = float(difference.norm())
                if wide.requires_grad and size:
                    total = total + weight / size * (_finite(wide) * difference.conj()).sum().real.cpu()
        if not total.requires_grad:
            return {}

        def note(node: fx.Node, deltas: tuple[Tensor, Tensor]) -> Any:
            def hook(gradient: Tensor | None) -> None:
                for place, delta in enumerate(deltas if gradient is not None else ()):
                    scores[node][place] += float((_finite(gradient).conj() * delta).sum().real)
            return hook

        handles = [wide.register_hook(note(node, deltas)) for node, leaves in self._deltas.items() for wide, *deltas in leaves]
        try:
            torch.autograd.grad(total, self._roots, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return {node: tuple(pair) for node, pair in scores.items()}


def relative(error: float, scale: float) -> float:
    """Return an error divided by the scale of its tensor; 0 where either is 0."""
    return error / scale if error and scale else 0.0


def _without_derivative(result: Any, call: Call) -> set[int]:
    """Return the ids of the arguments that autograd cannot differentiate a result by, as is common for ops of a backward."""
    results, arguments = ([x for x in _floating_leaves(values) if x.requires_grad] for values in (result, call))
    if not results or any(map(is_without_derivative, results)):
        return set()

    def has_derivative(*inputs: Tensor) -> bool:
        try:
            torch.autograd.grad(results, inputs, list(map(torch.zeros_like, results)), retain_graph=True, allow_unused=True)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return False
        return True

    return set() if has_derivative(*arguments) else {id(x) for x in arguments if not has_derivative(x)}


def _floating_leaves(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and _is_floating(leaf)]


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def _difference(a: Tensor, b: Tensor) -> Tensor:
    return _finite(a - b) if a.shape == b.shape else a.new_zeros(())


def _lost(got: Tensor, wide: Tensor) -> bool:
    return got.shape == wide.shape and bool(_lost_elements(got, wide).any())


def _lost_elements(got: Tensor, wide: Tensor) -> Tensor:
    return wide.isfinite() & ~got.to(wide.dtype).isfinite()  # no float8 has isfinite


def _as_one(values: Any) -> Tensor:
    """Return a tensor as it is, and the floating ones of several, flat, as one; in float64, without history."""
    leaves = _floating_leaves(values) or [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    leaves = [leaf.detach() if leaf.is_complex() else leaf.detach().double() for leaf in leaves]
    return leaves[0] if len(leaves) == 1 else torch.cat([leaf.flatten() for leaf in leaves]) if leaves else torch.zeros(0)


def _relative_errors(a: Tensor, b: Tensor) -> Tensor:
    """Return how far elements are apart, over the smaller: infinitely where one is 0 or not finite, not at all where both are."""
    if a.shape != b.shape:
        return torch.zeros(a.shape, device=a.device)
    same = (a == b) | ~a.isfinite() & ~b.isfinite()
    errors = (a - b).abs() / torch.minimum(a.abs(), b.abs())
    return torch.where(same, 0.0, errors.nan_to_num(nan=math.inf, posinf=math.inf))


def _largest(errors: Tensor, elements: Tensor) -> float:
    return float(errors[elements].max()) if bool(elements.any()) else 0.0
