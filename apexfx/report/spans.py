"""Marks what runs in a graph's code, for torch.profiler: a span around each call of a kernel, and one around all of them.

The code that a compiled graph runs, Inductor's or that of an fx graph, is exchanged for the same with `with` around its
statements, and put back. Nothing is compiled again but the Python, and the same kernels run.
"""

from __future__ import annotations

import ast
import contextlib
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from .._torch import ProfilerSpan
from .node_places import NodePlaces, node_places
from .records import GraphReport

COPIES = "copies"  # what a pass reports of a subgraph that is called: its name -> for each call, the nodes that it stands for
_SPANS = "apexfx_spans"  # the name that the exchanged code finds them by
_KERNEL = re.compile(r"^\s*# \[Provenance debug handles\] (\S+:\d+)$")


@dataclass
class GraphCode:
    """The code of a graph that may run in a step.

    Attributes:
        function: that runs.
        source: what it was compiled from.
        kernels: name of each -> the nodes that it computes.
        lowered_from: node -> nodes of the captured graph.
        graph: the record that it belongs to, and
        stage: of which stage; None where it belongs to no record of the report.
        places: of its nodes; of the stage "forward" those of the captured graph.
        by_node: the kernels are nodes, each an assignment to its name.
        copies: of a subgraph that is called, its nodes first, and the nodes that each call stands for.
        parent: of a subgraph, the code that calls it.
    """

    function: types.FunctionType
    source: str
    kernels: Mapping[str, Sequence[str]]
    lowered_from: Mapping[str, Sequence[str]] = field(default_factory=dict)
    graph: GraphReport | None = None
    stage: str = ""
    places: NodePlaces = field(default_factory=NodePlaces)
    by_node: bool = False
    copies: Sequence[Sequence[str]] = ()
    parent: GraphCode | None = None

    def nodes_of(self, kernel: str, call: int) -> Sequence[str]:
        """Return the nodes that a kernel computes in a call of a step, the first of which is 0."""
        nodes = self.kernels.get(kernel, ())
        if not self.copies:
            return nodes
        own = dict(zip(self.copies[0], self.copies[call % len(self.copies)]))
        return [own.get(node, node) for node in nodes]


def graph_codes(graphs: Sequence[GraphReport]) -> list[GraphCode]:
    """Return the code of every compiled graph in the process; that of `graphs` knows where it belongs."""
    codes = [_of_graph(gm, graph) for graph in graphs for gm in (ref() for ref in graph.running) if gm is not None]
    from .._torch_compilers import generated_code

    for each in generated_code():
        code = GraphCode(each.call, each.source, each.nodes, each.lowered_from)
        _find_stage(code, graphs)
        codes += [code, *subgraphs(code)]
    return codes


def subgraphs(code: GraphCode) -> list[GraphCode]:
    """Return the code of the subgraphs that some code calls."""
    stages = code.graph.stages if code.graph is not None else ()
    copies = {name: each for stage in stages if stage.stage == code.stage for entry in stage.passes
              for name, each in entry.artifacts.own.get(COPIES, {}).items()}
    own = code.function.__code__
    called = [code.function.__globals__.get(name) for name in own.co_names]
    return [replace(code, function=each, copies=copies.get(each.__name__, ()), parent=code) for each in called
            if isinstance(each, types.FunctionType) and each.__code__.co_filename == own.co_filename]


def _of_graph(gm: fx.GraphModule, graph: GraphReport) -> GraphCode:
    names = {node.name: [node.name] for node in gm.graph.nodes if node.op.startswith("call_")}
    *_, last = graph.stages
    stage = "forward" if last.stage != "forward" and not names.keys() & last.places.ops.keys() else last.stage
    return GraphCode(type(gm).forward, gm.code, names, {}, graph, stage, node_places(gm), by_node=True)


def _find_stage(code: GraphCode, graphs: Sequence[GraphReport]) -> None:
    """Find the stage that knows most of the nodes, if any does."""
    nodes, most = {node for nodes in code.kernels.values() for node in nodes}, 0
    for graph in graphs:
        for stage in graph.stages[::-1]:
            known = stage.places.ops.keys()
            score = sum(node in known or stage.stage == "forward" and not known.isdisjoint(code.lowered_from.get(node, ()))
                        for node in nodes)
            if score > most:
                code.graph, code.stage, code.places, most = graph, stage.stage, stage.places, score


