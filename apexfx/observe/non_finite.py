"""Where something that is not finite begins in a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import tree_leaves
from ..graph.marks import IN_BACKWARD, KIND, NAME
from ..graph.nodes import module_path, op_name, source_line

_NAN, _INF, _MINUS_INF = "nan", "inf", "-inf"
_KINDS = {"param": "parameter", "buffer": "buffer", "input": "input"}


@dataclass(frozen=True)
class Finding:
    """Where something that is not finite began.

    Attributes:
        what: "nan", "inf" or "-inf", or several: "nan, inf".
        source: the input that was not finite before anything was computed: "parameter 'head.weight'"; "" where all were.
        phase: "forward", "backward" or "update".
        node: the name of the node; where there is a source, of the first that reads it and is not finite.
        op: what it calls.
        dtype: of what is not finite.
        module: the dotted path of the module that the op, or the one of the forward that it is the backward of, belongs to.
        line: "file.py:12", of the user's program, as `module`; "" where unknown.
    """

    what: str
    source: str
    phase: str
    node: str
    op: str
    dtype: str
    module: str
    line: str

    def __str__(self) -> str:
        where = f"{f' in module {self.module!r}' if self.module else ''}{f' at {self.line}' if self.line else ''}"
        if self.source:
            return f"{self.source} is not finite ({self.what}), first read by {self.op}{where}"
        return f"{self.op} in the {self.phase} gives {self.what} ({self.dtype}){where}"


class NonFinite:
    """Observer: follows what is not finite from the node it begins at, whose inputs are finite, to all that depends on it.

    An infinity is no sign of an overflow where it was there to mask something: minus infinity in an input that is no parameter,
    and either one among the constant arguments of an op, until an op makes something else of it. What `empty` returns is no
    result.

    Args:
        graph: that runs.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._place = {node: place for place, node in enumerate(graph.nodes)}
        backward = [place for node, place in self._place.items() if is_of_backward(node)]
        self._backward = range(backward[0], backward[-1] + 1) if backward else range(0)
        self._origins: dict[fx.Node, fx.Node] = {}  # of what is not finite
        self._readers: dict[fx.Node, fx.Node] = {}  # of an input: the first node that reads it and is not finite
        self._masks: dict[fx.Node, set[str]] = {}  # infinities that are meant
        self._what: dict[fx.Node, tuple[str, str]] = {}  # what began at a node, and its dtype

    def __call__(self, node: fx.Node, result: Any) -> None:
        kinds = {} if "empty" in str(node.target) or node.op == "output" else kinds_of(result)
        if not kinds:
            return
        origins = [self._origins[source] for source in node.all_input_nodes if source in self._origins]
        if origins:
            origin = self._origins[node] = min(origins, key=self._place.__getitem__)
            self._readers.setdefault(origin, node)
            return
        meant = set(self._meant(node)) & kinds.keys()
        if meant:
            self._masks[node] = meant
        new = {kind: dtype for kind, dtype in kinds.items() if kind not in meant}
        if new:
            self._origins[node] = node
            self._what[node] = ", ".join(new), str(next(iter(new.values()))).removeprefix("torch.")

    def first(self) -> Finding | None:
        """Return the first origin of what is not finite in the backward, or behind it; None where all of that is finite.

        What is not finite in a forward and reaches nothing there was masked, or does not matter; nor does the state of an
        optimizer. In a graph without a backward, the first origin of all.
        """
        begin = self._backward.start if self._backward else 0
        origins = [origin for node, origin in self._origins.items()
                   if node.op != "placeholder" and self._place[node] >= begin and origin.meta.get(KIND) != "state"]
        return self._finding(min(origins, key=self._place.__getitem__)) if origins else None

    def _meant(self, node: fx.Node) -> list[str]:
        """Return which infinities in the result of a node, none of whose inputs is to blame, are there to mask something."""
        if node.op == "placeholder":
            return [] if node.meta.get(KIND) in ("param", "state") else [_MINUS_INF]
        constants = [x for x in tree_leaves((node.args, node.kwargs)) if isinstance(x, float) and math.isinf(x)]
        return [*map(str, constants), *(kind for source in node.all_input_nodes for kind in self._masks.get(source, ()))]

    def _finding(self, node: fx.Node) -> Finding:
        (what, dtype), source = self._what[node], ""
        if node.op == "placeholder":
            source = f"{_KINDS[node.meta.get(KIND, 'input')]} {node.meta.get(NAME, node.name)!r}"
            node = self._readers[node]
        place, of = self._place[node], node  # and what it is the backward of
        phase = "forward" if not self._backward or place < self._backward.start \
            else "backward" if place in self._backward else "update"
        if phase == "backward":
            of = next((each for each, at in self._place.items() if at < self._backward.start and each.op == "call_function"
                       and "seq_nr" in each.meta and each.meta["seq_nr"] == node.meta.get("seq_nr")), node)
        line = source_line(node) or source_line(of)
        return Finding(what, source, phase, node.name, op_name(node), dtype, module_path(of), line)


def is_of_backward(node: fx.Node) -> bool:
    """Return whether a node is marked as one of a backward."""
    return bool((node.meta.get("custom") or {}).get(IN_BACKWARD))


def kinds_of(result: Any) -> dict[str, torch.dtype]:
    """Return which of "nan", "inf" and "-inf" are in the tensors of a result, and the dtype of the first that has it."""
    kinds: dict[str, torch.dtype] = {}
    for tensor in tree_leaves(result):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            continue
        if not tensor.is_floating_point() and not tensor.is_complex():
            continue
        values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.detach()
        values = values.float() if values.itemsize == 1 else values  # float8
        if values.isfinite().all():
            continue
        for kind, there in ((_NAN, values.isnan()), (_INF, values == math.inf), (_MINUS_INF, values == -math.inf)):
            if there.any():
                kinds.setdefault(kind, tensor.dtype)
    return kinds
