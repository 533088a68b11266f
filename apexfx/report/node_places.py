"""Where the nodes of a graph belong: the module of each, also of what is the backward of one, and the flops of its products."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from ..buckets.flops import node_flops
from ..graph.mutation import named_bodies
from ..graph.nodes import module_path


@dataclass
class NodePlaces:
    """Where the ops of a graph belong, by name of the node; "wrap_body_0.name" in a nested graph.

    Attributes:
        modules: path -> the nodes that were traced in the module; "" is the model itself, and what is outside of it.
        backward_of: path -> the nodes of a backward, by the module that autograd names; where it names none, by the first of the
            modules, in the order of the forward, whose results they read.
        flops: of matrix products, convolutions and attention; other nodes are left out.
    """

    modules: dict[str, list[str]] = field(default_factory=dict)
    backward_of: dict[str, list[str]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)


def node_places(gm: fx.GraphModule) -> NodePlaces:
    """Return where the ops of `gm` belong, nested bodies included."""
    places = NodePlaces()
    origin: dict[fx.Node, tuple[int, str]] = {}  # place in the forward and path
    for prefix, body in named_bodies(gm):
        for place, node in enumerate(node for node in body.graph.nodes if node.op.startswith("call_")):
            path, of_backward = module_path(node), False
            if path:
                origin[node] = place, path
            elif stack := node.meta.get("fwd_nn_module_stack"):
                path, of_backward = next(reversed(stack.values()))[0], True
            elif node.meta.get("autograd_backward"):
                read = [origin[source] for source in node.all_input_nodes if source in origin]
                if read:
                    origin[node], of_backward = min(read), True
                    path = origin[node][1]
            by_path = places.backward_of if of_backward and path else places.modules
            by_path.setdefault(path, []).append(prefix + node.name)
            if flops := node_flops(node):
                places.flops[prefix + node.name] = flops
    return places
