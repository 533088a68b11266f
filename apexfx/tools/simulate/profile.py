"""A training step of one rank without communication, in segments: estimated from shapes, or measured.

A segment of backward ends where a gradient is ready, so that buckets can start between segments. One also ends at every
synchronized batch norm, which communicates there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch import BatchNorm, TorchDispatchMode, tree_leaves, tree_map
from ...buckets.bucket import GradientSpec, dim_order
from .devices import Device, op_cost

_STATISTICS_BYTES = 8 * 2  # a channel, each way: two numbers of float64 (ops/sync_batch_norm.py)


@dataclass(frozen=True)
class Segment:
    """A stretch of compute.

    Attributes:
        name: the parameter whose gradient ends it, or the batch norm that does, or "rest".
        seconds: of compute.
        gradients: parameters whose gradients are ready when it ends.
        sync_bytes: what a synchronized batch norm reduces, and waits for, when it ends; 0 for none.
    """

    name: str
    seconds: float
    gradients: tuple[str, ...] = ()
    sync_bytes: int = 0


@dataclass(frozen=True)
class Profile:
    """One step.

    Attributes:
        forward, backward: in order.
        optimizer_s: seconds of the optimizer step.
        gradients: what a bucket plan needs to know of each, in the order in which they are ready.
        source: in words, where the seconds come from.
        matrices_s: where Muon updates matrices, the seconds that making them orthogonal takes besides.
    """

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    optimizer_s: float
    gradients: tuple[GradientSpec, ...]
    source: str = ""
    matrices_s: float = 0.0

    @property
    def micro_batch_s(self) -> float:
        """Seconds of forward and backward."""
        return sum(segment.seconds for segment in (*self.forward, *self.backward))

    @property
    def compute_s(self) -> float:
        """Seconds of a step on one rank alone."""
        return self.micro_batch_s + self.optimizer_s + self.matrices_s

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(spec.numel * spec.dtype.itemsize for spec in self.gradients)

    @property
    def synchronizes(self) -> bool:
        """Whether it has a synchronized batch norm."""
        return any(segment.sync_bytes for segment in self.forward)


def analytic(model: nn.Module, inputs: Any, device: Device, *, dtype: torch.dtype = torch.float32, sync_bn: bool = False,
             optimizer_passes: int = 7, muon: bool = False) -> Profile:
    """Return the profile of a training step of `model` on `device`, from shapes alone.

    The model runs on the meta device, where nothing is computed; every op takes what `Device.seconds` estimates.

    Args:
        model: moved to the meta device for good; pass a copy of one that is still needed.
        inputs: a tensor or a tuple of them; only shapes and dtypes matter.
        dtype: floating parameters and inputs are taken to have it.
        sync_bn: every training batch norm is synchronized.
        optimizer_passes: reads and writes of a tensor as large as the float32 parameters: 3 SGD, 5 with momentum, 7 Adam.
        muon: what `muons` names is updated by Muon, five iterations in bfloat16.

    Raises:
        ValueError: a model whose forward reads values, which the meta device does not have.
    """
    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to("meta", dtype if x.is_floating_point() else x.dtype)

    model = model.to("meta", dtype).train()
    clock = _OpClock(device)
    try:
        with clock:
            forward, backward, gradients = _run(model, tree_map(moved, inputs), lambda: clock.now, sync_bn)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(f"apexfx: {type(model).__name__} cannot be run on shapes alone ({error}); measure it instead "
                         "(--measured)") from error
    num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    seconds = device.seconds(0, 4 * num_parameters * optimizer_passes, dtype)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    products = sum(orthogonal_seconds(device, shapes[name]) for name in muons(model)) if muon else 0.0
    source = f"shapes on {device.name}, {dtype}".replace("torch.", "")
    return Profile(forward, backward, seconds, gradients, source, products)


def muons(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon is taken to update: those of two dimensions but embeddings."""
    tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    return {name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and p.numel() and p not in tables}


def orthogonal_seconds(device: Device, shape: Sequence[int], num_iterations: int = 5) -> float:
    """Return the seconds of the products that make a matrix nearly orthogonal."""
    a, b = sorted(shape)
    return device.seconds(num_iterations * (4 * a * a * b + 2 * a**3), 0, torch.bfloat16)


def measured(model: nn.Module, inputs: Any, *, steps: int = 10, warmup: int = 3, sync_bn: bool = False) -> Profile:
    """Return the profile of `model` with SGD on this machine: medians over `steps` steps. It trains the model."""
    take = sampler(model, inputs, sync_bn=sync_bn)
    samples = [take() for _ in range(warmup + steps)][warmup:]
    return combine(samples, f"measured, {steps} steps")