@contextlib.contextmanager
def marked(codes: Sequence[GraphCode]) -> Iterator[dict[str, tuple[GraphCode, str]]]:
    """Have a profiler see spans, in this context; yield name -> (code, kernel), where "" is the kernel of a whole graph's."""
    meaning: dict[str, tuple[GraphCode, str]] = {}

    def span(code: GraphCode, kernel: str) -> ProfilerSpan | None:
        if not kernel and code.parent is not None:  # whose span is around it
            return None
        name = f"apexfx {len(meaning)}"
        meaning[name] = code, kernel
        return ProfilerSpan(name)

    with exchanged(codes, span):
        yield meaning


@contextlib.contextmanager
def exchanged(codes: Sequence[GraphCode], context_of: Callable[[GraphCode, str], Any]) -> Iterator[None]:
    """Have code run with a context around each call of a kernel, and one around all, in this context.

    Args:
        context_of: returns it for code and kernel, "" for the whole graph; None for none.
    """
    spans: dict[int, Any] = {}

    def span(code: GraphCode, kernel: str) -> int:
        spans[len(spans)] = context_of(code, kernel) or contextlib.nullcontext()
        return len(spans) - 1

    before = {code.function: code.function.__code__ for code in codes}  # two graphs may share one
    try:
        for function, code in {code.function: code for code in codes}.items():
            function.__globals__[_SPANS] = spans
            function.__code__ = _with_spans(code, span)
        yield
    finally:
        for function, own in before.items():
            function.__code__ = own
            function.__globals__.pop(_SPANS, None)


def _with_spans(code: GraphCode, span: Callable[[GraphCode, str], int]) -> types.CodeType:
    tree, own = ast.parse(code.source), code.function.__code__
    [definition] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == own.co_name]
    kernel_of = _node_of(code) if code.by_node else _kernel_of(code)

    def mark(body: list[ast.stmt]) -> list[ast.stmt]:
        done = []
        for statement in body:
            if (kernel := kernel_of(statement)) is not None:
                statement = _with(span(code, kernel), [statement])
            else:
                for part in ("body", "orelse"):  # of `with`, on a device
                    if getattr(statement, part, None):
                        setattr(statement, part, mark(getattr(statement, part)))
            done.append(statement)
        return done

    definition.body = [_with(span(code, ""), mark(definition.body))]
    compiled = compile(ast.fix_missing_locations(tree), own.co_filename, "exec")
    return next(each for each in _code_objects(compiled) if each.co_name == own.co_name)


def _with(index: int, body: list[ast.stmt]) -> ast.With:
    context = ast.Subscript(ast.Name(_SPANS, ast.Load()), ast.Constant(index), ast.Load())
    return ast.With(items=[ast.withitem(context)], body=body)


def _node_of(code: GraphCode) -> Callable[[ast.stmt], str | None]:
    def kernel_of(statement: ast.stmt) -> str | None:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        computes = isinstance(getattr(statement, "value", None), ast.Call)
        return target.id if computes and isinstance(target, ast.Name) and target.id in code.kernels else None

    return kernel_of


def _kernel_of(code: GraphCode) -> Callable[[ast.stmt], str | None]:
    """Return what says of a statement, asked in order, which kernel it calls: the one that a comment has announced."""
    lines = code.source.splitlines()
    announced = [(number, match[1]) for number, line in enumerate(lines, 1) if (match := _KERNEL.match(line))][::-1]
    pending = ""

    def kernel_of(statement: ast.stmt) -> str | None:
        nonlocal pending
        while announced and announced[-1][0] < statement.lineno:
            pending = announced.pop()[1]
        text = "\n".join(lines[statement.lineno - 1:statement.end_lineno])
        if not pending or isinstance(statement, (ast.With, ast.If, ast.For)) or pending.rpartition(":")[0] not in text:
            return None
        kernel, pending = pending, ""
        return kernel

    return kernel_of


def _code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_objects(constant)
