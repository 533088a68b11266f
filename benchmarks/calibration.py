"""Calibrate the simulator on real ranks; `simulate.py` imports it, it is no script.

Measured are the network, the executor's costs, and how compute and communication slow each other. Nothing here looks at a step
that is to be predicted: flat tensors go through the process group, synthetic gradients through bucket buffers, modules of
one-element parameters through the executor. Every rank calls every function.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy
import torch
import torch.distributed as dist
from harness import slowest, time_once
from scipy.optimize import nnls
from torch import Tensor, nn

from apexfx.buckets.bucket import Bucket
from apexfx.buckets.flat_buffer import all_reduce, averages, filled
from apexfx.buckets.plan import GradientSpec, plan_buckets
from apexfx.config import BucketConfig
from apexfx.parallel import DistributedDataParallel
from apexfx.tools.simulate.devices import Costs, LinearCost
from apexfx.tools.simulate.profile import Profile

KIB, MIB = 2**10, 2**20
SIZES = (256, 16 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
_MANY, _FEW = 48, 4  # gradients of a synthetic module
_OVERLAP_BYTES = 2 * MIB


@dataclass(frozen=True)
class MeasuredNetwork:
    """Allreduces as they were timed: straight lines between the samples, the first one before and in proportion beyond.

    Attributes:
        samples: (bytes, seconds), by bytes.
    """

    samples: tuple[tuple[int, float], ...]

    def allreduce_seconds(self, num_bytes: float, _num_ranks: int) -> float:
        """Return the seconds in which the ranks that were measured sum `num_bytes` each."""
        sizes, seconds = zip(*self.samples)
        return float(numpy.interp(num_bytes, sizes, seconds)) * max(1.0, num_bytes / sizes[-1])


def fit_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (a, b), neither negative, that minimize the sum of ((a + b x - y) / y)^2 over (x, y)."""
    x, y = numpy.array(samples).T
    (fixed, slope), _ = nnls(numpy.stack([1 / y, x / x.max() / y], axis=1), numpy.ones(len(x)))
    return float(fixed), float(slope / x.max())


def slowest_profile(profile: Profile, group: dist.ProcessGroup) -> Profile:
    """Return `profile` with every stamp as the slowest rank has it: what a collective at that place waits for."""
    passes = {}
    for name in ("forward", "backward"):
        segments = getattr(profile, name)
        latest = [0.0, *slowest(list(accumulate(segment.seconds for segment in segments)), group)]
        passes[name] = tuple(replace(s, seconds=end - begin) for s, begin, end in zip(segments, latest, latest[1:]))
    return replace(profile, optimizer_s=slowest([profile.optimizer_s], group)[0], **passes)


