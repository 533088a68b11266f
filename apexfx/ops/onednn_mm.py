"""onednn_mm: a float32 matrix product on the CPU by oneDNN, where torch.mm asks MKL.

    onednn_mm(a (M, K), b (K, N)) -> (M, N)

MKL keeps its AVX-512 code for Intel's processors; oneDNN, which torch brings as well, uses what the processor has. What
oneDNN is not built for (another dtype or device, no elements, rows that overlap) goes to torch.mm.

The operator has no derivative: it stands in backward graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import mm_flop, register_flop_formula

from .._torch import onednn_linear
from ._define import ANY_STRIDES, define


def _check(a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"apexfx::onednn_mm: a is {a.dtype} {list(a.shape)} on {a.device} and b {b.dtype} {list(b.shape)} on "
                         f"{b.device}; expected (M, K) and (K, N) of one dtype and device")


def _is_dense(matrix: Tensor) -> bool:
    """Whether the elements lie row by row or column by column, as oneDNN takes them."""
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    dense = (column == 1 and row >= columns) or (row == 1 and column >= rows)
    return dense and matrix.numel() > 0 and matrix.dtype == torch.float32 and matrix.device.type == "cpu"


@define(
    "onednn_mm(Tensor a, Tensor b) -> Tensor",
    check=_check,
    fake=lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
    tags=ANY_STRIDES,
)
def onednn_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b."""
    if _is_dense(a) and _is_dense(b):
        return onednn_linear(a, b.t())
    return torch.mm(a, b)


register_flop_formula(torch.ops.apexfx.onednn_mm, get_raw=True)(mm_flop)  # which takes tensors already
