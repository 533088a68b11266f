"""The bucket plan: which gradients share an allreduce, in which order, at which bytes. Data: print, save, edit, replay.

A plan is a pure function of the parameters' names, shapes, dtypes and devices in the order of their first use, never of
one rank's graph: a peer may hold a recompile for another batch size, or no graph at all but a cache hit.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel

from .._torch import ddp_bucket_indices
from ..config import HALVES, BucketConfig
from ..graph.printing import count_text
from . import ddp_layout
from .bucket import Bucket, BucketSlot, GradientSpec, dim_order, group_gradients
from .divisors import divisors
from .windows import Window

FORMAT_VERSION = 1
APEX_MESSAGE_SIZE, LEAST_MESSAGE_SIZE = 10_000_000, 2**19  # elements; the least, so that latency stays small beside bytes
_ADVICE = "make a new plan by leaving BucketConfig(plan=) out once"


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one backward graph, in the order in which every rank issues them; checked whenever one is made.

    Attributes:
        buckets: in order.
        world_size: ranks the divisors were made for.
        layout: "reverse", "ddp" or "edited".
        group_name: the process group's.

    Raises:
        ValueError: slots that overlap, sizes that do not add up, a parameter in two places.
    """

    buckets: tuple[Bucket, ...]
    world_size: int
    layout: str = "reverse"
    group_name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(f"apexfx: the bucket plan has world_size={self.world_size!r}, expected a number of ranks")
        for index, bucket in enumerate(self.buckets):
            bucket.check(index)
        names = [name for bucket in self.buckets for slot in bucket.slots for name in (slot.parameter, *slot.shared_with)]
        if len(set(names)) < len(names):
            twice = next(name for name, num in Counter(names).items() if num > 1)
            raise ValueError(f"apexfx: the bucket plan holds {twice!r} twice; a gradient is averaged in one place")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters, in buffer order, of one that is tied the first."""
        return tuple(name for bucket in self.buckets for name in bucket.parameters)

    @property
    def total_bytes(self) -> int:
        """Bytes a rank contributes each step."""
        return sum(bucket.total_bytes for bucket in self.buckets)

    @property
    def averages(self) -> bool:
        """Whether every gradient is divided by the number of ranks."""
        return all(math.isclose(bucket.predivide * bucket.postdivide, self.world_size) for bucket in self.buckets)

    def check(self, specs: Sequence[GradientSpec], *, world_size: int | None = None, others: Container[str] = ()) -> None:
        """Raise `ValueError` naming the first parameter for which this plan was not made.

        Args:
            specs: the gradients of the graph at hand.
            world_size: of the group at hand.
            others: names that may be missing among `specs`.
        """
        if world_size is not None and world_size != self.world_size:
            raise ValueError(f"apexfx: the bucket plan divides for {self.world_size} ranks and the group has {world_size}; "
                             f"{_ADVICE}")
        planned = {slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        for spec in specs:
            if spec.name not in planned:
                raise ValueError(f"apexfx: the model has parameter {spec.name!r} ({spec}), which the bucket plan "
                                 f"does not hold; {_ADVICE}")
            bucket, slot = planned.pop(spec.name)
            expected = dataclasses.replace(spec, shape=slot.shape, dtype=bucket.dtype, output_dtype=bucket.output_dtype)
            if expected != spec or bucket.device != spec.device.type:
                raise ValueError(f"apexfx: parameter {spec.name!r} was given as {spec} on {spec.device.type}, the "
                                 f"bucket plan expects {expected} on {bucket.device}; {_ADVICE}")
        name = next((name for name in planned if name not in others), None)
        if name is not None:
            raise ValueError(f"apexfx: the bucket plan holds parameter {name!r}, which the model was expected to have and "
                             f"has not (or has no gradient for); {_ADVICE}")

    def regroup(self, groups: Sequence[Sequence[str]]) -> BucketPlan:
        """Return this plan with other buckets: one for each list of parameter names, in this order.

        Raises:
            ValueError: a name that is missing, unknown or given twice, or a bucket of mixed dtypes.
        """
        names = [name for group in groups for name in group]
        if sorted(names) != sorted(self.parameters):
            odd = sorted(set(names) ^ set(self.parameters)) or sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"apexfx: regroup() expects every parameter of the plan once; see {odd[0]!r}")
        home = {slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        packed = not any(padding for bucket in self.buckets for padding in bucket.padding())
        buckets = []
        for group in filter(None, groups):
            first = home[group[0]][0]
            for name in group:
                if home[name][0].kind != first.kind:
                    raise ValueError(f"apexfx: {name!r} and {group[0]!r} cannot share a bucket: "
                                     + home[name][0].difference(first))
            slots = [home[name][1] for name in group]
            buckets.append(first.with_slots(slots, packed=packed))
        return dataclasses.replace(self, buckets=tuple(buckets), layout="edited")

    def with_windows(self, windows: Sequence[Window]) -> BucketPlan:
        """Return this plan with where its communication lies in a graph."""
        by_bucket = {window.bucket: window for window in windows}
        return dataclasses.replace(self, buckets=tuple(
            dataclasses.replace(bucket, start_after=by_bucket[index].start_after, wait_before=by_bucket[index].wait_before,
                                window_flops=by_bucket[index].flops) if index in by_bucket else bucket
            for index, bucket in enumerate(self.buckets)))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-able values; `from_json` reads them back."""
        return {"version": FORMAT_VERSION, "layout": self.layout, "world_size": self.world_size, "group": self.group_name,
                "buckets": [bucket.to_json() for bucket in self.buckets]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BucketPlan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: another version, a missing field, what no plan may have.
        """
        if not isinstance(data, dict) or data.get("version") != FORMAT_VERSION:
            version = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"apexfx: a bucket plan of version {version!r} was given, expected {FORMAT_VERSION}")
        try:
            buckets = tuple(Bucket.from_json(row, index) for index, row in enumerate(data["buckets"]))
            return cls(buckets, data["world_size"], data["layout"], data["group"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"apexfx: malformed bucket plan ({type(error).__name__}: {error}); "
                             "see BucketPlan.to_json() for the fields") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, one value a line so that it can be edited by hand."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> BucketPlan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: the file cannot be read, or holds something else.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except OSError as error:
            raise ValueError(f"apexfx: the bucket plan {str(path)!r} cannot be read ({error.strerror}); give plan= a file that "
                             "BucketPlan.save() wrote") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"apexfx: {path} is not JSON: {error}") from error

    def __str__(self) -> str:
        rows = [(index, _fold(bucket.parameters), len(bucket.slots), bucket.dtypes(), f"{bucket.total_bytes / 2**20:.3f}",
                 f"{bucket.predivide:g} / {bucket.postdivide:g}", bucket.start_after or bucket.start,
                 bucket.wait_before or "-", f"{bucket.window_flops / 1e6:.1f}" if bucket.window_flops is not None else "-")
                for index, bucket in enumerate(self.buckets)]
        headers = ("bucket", "parameters", "n", "dtype", "MiB", "divide pre / post", "start after", "wait before",
                   "window MFLOP")
        title = (f"bucket plan: {count_text(len(self.buckets), 'allreduce')}, {self.total_bytes / 2**20:.3f} MiB, "
                 f"{count_text(self.world_size, 'rank')}, layout {self.layout!r}\n")
        return title + tabulate(rows, headers=headers, disable_numparse=True)


def plan_buckets(specs: Sequence[GradientSpec], config: BucketConfig, world_size: int, group_name: str = "") -> BucketPlan:
    """Group gradients into buckets. A pure function, so that every rank derives the same plan alone.

    Args:
        specs: in the order of the parameters' first use in forward; buckets fill in reverse, as backward does.
        config: see `BucketConfig`; its `plan` is not looked at here.
        world_size: ranks in the group.
    """
    if config.layout == "ddp":
        groups = ddp_layout.group(specs, config.bucket_cap_mb)
    else:
        groups = _group_in_reverse(specs, config)
    predivide, postdivide = divisors(config, world_size)
    buckets = []
    for members in groups:
        first = members[0]
        bucket = Bucket((), first.dtype, _reduce_dtype(first, config), first.output_dtype, first.device.type, 0,
                        predivide, postdivide, "end" if config.delay_allreduce else "ready")
        slots = [BucketSlot(s.name, s.shape, 0, s.dim_order, s.shared_with) for s in members]
        buckets.append(bucket.with_slots(slots, packed=config.layout == "ddp"))
    return BucketPlan(tuple(buckets), world_size, config.layout, group_name)


def default_message_size(numel: int) -> int:
    """Return the elements at which a bucket is closed where the user names no size; see `BucketConfig.message_size`.

    Args:
        numel: of all gradients together.
    """
    return min(max(numel // 4, LEAST_MESSAGE_SIZE), APEX_MESSAGE_SIZE)


def given_plan(config: BucketConfig) -> BucketPlan | None:
    """Return the plan to replay, read from its file where `config.plan` is a path, or None."""
    if config.plan is None or isinstance(config.plan, BucketPlan):
        return config.plan
    if isinstance(config.plan, (str, Path)):
        return BucketPlan.load(config.plan)
    raise TypeError(f"apexfx: plan={config.plan!r} ({type(config.plan).__name__}) was given, expected a BucketPlan or the "
                    "path of one")


def check_options(config: BucketConfig, parameters: Mapping[str, torch.Tensor], world_size: int) -> None:
    """Refuse options that name what the model has not; what only its graphs can tell is checked by `BucketPlan.check`.

    Args:
        parameters: every name of every parameter.
        world_size: of the group at hand.
    """
    for name in config.trigger_params:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            raise ValueError(f"apexfx: trigger_params names {name!r}, which is no parameter of the model"
                             + (f"; did you mean {near[0]!r}?" if near else ""))
    plan = given_plan(config)
    if plan is None:
        return
    plan.check((), world_size=world_size, others=set(plan.parameters) & set(parameters))
    for bucket in plan.buckets:
        for slot in bucket.slots:
            shape = tuple(parameters[slot.parameter].shape)
            if shape != slot.shape:
                raise ValueError(f"apexfx: parameter {slot.parameter!r} was given with shape {list(shape)}, the bucket plan "
                                 f"expects {list(slot.shape)}; {_ADVICE}")


def _group_in_reverse(specs: Sequence[GradientSpec], config: BucketConfig) -> list[list[GradientSpec]]:
    message_size = config.message_size or default_message_size(sum(spec.numel for spec in specs))

    def is_full(spec: GradientSpec, numel: int, _num_closed: int) -> bool:
        if config.trigger_params:
            return not set(config.trigger_params).isdisjoint((spec.name, *spec.shared_with))
        return not config.delay_allreduce and numel >= message_size

    return group_gradients(reversed(specs), is_full)


def _reduce_dtype(spec: GradientSpec, config: BucketConfig) -> torch.dtype:
    if not spec.dtype.is_floating_point:
        return spec.dtype  # a complex gradient has no half form to be reduced in
    if config.comm_dtype is not None:
        return config.comm_dtype
    return torch.float32 if config.allreduce_always_fp32 and spec.dtype in HALVES else spec.dtype


def _fold(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]}"


def plan_from_ddp(module: DistributedDataParallel) -> BucketPlan:
    """Return the buckets of a torch DDP module as a plan: `BucketConfig(layout="ddp", plan=plan_from_ddp(ddp))` replays them.

    Args:
        module: has run three training iterations: its buckets are final and on record.

    Raises:
        TypeError: not a DDP module.
        ValueError: it has not trained yet.
    """
    if not isinstance(module, DistributedDataParallel):
        raise TypeError(f"apexfx: plan_from_ddp() was given a {type(module).__name__}, expected a DistributedDataParallel")
    indices = ddp_bucket_indices(module)
    if not indices:
        raise ValueError("apexfx: this DDP module has no final buckets on record yet; run three training "
                         "iterations first")
    parameters = [(n, p) for n, p in module.module.named_parameters() if p.requires_grad]
    specs = [GradientSpec(name, tuple(p.shape), p.dtype, p.dtype, p.device, dim_order(p.shape, p.stride()))
             for name, p in parameters]
    plan = plan_buckets(specs, BucketConfig(layout="ddp"), dist.get_world_size(module.process_group),
                        module.process_group.group_name)
    return plan.regroup([[parameters[i][0] for i in bucket] for bucket in indices])
