"""Batch norm ops against torch's own kernels, on one device.

    python benchmarks/ops_batch_norm.py [--device cpu|cuda] [--threads 2] [--rounds 15] [--json PATH]

Interleaved rounds, medians; the ratio is torch's time over ours (above 1 is faster). On CUDA the share of the bandwidth
of a device copy measured in the same run is given too. "forward" is statistics + normalization (torch:
native_batch_norm); "backward" is the reduction + the gradient of x (torch: native_batch_norm_backward); "+relu" adds a
ReLU, fused here, a separate op in torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from apexfx.ops.batch_norm import (
    bn_backward_elementwise,
    bn_backward_reduce,
    bn_global_stats,
    bn_local_stats,
    bn_normalize,
    bn_running_stats,
)

# Activations of ResNet-50 at batch 32 and of smaller and odder models.
CPU_SHAPES = ((32, 64, 56, 56), (32, 256, 14, 14), (32, 2048, 7, 7), (64, 16, 8, 8), (256, 1024))
CUDA_SHAPES = ((128, 64, 112, 112), (128, 256, 56, 56), (128, 1024, 14, 14), (128, 2048, 7, 7), (4096, 1024))


def cases(x: Tensor) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """Return {name: (ours, torch's, passes over the memory of x)}."""
    channels = x.shape[1]
    generator = torch.Generator().manual_seed(0)
    weight, bias, mean, var = (torch.rand(channels, generator=generator).to(x.device) for _ in range(4))
    grad = torch.randn_like(x)
    stats = bn_local_stats(x)
    float_mean, float_invstd = (s.float() for s in bn_global_stats(stats, 1e-5))

    def forward(relu: bool) -> Tensor:
        stats = bn_local_stats(x)
        m, s = bn_global_stats(stats, 1e-5)
        new_mean, new_var = bn_running_stats(stats, mean, var, None, 0.1)
        mean.copy_(new_mean)
        var.copy_(new_var)
        return bn_normalize(x, m, s, weight, bias, None, relu)

    def forward_torch(relu: bool) -> Tensor:
        y = torch.native_batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5)[0]
        return y.relu_() if relu else y

    def backward(relu: bool) -> Tensor:
        m, s = bn_global_stats(stats, 1e-5)
        sums = bn_backward_reduce(grad, x, m, s, weight, bias, relu)
        return bn_backward_elementwise(grad, x, m, s, sums, stats[:1], weight, bias, relu)

    y = forward_torch(True)

    def backward_torch(relu: bool) -> Tensor:
        g = torch.ops.aten.threshold_backward(grad, y, 0) if relu else grad
        return torch.ops.aten.native_batch_norm_backward(
            g, x, weight, mean, var, float_mean, float_invstd, True, 1e-5, [True, True, True]
        )[0]

    return {
        "forward": (lambda: forward(False), lambda: forward_torch(False), 3),
        "forward+relu": (lambda: forward(True), lambda: forward_torch(True), 3),
        "backward": (lambda: backward(False), lambda: backward_torch(False), 5),
        "backward+relu": (lambda: backward(True), lambda: backward_torch(True), 5),
    }


def measure(functions: list[Callable[[], object]], device: str, rounds: int) -> list[float]:
    """Return the median seconds of each function, their calls interleaved."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
        function()
    for _ in range(rounds):
        for slot, function in zip(times, functions):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            slot.append(time.perf_counter() - start)
    return [statistics.median(slot) for slot in times]


def main() -> None:
    """Print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for shape in CUDA_SHAPES if options.device == "cuda" else CPU_SHAPES:
        for dtype in options.dtypes:
            for layout in ("contiguous", "channels_last") if len(shape) == 4 else ("contiguous",):
                x = torch.randn(shape, device=options.device).to(getattr(torch, dtype))
                if layout == "channels_last":
                    x = x.contiguous(memory_format=torch.channels_last)
                target = torch.empty_like(x)
                for name, (ours, theirs, passes) in cases(x).items():
                    seconds = measure([ours, theirs, lambda: target.copy_(x)], options.device, options.rounds)
                    copied = 2 * x.numel() * x.element_size() / seconds[2]
                    moved = passes * x.numel() * x.element_size() / seconds[0]
                    rows.append({
                        "shape": list(shape), "dtype": dtype, "layout": layout, "case": name,
                        "ms": 1e3 * seconds[0], "torch_ms": 1e3 * seconds[1], "ratio": seconds[1] / seconds[0],
                        "share_of_copy": moved / copied,
                    })  # fmt: skip
                    print("{shape!s:22} {dtype:9} {layout:13} {case:14} {ms:8.3f} ms  torch {torch_ms:8.3f} ms  "
                          "ratio {ratio:5.2f}  {share_of_copy:4.0%} of copy".format(**rows[-1]), flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
