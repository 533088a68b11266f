"""What an artifact gets: looks on while a graph of a step is captured, compiled and first run, and makes data of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..._torch import process_state, registries, tree_flatten
from ...graph.nodes import graphs
from ..parts import StepParts
from .guards import Facts, NotComparable, Scope, is_plain, row_of_write, rows_of
from .match import BATCH, SINGLE, Batch, call_key, roots_of, scope_of, texts
from .stored_code import stored

_LISTS = ("params", "buffers", "states", "scalars")  # of `StepInputs`
_TENSORS = (Tensor, nn.Parameter)
_KNOWN_OPS = ("aten", "prims", "apexfx", "_c10d_functional", "higher_order")  # whose derivatives are torch's, or this package's


class ArtifactRecorder:
    """Looks on while Dynamo captures a graph of a step, and Inductor compiles it, and makes data of it all."""

    def __init__(self, parts: StepParts) -> None:
        self._parts, self._call = parts, None
        self._begun: set[str] = set()  # kinds of calls; the next process begins as this one, whatever has changed since
        self._begin(None)

    def _begin(self, scope: Scope | None) -> None:
        self._scope, self._obstacle, self._rows, self._graph, self._ran = scope, "", [], None, None

    def begin(self, model: nn.Module, inputs: Mapping[str, Any], batch: tuple[Any, ...], named: dict[str, Any],
              accumulates: bool) -> None:
        """Note a call that may capture a graph."""
        self._begin(scope_of(model, self._parts, inputs, batch, named, accumulates))
        self._call = inputs, batch, named, accumulates, len(self._parts.report.notes)
        self._process = texts(process_state())

    def note_graph(self, graph: dict[str, Any], gm: fx.GraphModule, run: Any) -> Any:
        """Note a graph that is compiled, and return what runs it and notes that.

        Args:
            graph: what `StepCompiler` knows of it.
            gm: as Dynamo captured it.
            run: runs it.
        """
        from ..._torch_compilers import changes_of_python, traced_code

        nodes = [node for each in graphs(gm) for node in each.graph.nodes if node.op in ("call_function", "call_method")]
        foreign = [node for node in nodes if getattr(node.target, "namespace", "aten") not in _KNOWN_OPS]
        unread = [each for each in map(_callee, nodes) if isinstance(each, FunctionType) and not _is_own(each.__code__)]
        self._graph, self._codes, self._changes = graph, traced_code(), changes_of_python()
        self._obstacle = f"{foreign[0].target}, whose derivative may change" if foreign else \
            f"{unread[0].__qualname__}(), which Dynamo has put into the graph and not read" if unread else ""

        def recorded(*args: Any) -> Any:
            outputs = run(*args)
            if self._scope is not None:
                self._ran = args, outputs
            return outputs

        return recorded

    def note_guards(self, guards: Sequence[Any]) -> list[bool]:
        """Note what Dynamo guards, which is a `guard_filter_fn`: it keeps all guards."""
        facts = Facts()
        try:
            if self._scope is not None:
                self._rows = [row_of_write(*change, self._scope, facts) for change in self._changes]
                self._rows += rows_of(guards, self._scope, facts)
                seen = facts.codes
                if (unseen := [code for code in self._codes if code not in seen and not _is_own(code)]):
                    raise NotComparable(f"{unseen[0].co_qualname}() in {unseen[0].co_filename}, which no guard is about")
        except NotComparable as error:
            self._obstacle = self._obstacle or str(error)
        return [True] * len(guards)

    def finish(self, returned: Any) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """Return the call that has ended as a row and its libraries; None where no graph was captured for it.

        Raises:
            NotComparable: no other program could be told from this one, or not run by it.
        """
        graph, ran, call, self._call = self._graph, self._ran, self._call, None
        obstacle, rows = self._obstacle, self._rows
        self._begin(None)
        if graph is None or ran is None:
            return None
        (args, outputs), (inputs, batch, named, accumulates, num_notes) = ran, call
        leaves, structure = tree_flatten((batch, named))
        key = call_key(self._parts, inputs, Batch(leaves, structure), accumulates)
        if key in self._begun:
            return None
        self._begun.add(key)
        code, lowered = graph["code"]()
        if obstacle or lowered.obstacle:
            raise NotComparable(obstacle or lowered.obstacle)
        if not all(type(leaf) in _TENSORS or is_plain(leaf) for leaf in leaves):
            raise NotComparable("an object in the batch")
        if any(type(arg) not in _TENSORS for arg in args) \
                or (lowered.num_inputs, lowered.num_outputs) != (len(args), len(outputs)):
            raise NotComparable("an input that is a number, a size or a subclass of Tensor")
        if not _places(self._parts, inputs, []).keys().isdisjoint(map(id, leaves)):
            raise NotComparable("a tensor of the batch that the model or the optimizer holds")
        places = _places(self._parts, inputs, leaves)
        if (unknown := next((p.name for p, arg in zip(graph["placeholders"], args) if id(arg) not in places), None)) is not None:
            raise NotComparable(f"{unknown}, a tensor that is neither of a module, nor of the optimizer, nor of the batch")
        if (check := graph["check_memory"]) is None:
            raise NotComparable("a graph that updates nothing")
        stored_code = stored(code)
        of_graph = {id(each): [kind, i] for kind, several in (("input", args), ("output", outputs))
                    for i, each in enumerate(several)}
        names = {name: f"{hashlib.sha256(library).hexdigest()[:24]}.so" for name, library in stored_code.kernels.items()}
        row = {"key": key, "plan": inputs["plan"], "process": self._process,
               "facts": rows, "inputs": [places[id(arg)] for arg in args], "outputs": _template(returned, of_graph),
               "placeholders": [[p.name, p.kind, list(p.shape)] for p in graph["placeholders"]],
               "shared": [[*pair, *how] for pair, how in check.shared.items()],
               **{name: graph[name] for name in ("updated", "written", "leaves", "what", "collectives")},
               "noted_writes": lowered.noted_writes, "source": stored_code.source, "functions": list(stored_code.functions),
               "kernels": names, "report": graph["record"].to_json(), "notes": self._parts.report.notes[num_notes:]}
        return row, {names[name]: library for name, library in stored_code.kernels.items()}


_OWN = tuple(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parents[1], os.__file__))


def _callee(node: fx.Node) -> Any:
    return getattr(Tensor, node.target, None) if node.op == "call_method" else node.target


def _is_own(code: CodeType) -> bool:
    """Return whether code is torch's, this package's or Python's own, whose versions are compared."""
    file = code.co_filename
    return file.startswith(_OWN[:2]) or file.startswith(_OWN[2]) and "site-packages" not in file


