"""product: a float32 matrix product on the CPU by oneDNN, where torch.mm asks MKL.

    product(a (M, K), b (K, N)) -> (M, N)

MKL keeps its AVX-512 code for Intel's processors; oneDNN, which torch brings as well, uses what the processor has. What
oneDNN is not built for (another dtype or device, no elements, rows that overlap) goes to torch.mm.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("apexfx", "FRAGMENT")
_LIBRARY.define("product(Tensor a, Tensor b) -> Tensor")


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of two matrices."""
    return torch.ops.apexfx.product.default(a, b)


def product_into(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Put a @ b into `out`, which has its shape."""
    if not (_is_plain(a) and _is_plain(b)):
        return torch.mm(a, b, out=out)
    return out.copy_(_by_onednn(a, b))


def _check(a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"apexfx::product: a is {a.dtype} {list(a.shape)} on {a.device} and b {b.dtype} {list(b.shape)} on "
                         f"{b.device}; expected (M, K) and (K, N) of one dtype and device")


def _is_plain(matrix: Tensor) -> bool:
    """Whether the elements lie row by row or column by column, as oneDNN takes them."""
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    dense = (column == 1 and row >= columns) or (row == 1 and column >= rows)
    return dense and matrix.numel() > 0 and matrix.dtype == torch.float32 and matrix.device.type == "cpu"


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")


@torch.library.impl(_LIBRARY, "product", "CompositeExplicitAutograd")
def _product(a: Tensor, b: Tensor) -> Tensor:
    _check(a, b)
    return _by_onednn(a, b) if _is_plain(a) and _is_plain(b) else torch.mm(a, b)


@torch.library.register_fake("apexfx::product", lib=_LIBRARY)
def _product_fake(a: Tensor, b: Tensor) -> Tensor:
    _check(a, b)
    return a.new_empty(a.shape[0], b.shape[1])


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return product(grad, b.t()), product(a.t(), grad)


torch.library.register_autograd(
    "apexfx::product", _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs), lib=_LIBRARY)
