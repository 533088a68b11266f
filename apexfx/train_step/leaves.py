"""Leaves that a loss depends on and that no optimizer of the step holds: they are refused, but for tensors of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .._torch import has_gradient_hooks
from ..graph.inputs import Placeholder
from .capture_errors import has_history

_BATCH = ("L['batch']", "L['named_inputs']")  # where the traced function holds it


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the leaves that a loss depends on and that require a gradient, each once."""
    nodes, seen = [loss.grad_fn], {loss.grad_fn}
    for node in nodes:
        following = [n for n, _ in node.next_functions if n is not None] if node is not None else []
        nodes += [n for n in dict.fromkeys(following) if n not in seen]
        seen.update(following)
    return [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]


def is_of_batch(leaf: Placeholder, tensor: Tensor) -> bool:
    """Return whether a leaf is a tensor of the batch, which an objective may differentiate by, and no parameter."""
    return leaf.source.startswith(_BATCH) and not isinstance(tensor, nn.Parameter)


def check_leaves(names: Sequence[str]) -> None:
    """Refuse leaves that a loss depends on, and that nothing updates.

    Raises:
        ValueError: it names them.
    """
    if names:
        shown = f"{', '.join(names[:5])}{', ...' if names[5:] else ''}"
        raise ValueError(f"apexfx: the loss depends on {shown}, which require a gradient and are in no optimizer of the step. "
                         "Freeze them by requires_grad_(False), as the base under adapters, or compute what they are in under "
                         "torch.no_grad(), as a reference model. Those of a layer that took the place of another one: make the "
                         "optimizer, and the step, anew of model.parameters(). Those of another module: give its optimizer and "
                         "it, too: optimizer=[one, other], modules=[module]")


def check_leaf(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of a batch with a history, and hooks that would not run.

    Raises:
        NotOneGraph, ValueError: it names the tensor.
    """
    if tensor.grad_fn is not None:
        raise has_history(name)
    if has_gradient_hooks(tensor):
        raise ValueError(f"apexfx: a hook is registered on {name!r} (register_hook or register_post_accumulate_grad_hook), which "
                         "a training step would not run; remove it, or train with apexfx.transform()")
