"""orthogonalize: matrices made nearly orthogonal by products (Newton-Schulz), which Muon updates by.

    x = matrix / max(|matrix|, eps), transposed where it has more rows than columns
    num_iterations times:  g = x x^T,  x = a x + (b g + c g g) x

What torch.optim.Muon computes, in its order. It is one op: a matrix takes twenty calls of the library that multiplies, which no
compiler fuses with anything, and each would cost time while a graph is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._arguments import check_tensor
from ._define import define
from ._tensor_lists import check_not_empty, check_not_negative


def orthogonal(matrix: Tensor, a: float, b: float, c: float, eps: float | Tensor, num_iterations: int) -> Tensor:
    """Return what the op makes of a matrix; `eps` may be a 0-d tensor of its dtype here."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.permute(1, 0) if is_tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp_min(eps)
    for _ in range(num_iterations):
        gram = x @ x.permute(1, 0)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.permute(1, 0) if is_tall else x


def _check(matrices, a, b, c, eps, num_iterations):
    check_not_empty("orthogonalize", matrices)
    check_not_negative("orthogonalize", eps=eps, num_iterations=num_iterations)
    for i, matrix in enumerate(matrices):
        check_tensor("orthogonalize", f"matrices[{i}]", matrix, matrices[0], "matrices[0]")
        if matrix.ndim != 2:
            raise ValueError(f"apexfx::orthogonalize: matrices[{i}] is {tuple(matrix.shape)}; expected a matrix")


def _fake(matrices, a, b, c, eps, num_iterations):
    return [_laid_out(matrix, num_iterations) for matrix in matrices]


def _laid_out(matrix, num_iterations):
    """Return a new tensor laid out as `orthogonal` returns one, without its ops: they cost time in each trace."""
    if not num_iterations:
        return torch.empty_like(matrix)
    is_tall = matrix.shape[0] > matrix.shape[1]
    return matrix.new_empty(matrix.shape[::-1]).permute(1, 0) if is_tall else matrix.new_empty(matrix.shape)


@define("orthogonalize(Tensor[] matrices, float a, float b, float c, float eps, int num_iterations) -> Tensor[]",
        check=_check, fake=_fake)
def orthogonalize(matrices: Sequence[Tensor], a: float, b: float, c: float, eps: float, num_iterations: int) -> list[Tensor]:
    """Return `matrices` made nearly orthogonal, each in its dtype; see this module."""
    return [orthogonal(matrix, a, b, c, eps, num_iterations) for matrix in matrices]
