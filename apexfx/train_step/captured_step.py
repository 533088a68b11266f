"""The graph of a training step as Dynamo captured it: where its backward and its end are, and what the forward may not do."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from .._torch import set_grad_enabled
from ..graph.inputs import Placeholder, apply_node
from ..graph.marks import NAME
from ..graph.mutation import storages, written_storages
from ..graph.nodes import value
from ..precision.call_casts import check_unwritten
from .capture_errors import calls_backward, sparse_gradient


class CapturedStep:
    """The parts of a captured graph, as they are when it is made; a pass may put others in their place.

    Attributes:
        inputs: the placeholders.
        backward: the node that computes the gradients; None in `run_update`.
        end: the node that applies them; None in a graph that accumulates.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self.inputs, self.end = gm, gm.graph.find_nodes(op="placeholder"), apply_node(gm)
        *self._of_objective, self.backward = gm.graph.find_nodes(op="call_function", target=torch.autograd.grad) or [None]

    def reached(self) -> list[bool]:
        """Return for each parameter whether the loss depends on it; [] of a graph without a backward.

        Raises:
            ValueError: a gradient is sparse.
        """
        gradients = [*zip(self.backward.args[1], value(self.backward))] if self.backward is not None else []
        for p, gradient in gradients:
            if gradient is not None and gradient.layout != torch.strided:
                raise sparse_gradient(p.meta[NAME])
        return [gradient is not None for _, gradient in gradients]

    def applied(self) -> list[fx.Node]:
        """Return the parameters that a step updates and has gradients of."""
        return [p for p, gradient in zip(*self.end.args[:2]) if gradient is not None] if self.end is not None else []

    def updated(self) -> list[int]:
        """Return the places of the inputs that a step writes at its end."""
        updated = {*self.end.args[0], *self.end.args[2]} if self.end is not None else ()
        return [place for place, node in enumerate(self.inputs) if node in updated]

    def written_by_forward(self, placeholders: Sequence[Placeholder]) -> list[int]:
        """Return the places of the inputs that the forward writes: what shares their memory may not change."""
        for node in self._gm.graph.find_nodes(op="call_function", target=check_unwritten):  # would be a reader of all arguments
            self._gm.graph.erase_node(node)
        memory = written_storages(self._gm)
        return [place for place, node in enumerate(self.inputs)
                if placeholders[place].stride is not None and storages(value(node)) & memory]

    def check_no_backward(self) -> None:
        """Refuse a `backward()` of the user's that adds to the `.grad` of a trained parameter.

        Dynamo traces it as `torch.autograd.grad`, whose results it copies into new memory laid out as the leaves; without that,
        an objective may differentiate.
        """
        for item in (item for grad in self._of_objective for item in grad.users if item.target is operator.getitem):
            copied_to = [user.args[0] for user in item.users if user.target == "copy_"]
            laid_out_as = {new.args[0] for new in copied_to if new.target is torch.empty_like}
            if not laid_out_as.isdisjoint(self.backward.args[1]):
                raise calls_backward()


def switch_gradients_on(gm: fx.GraphModule) -> None:
    """Begin with gradients on, as the traced function does: Dynamo leaves that out where the objective begins with them off.

    Passes put casts of parameters at the beginning, and gradients flow through those.
    """
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    if first.target is not set_grad_enabled or not first.args[0]:
        with gm.graph.inserting_before(first):
            for enabled in (True, False):
                gm.graph.call_function(set_grad_enabled, (enabled,))
