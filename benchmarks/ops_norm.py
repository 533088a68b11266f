"""Rows of layer norm and RMS norm, forward and backward, for benchmarks/ops.py: our ops against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import torch
import torch.nn.functional as F
from op_row import Row
from torch import Tensor

from apexfx.ops.layer_norm import layer_norm
from apexfx.ops.rms_norm import rms_norm

SHAPES = {
    "cpu": ((4096, 768), (8192, 1024), (512, 4096)),
    "cuda": ((16384, 4096), (65536, 1024), (8192, 16384)),  # beyond the cache of a large GPU
}
EPS = 1e-5


def written_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm as Llama and T5 write it."""
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normalized.to(x.dtype)


# name -> (ours, {name of another: it}), all of (x, *parameters)
OPS: dict[str, tuple[Callable[..., Tensor], dict[str, Callable[..., Tensor]]]] = {
    "layer_norm": (lambda x, weight, bias: layer_norm(x, weight, bias, 1, EPS)[0],
                   {"torch": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS)}),
    "rms_norm": (lambda x, weight: rms_norm(x, weight, 1, EPS)[0],
                 {"torch": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS), "written out": written_rms_norm}),
}


def training_step(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a call that runs `function` and its backward with an output gradient that the first call draws: it may compile."""
    grads: list[Tensor] = []

    def run() -> None:
        output = function(*inputs)
        grads.extend([torch.randn_like(output)] * (not grads))
        torch.autograd.grad(output, inputs, grads)

    return run


def rows(device: str) -> Iterator[Row]:
    """Yield the rows; each builds its tensors when it is reached."""
    for op, (ours, others) in OPS.items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for rows, columns in SHAPES[device]:
                parameters = [torch.randn(columns, device=device, dtype=dtype).requires_grad_()
                              for _ in range(1 if "rms" in op else 2)]  # fmt: skip
                several = [torch.randn(rows, columns, device=device, dtype=dtype).requires_grad_()
                           for _ in range(3 if device == "cuda" else 1)]  # fmt: skip
                steps = {name: harness.rotate([training_step(function, (x, *parameters)) for x in several])
                         for name, function in {"ours": ours, **others}.items()}  # fmt: skip
                # x read and y written; then grad and x read, dx written.
                yield Row(f"{op} {str(dtype).removeprefix('torch.')} {rows}x{columns}", steps.pop("ours"), steps,
                          5 * several[0].nbytes, 1.0)  # fmt: skip
