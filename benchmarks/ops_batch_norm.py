"""Rows of batch norm, for benchmarks/ops.py: our ops against torch's own kernels.

"step" is a batch norm with the add and ReLU that end a residual block, forward and backward, against Inductor's code.
"forward" is statistics, running buffers and normalization (torch: native_batch_norm), and has to be at least as fast;
"backward" is the gradients of x, weight and bias (torch: native_batch_norm_backward); "+relu" adds a ReLU, fused here,
an op of its own in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import torch
import torch.nn.functional as F
from op_row import Row
from ops_norm import training_step
from torch import Tensor

from apexfx.ops.local_batch_norm import bn_backward, bn_forward, local_batch_norm
from apexfx.ops.sync_batch_norm import sync_batch_norm

# Activations of ResNet-50 at batch 32 and of smaller and odder models.
SHAPES = {
    "cpu": ((32, 64, 56, 56), (32, 256, 14, 14), (32, 2048, 7, 7), (64, 16, 8, 8), (256, 1024)),
    "cuda": ((128, 64, 112, 112), (128, 256, 56, 56), (512, 1024, 14, 14), (1024, 2048, 7, 7), (65536, 1024)),  # beyond the cache
}


def rows(device: str) -> Iterator[Row]:
    """Yield the rows; each builds its tensors when it is reached."""
    for shape in SHAPES[device]:
        for dtype in (torch.float32, torch.bfloat16):
            for layout in ("NCHW", "NHWC") if len(shape) == 4 else ("NC",):
                several = [torch.randn(shape, device=device).to(dtype) for _ in range(2 if device == "cuda" else 1)]
                if layout == "NHWC":
                    several = [x.contiguous(memory_format=torch.channels_last) for x in several]
                kind = f"{'f32' if dtype is torch.float32 else 'bf16'} {layout} {'x'.join(map(str, shape))}"
                calls = [cases(x) for x in several]
                for name, (_, _, passes) in calls[0].items():
                    ours, theirs = (harness.rotate([case[name][i] for case in calls]) for i in range(2))
                    target = 1.0 if name == "forward" else None
                    yield Row(f"batch_norm {name} {kind}", ours, {"torch": theirs}, passes * several[0].nbytes, target)
    for shape in ((16, 32, 24, 24), (32, 64, 56, 56), (32, 256, 14, 14), (32, 1024, 7, 7)) if device == "cpu" else ():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x, residual = (torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
                           for _ in range(2))  # fmt: skip
            parameters = [torch.randn(shape[1]).requires_grad_() for _ in range(2)]
            torch._dynamo.reset()
            steps = [training_step(torch.compile(block, dynamic=False), (x, residual, *parameters)) for block in BLOCKS]
            yield Row(f"batch_norm step {str(dtype).removeprefix('torch.')} NHWC {'x'.join(map(str, shape))}", steps[0],
                      {"Inductor": steps[1]}, 10 * x.nbytes, 1.0)  # fmt: skip


BLOCKS = (
    lambda x, residual, weight, bias: sync_batch_norm(x, weight, bias, residual=residual, relu=True),
    lambda x, residual, weight, bias: F.relu(F.batch_norm(x, None, None, weight, bias, True) + residual),
)


def cases(x: Tensor) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """Return {name: (ours, torch's, passes over the memory of x)}."""
    channels = x.shape[1]
    generator = torch.Generator().manual_seed(0)
    weight, bias, mean, var = (torch.rand(channels, generator=generator).to(x.device) for _ in range(4))
    grad = torch.randn_like(x)

    def forward(relu: bool) -> Tensor:
        return local_batch_norm(x, weight, bias, None, mean, var, None, 0.1, 1e-5, relu)

    def forward_torch(relu: bool) -> Tensor:
        y = torch.native_batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5)[0]
        return y.relu_() if relu else y

    stats = bn_forward(x, weight, bias, None, 1e-5, False)[1]
    _, float_mean, float_invstd = (t.float() for t in torch.native_batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5))

    def backward(relu: bool) -> Tensor:
        return bn_backward(grad, x, stats, weight, bias, 1e-5, relu)[0]

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
