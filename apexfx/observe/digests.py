"""Digests of the bits of the results of a graph's nodes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import tree_leaves


class Digests:
    """Observer: a digest of the bits of each result; none of what `empty` returns."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def __call__(self, node: fx.Node, result: Any) -> None:
        if node.op in ("call_function", "placeholder") and "empty" not in str(node.target):
            self.digests[node.name] = digest(result)


def digest(result: Any) -> str:
    """Return a digest of dtype, shape and bits of all that is in a result."""
    sha = hashlib.sha256()
    for leaf in tree_leaves(result):
        if not isinstance(leaf, Tensor):
            sha.update(repr(leaf).encode())
            continue
        sha.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
        dense = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
        flat = dense.resolve_conj().resolve_neg().cpu().contiguous().flatten()
        sha.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().tobytes())  # one element has any stride
    return sha.hexdigest()[:16]
