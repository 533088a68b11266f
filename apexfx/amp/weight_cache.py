"""Half copies of parameters, made once and reused until the parameter changes."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Larger ones are cast one by one: their gradients need not wait in half for the end of the backward pass.
_MOST_TOGETHER = 2**18


class _Entry(NamedTuple):
    parameter: weakref.ref[Tensor]
    version: int
    data_ptr: int
    cast: Tensor
    lasting: bool


class _CastTogether(torch.autograd.Function):
    """Casts many parameters in one node, and their gradients back in another."""

    @staticmethod
    def forward(ctx, dtype, *parameters):
        ctx.set_materialize_grads(False)
        casts = [torch.empty_like(parameter, dtype=dtype) for parameter in parameters]
        torch._foreach_copy_(casts, parameters)
        return tuple(casts)

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():  # under create_graph
            return None, *(None if grad is None else grad.float() for grad in grads)
        given = [grad for grad in grads if grad is not None]
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in given]
        torch._foreach_copy_(wide, given)
        made = iter(wide)
        return None, *(None if grad is None else next(made) for grad in grads)


class WeightCache:
    """parameter -> its cast, as long as the parameter's version and memory are those it was made from.

    A cast made without gradients serves until the outermost forward ends, so that evaluation holds no second copy of
    the weights and sees every edit; one made for training serves until `clear`. A cast whose graph is not what the
    moment asks for (made under `no_grad`, needed with gradients) is made again.

    Where one process trains alone, the small parameters that the last iteration cast are cast together at the first
    request. Under data parallel each is cast alone, so that its gradient is ready for its bucket as early as it can be.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        self._passing = False
        self._last: list[tuple[weakref.ref[Tensor], torch.dtype]] = []  # small parameters cast in the last iteration

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, parameter: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return the cast of `parameter`, and whether it was there already."""
        key = (id(parameter), dtype)
        entry = self._entries.get(key)
        training = torch.is_grad_enabled()
        if (
            entry is not None
            and entry.version == parameter._version
            and entry.data_ptr == parameter.data_ptr()
            and (not training or entry.cast.requires_grad == parameter.requires_grad)
            and entry.parameter() is parameter
        ):
            return entry.cast, True
        if training and self._last and entry is None and self._cast_together(dtype):
            entry = self._entries.get(key)
            if entry is not None:
                return entry.cast, False
        cast = parameter.to(dtype)
        if not torch.is_inference_mode_enabled() and not parameter.is_inference():
            self._entries[key] = _Entry(weakref.ref(parameter), parameter._version, parameter.data_ptr(), cast, training)
            self._passing = self._passing or not training
        return cast, False

    def _cast_together(self, dtype: torch.dtype) -> bool:
        last, self._last = self._last, []
        if dist.is_available() and dist.is_initialized():
            return False
        parameters = []
        for reference, to in last:
            parameter = reference()
            if to == dtype and parameter is not None and parameter.requires_grad and parameter.dtype == torch.float32 and (
                id(parameter), dtype
            ) not in self._entries and (not parameters or parameter.device == parameters[0].device):
                parameters.append(parameter)
        if len(parameters) < 2:
            return False
        for parameter, cast in zip(parameters, _CastTogether.apply(dtype, *parameters)):
            self._entries[id(parameter), dtype] = _Entry(weakref.ref(parameter), parameter._version, parameter.data_ptr(), cast, True)
        return True

    def drop_passing(self) -> None:
        """Forget casts made without gradients; called when the outermost forward ends."""
        if self._passing:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.lasting}
            self._passing = False

    def remove(self, parameter: Tensor) -> None:
        """Forget the casts of one parameter."""
        for key in [key for key in self._entries if key[0] == id(parameter)]:
            del self._entries[key]

    def clear(self) -> None:
        """Forget every cast."""
        if self._entries:
            self._last = [
                (entry.parameter, key[1])
                for key, entry in self._entries.items()
                if entry.lasting and entry.cast.requires_grad and entry.cast.numel() <= _MOST_TOGETHER
            ]
        self._entries.clear()
        self._passing = False
