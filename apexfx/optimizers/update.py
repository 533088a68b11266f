"""One update of parameters by their gradients: what it takes, and the call of its op.

The eager step of a fused optimizer and the graph of a whole training step are made of the same updates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._torch import viewed
from ._checkpoints import short

Labels = Mapping[int, int]  # of parameters, by id: those of two are not always updated together


@dataclass
class Update:
    """Parameters that one call of an op updates: `op(params, grads, *states, models[, step], lr, *numbers, **scalars)`.

    Attributes:
        op: its name: "adam_".
        group: the optimizer's group, which has the learning rate.
        numbers: the hyperparameters after the learning rate, in the op's order.
        params: the parameters that the gradients belong to.
        states: name -> one tensor for each of `params`, in the op's order.
        masters: what is updated in place of `params`, which become low-precision copies of it; or [].
        step: how many updates were made, float32: 0-d, or one element a parameter; None where they are not counted.
        counts: whether the count is kept for an optimizer of torch.
    """

    op: str
    group: dict[str, Any]
    numbers: tuple[Any, ...]
    params: list[Tensor] = field(default_factory=list)
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    masters: list[Tensor] = field(default_factory=list)
    step: Tensor | None = None
    counts: bool = True
    number_dtype: ClassVar[torch.dtype] = torch.float32  # of the tensors that the host sets

    def hyperparameters(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, number as the group has it) for each number that the host sets before a step."""
        yield "lr", self.group["lr"]

    def named(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield (parameter, name, tensor) of the state, masters at the end."""
        for key, tensors in (*self.states.items(), ("master_param", self.masters)):
            yield from ((p, key, tensor) for p, tensor in zip(self.params, tensors))

    def counts_of(self) -> list[tuple[Tensor, list[Tensor]]]:
        """Return (tensor, parameters) of the counts of updates."""
        return [(self.step, self.params)] if self.step is not None else []

    def holds(self) -> bool:
        """Return whether it still does what it was made for, whatever its numbers are."""
        return True


def one_vector(optimizer: torch.optim.Optimizer, members: list[Tensor], name: str, first: Tensor) -> Tensor:
    """Return the vector whose elements are a number of each member's state; another step on this optimizer may have made it."""
    held = [optimizer.state[p].get(name) for p in members]
    base = viewed(held[0]) if isinstance(held[0], Tensor) else None
    if base is not None and base.dim() == 1 and len(base) == len(held) and all(
            isinstance(own, Tensor) and viewed(own) is base and own.data_ptr() == base[i].data_ptr()
            for i, own in enumerate(held)):
        return base
    vector = torch.full((len(members),), first.item(), dtype=first.dtype, device=members[0].device)
    for p, own in zip(members, vector.unbind()):
        optimizer.state[p][name] = own
    return vector


def call_op(name: str, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Sequence[Tensor]],
            models: Sequence[Tensor], step: Tensor | None, lr: float, numbers: Sequence[Any],
            scalars: Mapping[str, Tensor | None], unscales: bool = False) -> None:
    """Call an optimizer's op.

    Args:
        name: of the op.
        params: what it updates: masters where there are some.
        grads, models: those of `params`; no models where there are no masters.
        states: a list for each state; those at the end may be absent, as of an SGD without momentum.
        step: what counts the updates, and is counted up by an op that takes it.
        lr, numbers: the hyperparameters.
        scalars: device scalars by name.
        unscales: whether the gradients are left divided by the scalar `grad_scale`.
    """
    op, num_states, counts = _signature(name, "unscale" if unscales else "default")
    absent: list[list[Tensor]] = [[]] * (num_states - len(states))
    op(params, grads, *states, *absent, models, *([step] if counts else []), lr, *numbers, **scalars)


@functools.cache
def _signature(name: str, overload: str = "default") -> tuple[Any, int, bool]:
    """Return an op, how many lists of state it takes, and whether it counts updates."""
    op = getattr(getattr(torch.ops.apexfx, name), overload)
    arguments = op._schema.arguments
    num_lists = sum(str(argument.type) == "List[Tensor]" for argument in arguments)
    return op, num_lists - 3, any(argument.name == "step" for argument in arguments)


def counts_updates(name: str) -> bool:
    """Return whether an op counts updates itself."""
    return _signature(name)[2]


def inverse_of(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor that unscales the gradients of a loss that was multiplied with `scale`."""
    return scale.to(dtype).reciprocal()


def clip_coefficient(norm: Tensor, max_grad_norm: float, epsilon: float) -> Tensor:
    """Return the factor that brings the norm of gradients down to `max_grad_norm`, or 1."""
    return ((norm + epsilon).reciprocal() * max_grad_norm).clamp_max(1.0)


def kind_of(value: Any) -> str:
    """Return dtype, shape and device of a tensor, in words; other values as `short` has them."""
    return f"{value.dtype} of shape {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else short(value)


def unlike_state(held: Tensor, expected: str) -> ValueError:
    """Return the error about a tensor of state whose kind is not the one expected."""
    return ValueError(f"apexfx: the optimizer holds state of a parameter as {kind_of(held)}, expected {expected}: one was "
                      "converted after a step (model.double(), .to(), .data = ...). optimizer.load_state_dict("
                      "optimizer.state_dict()) converts dtype and device; a new optimizer begins anew")