def _places(parts: StepParts, inputs: Mapping[str, Any], leaves: Sequence[Any]) -> dict[int, list[Any]]:
    """Return where each tensor of a step is found, by its id."""
    places: dict[int, list[Any]] = {id(leaf): [BATCH, i] for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for number, root in enumerate(roots_of(parts)):
        for path, module in root.named_modules():
            held = registries(module)
            for kind, tensors in (("parameter", held.parameters), ("buffer", held.buffers)):
                places |= {id(tensor): [kind, number, path, name] for name, tensor in tensors.items() if tensor is not None}
    for name in _LISTS:
        places |= {id(tensor): [name, i] for i, tensor in enumerate(inputs[name])}
    return places | {id(inputs[name]): [name] for name in SINGLE if inputs[name] is not None}


def _template(value: Any, places: Mapping[int, list[Any]]) -> list[Any]:
    """Describe what a step's function has returned, by outputs and inputs of its graph."""
    if id(value) in places:
        return places[id(value)]
    if type(value) in (tuple, list):
        return [type(value).__name__, [_template(each, places) for each in value]]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", [[key, _template(each, places)] for key, each in value.items()]]
    if value is None or type(value) in (bool, int, float, str):
        return ["constant", value]
    raise NotComparable(f"a {type(value).__name__} that the objective returns")
