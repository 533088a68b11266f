"""`multi_tensor_applier(op, noop_flag, lists, *scalars)`, and Apex's amp_C functions to give it.

An amp_C function takes `(chunk_size, noop_flag, tensor_lists, *scalars)`. The flag is Apex's int32 (or any) tensor; it
is set to 1 on the device where an op found an infinity or a NaN. The chunk size has no effect: the kernels choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import multi_tensor


class MultiTensorApply:
    """Call an op with a chunk size, a flag and lists of tensors."""

    available = True
    warned = False
    import_err = None

    def __init__(self, chunk_size: int):
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the ops are always available."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[list[Tensor]], *args: Any):
        """Return `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def _raise_flag(noop_flag: Tensor, found_inf: Tensor) -> None:
    noop_flag.masked_fill_(found_inf.to(noop_flag.device) != 0, 1)


def _zero(tensors: Sequence[Tensor]) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=tensors[0].device)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float) -> None:
    """out = in * scale for lists [in, out]."""
    inputs, outputs = tensor_lists
    flag = _zero(inputs)
    multi_tensor.multi_tensor_scale(inputs, outputs, flag, float(scale))
    _raise_flag(noop_flag, flag)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], a: float, b: float, arg_to_check: int
) -> None:
    """out = a x + b y for lists [x, y, out]."""
    x, y, outputs = tensor_lists
    flag = _zero(x)
    multi_tensor.multi_tensor_axpby(x, y, outputs, flag, float(a), float(b), arg_to_check)
    _raise_flag(noop_flag, flag)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return (norm[1], per-tensor norms[n] or an empty tensor) of the list [x]."""
    norm, norms, flag = multi_tensor.multi_tensor_l2norm(tensor_lists[0], None, bool(per_tensor))
    _raise_flag(noop_flag, flag)
    return norm.reshape(1), norms


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """out = in * scale for lists [in, out]; return the norms of the unscaled inputs."""
    norms = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists[:1], per_tensor)  # first: `out` may be `in`
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)
    return norms


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[list[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norms of `x * inv_scale` for the list [x], which is not written."""
    inverse = inv_scale.detach().float().reshape(())
    norm, norms, flag = multi_tensor.multi_tensor_l2norm(tensor_lists[0], inverse, bool(per_tensor))
    _raise_flag(noop_flag, flag)
    return norm.reshape(1), norms
