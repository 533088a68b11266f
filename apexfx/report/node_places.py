"""Where the nodes of a graph belong: module, also of what is the backward of one, line, op and pass; flops of its products."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from ..buckets.flops import node_flops
from ..graph.mutation import named_bodies
from ..graph.nodes import GRADIENT_OF, PASS, module_path, moves_data, op_name, source_line


@dataclass
class NodePlaces:
    """Where the ops of a graph belong, by name of the node; "wrap_body_0.name" in a nested graph.

    Attributes:
        modules: path -> the nodes that were traced in the module; "" is the model itself, and what is outside of it.
        backward_of: path -> the nodes of a backward, by the module that autograd names; where it names none, by the parameter
            whose gradient they are, or by the parameter or results of the forward that they read.
        flops: of matrix products, convolutions and attention; other nodes are left out.
        ops: what each calls; of an op that was decomposed, the op.
        lines: "file.py:12", of a backward that of its module; nodes without are left out, as of the others.
        passes: the pass that put the node in.
        sources: the node of the captured graph that it was lowered from.
        classes: path of a module -> its class, of those that nodes were traced in.
    """

    modules: dict[str, list[str]] = field(default_factory=dict)
    backward_of: dict[str, list[str]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    ops: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    passes: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def module_of(self) -> dict[str, str]:
        """Node -> path, of both kinds."""
        return {node: path for kind in (self.modules, self.backward_of) for path, nodes in kind.items() for node in nodes}


def node_places(gm: fx.GraphModule) -> NodePlaces:
    """Return where the ops of `gm` belong, nested bodies included."""
    places = NodePlaces()
    line_of: dict[str, str] = {}  # of a module
    for prefix, body in named_bodies(gm):
        backward = _BackwardNodes()
        for node in (node for node in body.graph.nodes if node.op.startswith("call_")):
            path, line, of_backward = module_path(node), source_line(node), False
            for each, kind in (node.meta.get("nn_module_stack") or {}).values():
                places.classes.setdefault(each, getattr(kind, "__name__", str(kind)))
            fused = backward.module_of_fused(node)  # by Inductor, of a gradient and the sum that it goes into
            if fused is not None:
                path, of_backward = fused, True
                backward.note(node, path)
            elif GRADIENT_OF in node.meta:
                path, of_backward = node.meta[GRADIENT_OF], True
                backward.note(node, path)
            elif not path and (stack := node.meta.get("fwd_nn_module_stack")):
                path, of_backward = next(reversed(stack.values()))[0], True
                backward.note(node, path)
            elif not path and (node.meta.get("autograd_backward") or node.meta.get(PASS) == "recompute"):
                path, of_backward = backward.module(node), True
            elif not path and (summed := backward.module_of_sum(node)):
                path, of_backward = summed, True
                backward.note(node, path)
            else:
                backward.note_forward(node, path)
            by_path = places.backward_of if of_backward and path else places.modules
            by_path.setdefault(path, []).append(prefix + node.name)
            if flops := node_flops(node):
                places.flops[prefix + node.name] = flops
            if path and line and not of_backward:
                line_of.setdefault(path, line)
            _describe(places, node, prefix + node.name, line or (line_of.get(path, "") if of_backward else ""))
    return places


class _BackwardNodes:
    """Finds the module whose backward a node computes, where autograd names none: by the results of the forward that it reads.

    A product that reads a parameter is of the module whose product reads it in the forward. Other ops save some of what they read
    and give: among those that may have saved what a node reads it is the one whose name it has. Where there is none, it is the
    first, in the order of the forward, of the modules that what it reads belongs to.
    """

    def __init__(self) -> None:
        self._order: dict[str, int] = {}  # of the modules, in the forward
        self._forward: dict[fx.Node, str] = {}  # node -> path
        self._origin: dict[fx.Node, str] = {}  # of nodes of the backward
        self._readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._read_by: dict[fx.Node, list[str]] = defaultdict(list)  # parameter -> paths of the products that read it, in order
        self._products_of: dict[fx.Node, set[str]] = defaultdict(set)  # what else products read -> their paths

    def note_forward(self, node: fx.Node, path: str) -> None:
        self._forward[node] = path
        self._order.setdefault(path, len(self._order))
        for source in node.all_input_nodes:
            self._readers[source].append(node)
        for parameter in _parameters_of_product(node):
            self._read_by[parameter].append(path)
        for operand in _operands_of_product(node):
            self._products_of[operand].add(path)

    def note(self, node: fx.Node, path: str) -> None:
        self._origin[node] = path

    def module(self, node: fx.Node) -> str:
        same = _of_same_op(node)
        paths = (find(each) for find in (self._of_parameter, self._of_operand, self._match) for each in same)
        path = next((path for path in paths if path is not None), None)
        if path is None:
            read = [self._origin.get(source) or self._forward.get(source) for source in node.all_input_nodes]
            path = min(filter(None, read), key=lambda each: self._order.get(each, 0), default="")
        self.note(node, path)
        return path

    def _of_parameter(self, node: fx.Node) -> str | None:
        paths = next((self._read_by[read] for read in _parameters_of_product(node) if read in self._read_by), [])
        if len(set(paths)) < 2:
            return paths[0] if paths else None
        return None if node.meta.get(PASS) == "recompute" else paths.pop()  # a backward is in the opposite order

    def module_of_fused(self, node: fx.Node) -> str | None:
        """Return the module of a product and a sum of gradients that Inductor has made one op; None for other nodes."""
        is_fused = _op(node) == "aten.add" and op_name(node) == "aten.addmm.default"
        sum_ = node.args[0] if is_fused else None
        is_gradient = is_fused and (sum_ in self._origin or sum_.meta.get("apexfx_kind") == "state")
        return self._of_operand(node) if is_gradient else None

    def module_of_sum(self, node: fx.Node) -> str | None:
        """Return the module that all gradients belong to which a node sums; None for other nodes."""
        is_sum = _op(node) == "aten.add" and len(node.all_input_nodes) == 2
        paths = {self._origin.get(source) for source in node.all_input_nodes} if is_sum else set()
        return paths.pop() if len(paths) == 1 else None

    def _of_operand(self, node: fx.Node) -> str | None:
        """Return, for a product, the module of the products of the forward that read what it reads, if it is one module."""
        paths = {path for operand in _operands_of_product(node) for path in self._products_of.get(operand, ())}
        return paths.pop() if len(paths) == 1 else None

    def _match(self, node: fx.Node) -> str | None:
        """Return the module of the op that has saved most of what a node reads, and whose name it has."""
        name = _op(node).rpartition(".")[2]
        name = _FORWARD_OF.get(name, name)
        read = [source for source in node.all_input_nodes if source in self._forward]
        same = [each for source in read for each in (source, *self._readers[source])
                if name.startswith(_op(each).rpartition(".")[2])]
        return self._forward[max(same, key=same.count)] if same else None


def _parameters_of_product(node: fx.Node) -> list[fx.Node]:
    return [source for source in _operands_of_product(node) if source.meta.get("apexfx_kind") == "param"]


def _operands_of_product(node: fx.Node) -> list[fx.Node]:
    """Return what a matrix product or convolution reads, through views, copies and casts; [] for other nodes."""
    if not node_flops(node):
        return []
    sources = list(node.all_input_nodes)
    for index, source in enumerate(sources):
        while moves_data(source):
            source = source.all_input_nodes[0]
        sources[index] = source
    return sources


def _of_same_op(node: fx.Node) -> list[fx.Node]:
    """Return a node, and those around it that an op of a backward was decomposed into with it."""
    op, same = _op(node), [node]
    for each in same if "backward" in op else ():  # which grows
        same += [other for other in dict.fromkeys((*each.all_input_nodes, *each.users))
                 if other not in same and other.op == "call_function" and _op(other) == op]
    return same


_FORWARD_OF = {"threshold_backward": "relu", "bn_backward_reduce": "bn_normalize", "bn_backward_elementwise": "bn_normalize"}


def _op(node: fx.Node) -> str:
    """Return the name of what a node calls, without its overload; of an op that was decomposed, of the op."""
    packet = getattr(node.meta.get("original_aten") or node.target, "overloadpacket", None)
    return str(packet) if packet is not None else op_name(node)


def _describe(places: NodePlaces, node: fx.Node, name: str, line: str) -> None:
    lowered = node.meta.get("from_node")
    places.ops[name] = _op(node)
    for kind, text in ((places.lines, line), (places.passes, node.meta.get(PASS)),
                       (places.sources, lowered[0].name if lowered else None)):
        if text:
            kind[name] = text
