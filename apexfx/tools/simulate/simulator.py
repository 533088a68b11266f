"""Predict a data-parallel training step on any number of ranks, from a bucket plan, a profile and a network.

The program is a step op by op: a bucket is filled and started when its last gradient is ready and all earlier ones are started,
the last one at the end of backward. After backward every bucket is waited for, then all results are written back, then the
optimizer runs. A synchronized batch norm waits for its statistics at once. `simulate` writes this down as a program
(`sharded.py` that of a step that is sharded), and `timeline.py` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...buckets.plan import BucketPlan, plan_buckets
from ...config import BucketConfig
from .devices import Costs, Device
from .network import Network
from .profile import Profile
from .sharded import TracedStep, program
from .timeline import Event, Start, Task, Timeline, Wait, Work, run

_BUCKETS, _STATISTICS = 0, 1  # channels: buckets follow each other, statistics of batch norms have a communicator of their own


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
        num_ranks: that take part.
        step_s: of the whole step.
        compute_s: forward, backward and optimizer, on one rank alone; where the update is shared, of that its part.
        bookkeeping_s: fill, write back and hooks.
        communication_s: of all collectives, each as if it had the network to itself.
        exposed_s: what communication adds to the step: waiting, and compute that it slows down.
        sync_tax_s: what synchronized batch norms add to the step; where computing and communicating slow one another down, what
            they delay may save more than they cost.
        plan: the buckets; None where the model is sharded, which has groups.
        timeline: what happened when.
    """

    num_ranks: int
    step_s: float
    compute_s: float
    bookkeeping_s: float
    communication_s: float
    exposed_s: float
    sync_tax_s: float
    plan: BucketPlan | None
    timeline: Timeline

    @property
    def buckets(self) -> list[Event]:
        """The sums of gradients: when each was started, began and ended, and its bytes."""
        return self._named("bucket ")

    @property
    def gathers(self) -> list[Event]:
        """The same of the gathers of parameters, where something is sharded."""
        return self._named("gather ")

    def _named(self, prefix: str) -> list[Event]:
        return [event for event in self.timeline.track("communication") if event.name.startswith(prefix)]

    @property
    def efficiency(self) -> float:
        """`compute_s` / `step_s`: 1.0 where communication costs nothing."""
        return self.compute_s / self.step_s if self.step_s else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON-able values, without plan and timeline."""
        row = {name: getattr(self, name) for name in ("num_ranks", "step_s", "compute_s", "bookkeeping_s", "communication_s",
                                                      "exposed_s", "sync_tax_s", "efficiency")}
        return row | {name: [asdict(event) for event in getattr(self, name)] for name in ("buckets", "gathers")}


@dataclass(frozen=True)
class BucketChoice:
    """One bucket size that `best_bucket` tried.

    Attributes:
        message_size: elements at which a bucket closes.
        mib: the same in MiB of the widest gradient dtype.
        num_buckets, step_s: what it gives.
    """

    message_size: int
    mib: float
    num_buckets: int
    step_s: float


def plan_for(profile: Profile, config: BucketConfig, num_ranks: int) -> BucketPlan:
    """Return the plan in the order in which gradients become ready."""
    return plan_buckets([spec for spec in reversed(profile.gradients) if spec.numel], config, num_ranks)


def simulate(profile: Profile, network: Network, num_ranks: int, config: BucketConfig | None = None, *,
             costs: Costs | None = None, plan: BucketPlan | None = None, step: TracedStep | None = None,
             device: Device | None = None) -> Prediction:
    """Predict a step.

    Args:
        profile: of one rank without communication.
        network: between the ranks.
        num_ranks: how many.
        config: the bucket options; default `BucketConfig()`.
        costs: of buckets; default: none.
        plan: instead of the one that `config` gives.
        step: the graph of a step that is sharded, for as many ranks, in place of buckets.
        device: with that, where its ops have their proportions.

    Raises:
        ValueError: a plan for other gradients, or a graph for another number of ranks.
    """
    costs = costs or Costs()
    if step is not None:
        if step.num_ranks != num_ranks:
            raise ValueError(f"apexfx: a step of {step.num_ranks} ranks was given for {num_ranks}; trace one for those")
        tasks = program(step, profile, device, network, costs)
    else:
        plan = plan or plan_for(profile, config or BucketConfig(), num_ranks)
        plan.check([spec for spec in profile.gradients if spec.numel])
        tasks = _program(profile, network, num_ranks, plan, costs)
    rates = {"compute_rate": costs.compute_rate, "network_rate": costs.network_rate}
    timeline = run(tasks, **rates)
    local = [task for task in tasks if isinstance(task, Work) or not task.name.startswith("statistics")]
    step_s = timeline.seconds
    tax = step_s - run(local, **rates).seconds if len(local) < len(tasks) else 0.0
    works = [task for task in tasks if isinstance(task, Work)]
    work = sum(task.seconds for task in works)
    alone = sum(task.seconds for task in tasks if isinstance(task, Start))
    compute_s = profile.micro_batch_s + sum(task.seconds for task in works if task.kind == "optimizer")
    return Prediction(num_ranks, step_s, compute_s, work - compute_s, alone, step_s - work, tax, plan, timeline)


def _program(profile: Profile, network: Network, num_ranks: int, plan: BucketPlan, costs: Costs) -> list[Task]:
    """Return what a rank does in a step, in order."""
    program: list[Task] = []
    ready: set[str] = set()
    started = 0

    def collective(name: str, num_bytes: int, channel: int) -> Start:
        return Start(name, network.allreduce_seconds(num_bytes, num_ranks), channel, num_bytes)

    def start_next() -> None:
        nonlocal started
        bucket = plan.buckets[started]
        program.append(Work(f"fill bucket {started}", costs.fill.seconds(len(bucket.slots), bucket.total_bytes), "fill"))
        program.append(collective(f"bucket {started}", bucket.total_bytes, _BUCKETS))
        started += 1

    for kind, segments in (("forward", profile.forward), ("backward", profile.backward)):
        for index, segment in enumerate(segments):
            program.append(Work(segment.name, segment.seconds + costs.gradient_s * len(segment.gradients), kind))
            if segment.sync_bytes and num_ranks > 1:
                name = f"statistics of {segment.name}, {kind} {index}"
                program += [collective(name, segment.sync_bytes, _STATISTICS), Wait(name)]
            ready.update(segment.gradients)
            while started < len(plan.buckets) and plan.buckets[started].start == "ready" \
                    and ready.issuperset(plan.buckets[started].parameters):
                start_next()
    while started < len(plan.buckets):
        start_next()
    program.append(Work("step", costs.per_step_s, "write"))
    program += [Wait(f"bucket {index}") for index in range(len(plan.buckets))]
    program += [Work(f"write back bucket {index}", costs.write.seconds(len(bucket.slots), bucket.total_bytes), "write")
                for index, bucket in enumerate(plan.buckets)]
    return [*program, Work("optimizer", profile.compute_s - profile.micro_batch_s, "optimizer")]


def best_bucket(profile: Profile, network: Network, num_ranks: int, config: BucketConfig | None = None,
                **options: Any) -> list[BucketChoice]:
    """Return the bucket sizes tried, fastest step first; of equal ones, the fewest buckets.

    They are powers of the square root of two from 1/16 MiB to all gradients in one bucket; those that give the same buckets as a
    smaller one are left out. Arguments are as of `simulate`.
    """
    config = replace(config or BucketConfig(), layout="reverse", bucket_cap_mb=BucketConfig.bucket_cap_mb, delay_allreduce=False,
                     trigger_params=(), plan=None)
    total = max(profile.num_bytes, 1) / 2**20
    sizes_mib = [2 ** (i / 2) / 16 for i in range(max(0, math.ceil(2 * math.log2(16 * total))) + 1)]
    itemsize = max((spec.dtype.itemsize for spec in profile.gradients), default=4)
    plans: dict[tuple[tuple[str, ...], ...], tuple[BucketConfig, BucketPlan]] = {}
    for size in sizes_mib:
        sized = replace(config, message_size=max(1, round(size * 2**20 / itemsize)))
        plan = plan_for(profile, sized, num_ranks)
        plans.setdefault(tuple(bucket.parameters for bucket in plan.buckets), (sized, plan))
    configs, distinct = zip(*plans.values())
    return best_of(configs, [simulate(profile, network, num_ranks, plan=plan, **options) for plan in distinct], itemsize)


def best_of(configs: Sequence[BucketConfig], predictions: Sequence[Prediction], itemsize: int) -> list[BucketChoice]:
    """Return what bucket options give, fastest step first; of equal ones, the fewest buckets."""
    choices = [BucketChoice(config.message_size, config.message_size * itemsize / 2**20, len(made.buckets), made.step_s)
               for config, made in zip(configs, predictions)]
    return sorted(choices, key=lambda choice: (choice.step_s, choice.num_buckets))
