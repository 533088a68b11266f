"""Where the nodes of a graph belong: module, also of what is the backward of one, line, op and pass; flops of its products."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from ..buckets.flops import node_flops
from ..graph.marks import INSERTED_BY
from ..graph.mutation import named_bodies
from ..graph.nodes import module_path, op_name, source_line


@dataclass
class NodePlaces:
    """Where the ops of a graph belong, by name of the node; "wrap_body_0.name" in a nested graph.

    Attributes:
        modules: path -> the nodes that were traced in the module; "" is the model itself, and what is outside of it.
        backward_of: path -> the nodes of a backward, by the module whose op they are the backward of.
        flops: of matrix products, convolutions and attention; other nodes are left out.
        ops: what each calls; of an op that was decomposed, the op.
        lines: "file.py:12", of a backward that of its op; nodes without are left out, as of the others.
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
    for prefix, body in named_bodies(gm):
        forward: dict[int, tuple[str, str]] = {}  # number of an op -> path and line
        backward: dict[fx.Node, tuple[str, str]] = {}
        for node in (node for node in body.graph.nodes if node.op.startswith("call_")):
            for each, kind in (node.meta.get("nn_module_stack") or {}).values():
                places.classes.setdefault(each, getattr(kind, "__name__", str(kind)))
            path, line = module_path(node), source_line(node)
            if of_backward := not path and _of_backward(node, forward, backward):
                path, line = backward[node] = of_backward[0], line or of_backward[1]
            else:
                forward.setdefault(node.meta.get("seq_nr"), (path, line))
            by_path = places.backward_of if of_backward and path else places.modules
            by_path.setdefault(path, []).append(prefix + node.name)
            if flops := node_flops(node):
                places.flops[prefix + node.name] = flops
            _describe(places, node, prefix + node.name, line)
    return places


def _of_backward(node: fx.Node, forward: Mapping[int, tuple[str, str]],
                 backward: Mapping[fx.Node, tuple[str, str]]) -> tuple[str, str] | None:
    """Return path and line of what a node is the backward of, or computes once more; None for another node.

    Ops of a backward have the number of the op of the forward. A sum of gradients goes with the last of them, which Inductor may
    have fused with it.
    """
    if stack := node.meta.get("fwd_nn_module_stack"):
        return next(reversed(stack.values()))[0], ""
    summed = next((backward[source] for source in reversed(node.all_input_nodes) if source in backward), None)
    if summed is not None and _op(node) == "aten.add" and INSERTED_BY not in node.meta:
        return summed
    if node.meta.get("autograd_backward") or node.meta.get(INSERTED_BY) == "recompute":
        return forward.get(node.meta.get("seq_nr"), ("", ""))
    return None


def _op(node: fx.Node) -> str:
    """Return the name of what a node calls, without its overload; of an op that was decomposed, of the op."""
    packet = getattr(node.meta.get("original_aten") or node.target, "overloadpacket", None)
    return str(packet) if packet is not None else op_name(node)


def _describe(places: NodePlaces, node: fx.Node, name: str, line: str) -> None:
    lowered = node.meta.get("from_node")
    places.ops[name] = _op(node)
    for kind, text in ((places.lines, line), (places.passes, node.meta.get(INSERTED_BY)),
                       (places.sources, lowered[0].name if lowered else None)):
        if text:
            kind[name] = text