def sampler(model: nn.Module, inputs: Any, *, sync_bn: bool = False,
            clock: Callable[[], float] = time.perf_counter) -> Callable[[], Profile]:
    """Return a function that runs one training step and returns its profile, for measurements that take turns."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    on_cuda = any(p.is_cuda for p in model.parameters())

    def now() -> float:
        if on_cuda:
            torch.cuda.synchronize()
        return clock()

    def take() -> Profile:
        begin = now()
        optimizer.zero_grad()
        forward, backward, gradients = _run(model, inputs, now, sync_bn, begin)
        begin = now()
        optimizer.step()
        return Profile(forward, backward, now() - begin, gradients, "measured, 1 step")

    return take


def combine(samples: Sequence[Profile], source: str) -> Profile:
    """Return one profile from several of the same model: medians of every segment's end, counted from its pass's start."""
    def joined(name: str) -> tuple[Segment, ...]:
        rows = [getattr(sample, name) for sample in samples]
        ends = [0.0]
        for index in range(len(rows[0])):
            ends.append(max(ends[-1], statistics.median(sum(s.seconds for s in row[:index + 1]) for row in rows)))
        return tuple(replace(segment, seconds=end - begin) for segment, begin, end in zip(rows[0], ends, ends[1:]))

    optimizer_s = statistics.median(sample.optimizer_s for sample in samples)
    return Profile(joined("forward"), joined("backward"), optimizer_s, samples[0].gradients, source)


def blocks_of(model: nn.Module, blocks: str) -> list[str]:
    """Return the paths of the modules that are given to `fully_shard` before the model itself.

    Args:
        blocks: patterns of `fnmatch` for each part of a path: "blocks.*", "[4-9],1[0-9]"; "" for none.

    Raises:
        ValueError: none is called so.
    """
    patterns = [pattern.strip().split(".") for pattern in blocks.split(",") if pattern]

    def is_block(path: list[str]) -> bool:
        return any(len(path) == len(pattern) and all(map(fnmatchcase, path, pattern)) for pattern in patterns)

    paths = [name for name, module in model.named_modules() if name and is_block(name.split(".")) and [*module.parameters()]]
    if patterns and not paths:
        raise ValueError(f"apexfx: no module of {type(model).__name__} is called {blocks!r}; its modules are "
                         f"{', '.join(name for name, _ in model.named_children())}, and those inside of them")
    return paths


def loss_of(out: Any) -> Any:
    """Return the loss that a step is taken to have: of what a model returns, all that takes a gradient, in float32."""
    return sum(leaf.float().square().mean() for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _spec(name: str, p: Tensor) -> GradientSpec:
    return GradientSpec(name, tuple(p.shape), p.dtype, p.dtype, torch.device(p.device.type), dim_order(p.shape, p.stride()))


def _run(model: nn.Module, inputs: Any, clock: Callable[[], float], sync_bn: bool,
         begin: float | None = None) -> tuple[tuple[Segment, ...], tuple[Segment, ...], tuple[GradientSpec, ...]]:
    """Run forward and backward; return the segments of both, and the gradients in the order in which they are ready."""
    recorder = _SegmentRecorder(clock, clock() if begin is None else begin)
    names = {p: n for n, p in model.named_parameters() if p.requires_grad}
    gradients: list[GradientSpec] = []

    def on_gradient(p: Tensor) -> None:
        name = names[p]
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(f"apexfx: the gradient of {name!r} is {p.grad.layout}; only dense gradients can be put into buckets")
        recorder.end_segment(name, (name,))
        gradients.append(_spec(name, p))

    hooks = [p.register_post_accumulate_grad_hook(on_gradient) for p in names]
    for name, module in model.named_modules():
        if sync_bn and isinstance(module, BatchNorm):
            hooks += _sync_hooks(name, module, recorder)
    try:
        out = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        loss = loss_of(out)
        forward = recorder.end_pass()
        if not isinstance(loss, Tensor):
            raise ValueError(f"apexfx: no output of {type(model).__name__} takes a gradient; there is no backward to simulate")
        loss.backward()
        return forward, recorder.end_pass(), tuple(gradients)
    finally:
        for hook in hooks:
            hook.remove()


class _SegmentRecorder:
    """Splits forward or backward into segments, which hooks end."""

    def __init__(self, clock: Callable[[], float], begin: float) -> None:
        self.clock, self.begin = clock, begin
        self.segments: list[Segment] = []

    def end_segment(self, name: str, gradients: tuple[str, ...] = (), sync_bytes: int = 0) -> None:
        now = self.clock()
        self.segments.append(Segment(name, now - self.begin, gradients, sync_bytes))
        self.begin = now

    def end_pass(self) -> tuple[Segment, ...]:
        self.end_segment("rest")
        segments, self.segments = tuple(self.segments), []
        return segments


def _sync_hooks(name: str, module: nn.Module, recorder: _SegmentRecorder) -> list[Any]:
    num_bytes = _STATISTICS_BYTES * module.num_features

    def before_forward(_module: nn.Module, _inputs: Any) -> None:
        recorder.end_segment(name, sync_bytes=num_bytes + 8)  # and the number of elements

    def after_forward(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
        if out.requires_grad:  # when the gradient of the output is there
            out.register_hook(lambda _grad: recorder.end_segment(name, sync_bytes=num_bytes))

    return [module.register_forward_pre_hook(before_forward), module.register_forward_hook(after_forward)]


class _OpClock(TorchDispatchMode):
    """Adds up the estimated seconds of every op in `now`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.now = device, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.now += self.device.seconds(*op_cost(func, args, kwargs or {}, out))
        return out