@dataclass
class Calibration:
    """Samples, taken in turns with whatever else is measured, and what follows from them.

    Args:
        group: the ranks, on CPU.
    """

    group: dist.ProcessGroup
    samples: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._copies = {count: _copies(count, 16 * count) for count in (_FEW, _MANY)}
        self._trips = {num_bytes: _copies(1, num_bytes) for num_bytes in SIZES}
        self._bare = {count: _Tiny(count) for count in (_FEW, _MANY)}
        self._wrapped = {count: DistributedDataParallel(_Tiny(count), process_group=alone) for count in (_FEW, _MANY)}
        self._num_overlapped: dict[str, int] = {}
        self._flats = [torch.zeros(_OVERLAP_BYTES // 4) for _ in range(8)]

    def take(self) -> None:
        """Take one sample of everything but the overlap slowdown."""
        small = {num_bytes: trip for num_bytes, trip in self._trips.items() if num_bytes < MIB}
        for num_bytes, (bucket, gradients) in [*4 * list(small.items()), *self._trips.items()]:
            self._add(f"fill {num_bytes}", time_once(lambda: filled(bucket, gradients)))
            flat = filled(bucket, gradients)
            dist.barrier(self.group)
            begin = time.perf_counter()
            work = all_reduce(flat, self.group)
            launched = time.perf_counter()
            work.wait()
            self._add(f"allreduce {num_bytes}", time.perf_counter() - begin)
            self._add("launch", launched - begin)
            self._add(f"write {num_bytes}", time_once(lambda: averages(bucket, flat)))
        for count, (bucket, gradients) in self._copies.items():
            self._add(f"fill of {count}", time_once(lambda: filled(bucket, gradients)))
            flat = filled(bucket, gradients)
            self._add(f"write of {count}", time_once(lambda: averages(bucket, flat)))
        for count in self._bare:
            self._add(f"bare {count}", time_once(self._bare[count].step))
            self._add(f"wrapped {count}", time_once(lambda: self._wrapped[count].module.step(self._wrapped[count])))

    def take_overlap(self, name: str, step: Callable[[], Profile], seconds: float) -> None:
        """Take one sample of `step` and of flat allreduces, both at once: how much each slows the other.

        Args:
            name: of the step.
            step: takes `seconds` alone, the same number on every rank, and communicates nothing.
        """
        if name not in self._num_overlapped:
            self._num_overlapped[name] = 4 + int(4 * seconds / self.typical(f"allreduce {_OVERLAP_BYTES}"))
        dist.barrier(self.group)
        begin = time.perf_counter()
        works = [dist.all_reduce(self._flats[i % len(self._flats)], group=self.group, async_op=True)
                 for i in range(self._num_overlapped[name])]
        step()
        end = time.perf_counter()
        self._add(f"overlapped {name}", end - begin)
        self._add(f"allreduces during {name}", sum(work.is_completed() for work in works))
        for work in works:
            work.wait()

    def _add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(slowest([value], self.group)[0])

    def typical(self, name: str) -> float:
        """Return the mean of the middle half of the samples: unlike medians, means of parts add up to the mean of the whole."""
        ordered = sorted(self.samples[name])
        quarter = len(ordered) // 4
        return statistics.fmean(ordered[quarter:len(ordered) - quarter])

    def by_size(self, what: str) -> tuple[tuple[int, float], ...]:
        """Return (bytes, seconds) of "allreduce", "fill" or "write"."""
        return tuple((num_bytes, self.typical(f"{what} {num_bytes}")) for num_bytes in SIZES)

    def network(self) -> MeasuredNetwork:
        """Return the network as it was timed."""
        return MeasuredNetwork(self.by_size("allreduce"))

    def costs(self, name: str, seconds: float) -> Costs:
        """Return what the executor takes on these ranks, and the overlap slowdown of a step.

        Args:
            name, seconds: of a step given to `take_overlap`, and what it takes alone.
        """
        launch = self.typical("launch")
        fill, write = self._copy_cost("fill"), self._copy_cost("write")
        few, many = (self.typical(f"wrapped {count}") - self.typical(f"bare {count}") for count in (_FEW, _MANY))
        per_gradient = max(0.0, (many - few) / (_MANY - _FEW))
        gradient_s = max(0.0, per_gradient - fill.tensor_s - write.tensor_s)
        per_step_s = max(0.0, few - _FEW * per_gradient - fill.fixed_s - write.fixed_s - launch)
        both = self.typical(f"overlapped {name}")
        reduced = self.typical(f"allreduces during {name}") * self.typical(f"allreduce {_OVERLAP_BYTES}")
        compute_rate = min(1.0, (seconds + self._num_overlapped[name] * launch) / both)
        network_rate = min(1.0, max(reduced / both, 1e-3))
        return Costs(gradient_s, replace(fill, fixed_s=fill.fixed_s + launch), write, per_step_s, compute_rate, network_rate)

    def _copy_cost(self, what: str) -> LinearCost:
        few, many = (self.typical(f"{what} of {count}") for count in (_FEW, _MANY))
        tensor_s = max(0.0, (many - few) / (_MANY - _FEW))
        fixed_s, byte_s = fit_line(self.by_size(what))
        return LinearCost(max(0.0, fixed_s - tensor_s), tensor_s, byte_s)


def _copies(count: int, num_bytes: int) -> tuple[Bucket, list[Tensor]]:
    shape, cpu = (num_bytes // 4 // count,), torch.device("cpu")
    specs = [GradientSpec(str(i), shape, torch.float32, torch.float32, cpu) for i in range(count)]
    [bucket] = plan_buckets(specs, BucketConfig(), 2).buckets
    return bucket, [torch.ones(shape) for _ in range(count)]


class _Tiny(nn.Module):
    """One-element parameters whose sum is the output."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.stack(list(self.parameters_)).sum()

    def step(self, forward: Callable[[], Tensor] | None = None) -> None:
        self.zero_grad()
        (forward or self)().backward()
