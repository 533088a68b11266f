"""The bucket plan: which gradients travel together, in which order, in which bytes. Data: print, save, edit, replay.

A plan is a pure function of the parameters' names, shapes, dtypes and devices in the order of their first use, never of
one rank's graph: a peer may hold a recompile for another batch size, or no graph at all but a cache hit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from ..config import BucketConfig
from . import ddp

FORMAT_VERSION = 1
ALIGNMENT_BYTES = 16  # of every slot: what vectorized multi-tensor kernels load at once
LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class GradientSpec:
    """What a plan knows of one gradient.

    Attributes:
        name: the parameter's.
        shape: the parameter's.
        dtype: of the gradient as it would enter the buffer: before an upcast that the graph may hold.
        output_dtype: of the gradient as it leaves the graph: the parameter's.
        device: the gradient's.
        dim_order: dimensions from outermost to innermost in memory, None where that is the plain order.
        shared_with: further parameters whose gradient is this very node; reduced once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    output_dtype: torch.dtype
    device: torch.device
    dim_order: tuple[int, ...] | None = None
    shared_with: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """One gradient's place in a bucket; `offset_bytes` counts in the reduced buffer. The rest as in `GradientSpec`."""

    parameter: str
    shape: tuple[int, ...]
    offset_bytes: int
    dim_order: tuple[int, ...] | None = None
    shared_with: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """One allreduce.

    Attributes:
        slots: the gradients, in buffer order; the gaps between them are zeros.
        dtype, reduce_dtype, output_dtype: of the gradients as they come, of the buffer on the wire, of what leaves.
        device: "cpu", "cuda", ...: no index, since every rank has its own.
        total_bytes: length of the buffer on the wire.
        predivide, postdivide: divisors before and after the sum.
        start: "ready": reduce when the last gradient is there; "end": after all of backward.
        start_after, wait_before: the nodes around the communication in the graph this plan was last used on.
        window_flops: of the matrix products between start and wait; None before a graph was seen.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype
    device: str
    total_bytes: int
    predivide: float = 1.0
    postdivide: float = 1.0
    start: str = "ready"
    start_after: str | None = None
    wait_before: str | None = None
    window_flops: int | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(slot.parameter for slot in self.slots)

    @property
    def numel(self) -> int:
        """Elements on the wire, padding included."""
        return self.total_bytes // self.reduce_dtype.itemsize

    def padding(self) -> list[int]:
        """Return the zeros, in elements, that follow each slot."""
        ends = [slot.offset_bytes for slot in self.slots[1:]] + [self.total_bytes]
        itemsize = self.reduce_dtype.itemsize
        return [end // itemsize - slot.offset_bytes // itemsize - slot.numel for slot, end in zip(self.slots, ends)]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one backward graph, in the order in which every rank issues them.

    Attributes:
        buckets: in order.
        world_size: ranks the divisors were made for.
        layout: "reverse", "ddp" or "edited".
        group_name: the process group's.
    """

    buckets: tuple[Bucket, ...]
    world_size: int
    layout: str = "reverse"
    group_name: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters, in buffer order, without those that share another's gradient."""
        return tuple(name for bucket in self.buckets for name in bucket.parameters)

    @property
    def total_bytes(self) -> int:
        """Bytes a rank contributes each step."""
        return sum(bucket.total_bytes for bucket in self.buckets)

    def check(self, specs: Sequence[GradientSpec], *, world_size: int | None = None) -> None:
        """Raise `ValueError` naming the first parameter for which this plan was not made.

        Args:
            specs: the gradients of the graph at hand.
            world_size: of the group at hand.
        """
        if world_size is not None and world_size != self.world_size:
            raise ValueError(f"apexfx: the bucket plan divides for {self.world_size} ranks and the group has {world_size}; "
                             "use plan.for_world_size(...) or leave BucketConfig(plan=) out")
        planned = {slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        advice = "make a new plan by leaving BucketConfig(plan=) out once"
        for spec in specs:
            if spec.name not in planned:
                raise ValueError(f"apexfx: the model has parameter {spec.name!r} ({_describe(spec)}), which the bucket plan "
                                 f"does not hold; {advice}")
            bucket, slot = planned.pop(spec.name)
            expected = dataclasses.replace(spec, shape=slot.shape, dtype=bucket.dtype, output_dtype=bucket.output_dtype)
            if expected != spec or bucket.device != spec.device.type:
                raise ValueError(f"apexfx: parameter {spec.name!r} was given as {_describe(spec)} on {spec.device.type}, the "
                                 f"bucket plan expects {_describe(expected)} on {bucket.device}; {advice}")
        if planned:
            name = next(iter(planned))
            raise ValueError(f"apexfx: the bucket plan holds parameter {name!r}, which the model was expected to have and "
                             f"has not (or has no gradient for); {advice}")

    def signature(self) -> list[dict[str, Any]]:
        """Return the ordered collectives as JSON-able values: what every rank must agree on."""
        return [{
            "op": "all_reduce", "reduce": "sum", "bytes": bucket.total_bytes, "dtype": _name(bucket.reduce_dtype),
            "group": self.group_name, "divide": [bucket.predivide, bucket.postdivide],
            "parameters": list(bucket.parameters),
            "layout": [[slot.offset_bytes, list(slot.dim_order) if slot.dim_order else None] for slot in bucket.slots],
        } for bucket in self.buckets]

    def regroup(self, groups: Sequence[Sequence[str]]) -> BucketPlan:
        """Return this plan with other buckets: one for each list of parameter names, in this order.

        Raises:
            ValueError: a name that is missing, unknown or given twice, or a bucket of mixed dtypes.
        """
        given = [name for group in groups for name in group]
        if sorted(given) != sorted(self.parameters):
            odd = sorted(set(given) ^ set(self.parameters)) or sorted({n for n in given if given.count(n) > 1})
            raise ValueError(f"apexfx: regroup() expects every parameter of the plan once; see {odd[0]!r}")
        home = {slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        packed = not any(padding for bucket in self.buckets for padding in bucket.padding())
        buckets = []
        for group in filter(None, groups):
            first = home[group[0]][0]
            for name in group:
                if _kind(home[name][0]) != _kind(first):
                    raise ValueError(f"apexfx: {name!r} and {group[0]!r} differ in dtype, divisor or device and cannot share "
                                     "a bucket")
            slots = [home[name][1] for name in group]
            buckets.append(dataclasses.replace(first, start_after=None, wait_before=None, window_flops=None,
                                               **_lay_out(slots, first, packed=packed)))
        return dataclasses.replace(self, buckets=tuple(buckets), layout="edited")

    def located(self, rows: Sequence[dict[str, Any]]) -> BucketPlan:
        """Return this plan with where its communication lies in a graph, as `schedule.windows.windows` found it."""
        found = {row["bucket"]: row for row in rows}
        return dataclasses.replace(self, buckets=tuple(
            dataclasses.replace(bucket, start_after=found[index]["start_after"], wait_before=found[index]["wait_before"],
                                window_flops=found[index]["flops"]) if index in found else bucket
            for index, bucket in enumerate(self.buckets)))

    def for_world_size(self, world_size: int) -> BucketPlan:
        """Return this plan with its divisors made for another number of ranks."""
        def rescaled(bucket: Bucket) -> Bucket:
            if bucket.postdivide != 1.0:
                return dataclasses.replace(bucket, postdivide=bucket.postdivide * world_size / self.world_size)
            averages = bucket.predivide == self.world_size
            return dataclasses.replace(bucket, predivide=float(world_size)) if averages else bucket

        return dataclasses.replace(self, buckets=tuple(map(rescaled, self.buckets)), world_size=world_size)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-able values; `from_json` reads them back."""
        return {"version": FORMAT_VERSION, "layout": self.layout, "world_size": self.world_size, "group": self.group_name,
                "buckets": [_to_json(bucket) for bucket in self.buckets]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BucketPlan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: another version, a missing field, slots that overlap.
        """
        if not isinstance(data, dict) or data.get("version") != FORMAT_VERSION:
            given = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"apexfx: a bucket plan of version {given!r} was given, expected {FORMAT_VERSION}")
        try:
            buckets = tuple(map(_from_json, data["buckets"]))
            plan = cls(buckets, data["world_size"], data["layout"], data["group"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"apexfx: malformed bucket plan ({type(error).__name__}: {error}); "
                             "see BucketPlan.to_json() for the fields") from error
        for index, bucket in enumerate(buckets):
            _check_layout(index, bucket)
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, one value a line so that it can be edited by hand."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> BucketPlan:
        """Read a plan that `save` wrote."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"apexfx: {path} is not JSON: {error}") from error

    def __str__(self) -> str:
        rows = [(index, _fold(bucket.parameters), len(bucket.slots), _dtypes(bucket), f"{bucket.total_bytes / 2**20:.3f}",
                 f"{bucket.predivide:g} / {bucket.postdivide:g}", bucket.start_after or bucket.start,
                 bucket.wait_before or "-", f"{bucket.window_flops / 1e6:.1f}" if bucket.window_flops is not None else "-")
                for index, bucket in enumerate(self.buckets)]
        headers = ("bucket", "parameters", "n", "dtype", "MiB", "divide pre / post", "start after", "wait before",
                   "window MFLOP")
        title = (f"bucket plan: {len(self.buckets)} allreduces, {self.total_bytes / 2**20:.3f} MiB, "
                 f"{self.world_size} ranks, layout {self.layout!r}\n")
        return title + tabulate(rows, headers=headers, disable_numparse=True)


def plan_buckets(specs: Sequence[GradientSpec], config: BucketConfig, world_size: int, group_name: str = "") -> BucketPlan:
    """Group gradients into buckets. A pure function, so that every rank derives the same plan alone.

    Args:
        specs: in the order of the parameters' first use in forward; buckets fill in reverse, as backward does.
        config: see `BucketConfig`; its `plan` is not looked at here.
        world_size: ranks in the group.
    """
    if config.layout == "ddp":
        if config.delay_allreduce or config.trigger_params:
            raise ValueError("apexfx: layout='ddp' closes buckets where torch DDP does; delay_allreduce and trigger_params "
                             "need layout='reverse'")
        groups = ddp.group(specs, config.bucket_cap_mb)
    else:
        groups = _group_in_reverse(specs, config)
    averaging = world_size if config.gradient_average else 1.0
    if config.layout == "ddp" and config.gradient_predivide_factor == 1.0:
        predivide, postdivide = float(averaging), 1.0  # DDP divides while it fills the buffer
    else:
        predivide = float(config.gradient_predivide_factor)
        postdivide = world_size / predivide if config.gradient_average else 1.0
    buckets = []
    for members in groups:
        first = members[0]
        bucket = Bucket((), first.dtype, _reduce_dtype(first, config), first.output_dtype, first.device.type, 0,
                        predivide, postdivide, "end" if config.delay_allreduce else "ready")
        slots = [Slot(s.name, s.shape, 0, s.dim_order, s.shared_with) for s in members]
        buckets.append(dataclasses.replace(bucket, **_lay_out(slots, bucket, packed=config.layout == "ddp")))
    return BucketPlan(tuple(buckets), world_size, config.layout, group_name)


def _group_in_reverse(specs: Sequence[GradientSpec], config: BucketConfig) -> list[list[GradientSpec]]:
    filling: dict[Any, list[GradientSpec]] = {}
    closed = []
    for spec in reversed(specs):
        key = (spec.dtype, spec.output_dtype, spec.device)
        members = filling.setdefault(key, [])
        members.append(spec)
        if config.trigger_params:
            full = not set(config.trigger_params).isdisjoint((spec.name, *spec.shared_with))
        else:
            full = not config.delay_allreduce and sum(m.numel for m in members) >= config.message_size
        if full:
            closed.append(filling.pop(key))
    return closed + list(filling.values())


def _reduce_dtype(spec: GradientSpec, config: BucketConfig) -> torch.dtype:
    if not spec.dtype.is_floating_point:
        return spec.dtype  # a complex gradient has no half form on the wire
    if config.comm_dtype is not None:
        return config.comm_dtype
    return torch.float32 if config.allreduce_always_fp32 and spec.dtype in LOW_PRECISION else spec.dtype


def _lay_out(slots: Iterable[Slot], bucket: Bucket, *, packed: bool) -> dict[str, Any]:
    # Aligned in the buffer on the wire and in the one that leaves, whose elements may be wider or narrower.
    itemsize = bucket.reduce_dtype.itemsize
    step = 1 if packed else max(1, ALIGNMENT_BYTES // min(itemsize, bucket.output_dtype.itemsize))
    placed, end = [], 0
    for slot in slots:
        placed.append(dataclasses.replace(slot, offset_bytes=end * itemsize))
        end += -(-slot.numel // step) * step
    return {"slots": tuple(placed), "total_bytes": end * itemsize}


def _check_layout(index: int, bucket: Bucket) -> None:
    for name in ("predivide", "postdivide"):
        if not getattr(bucket, name) > 0:
            raise ValueError(f"apexfx: bucket {index} of the plan has {name}={getattr(bucket, name)!r}, expected a positive "
                             "number")
    if bucket.start not in ("ready", "end"):
        raise ValueError(f"apexfx: bucket {index} of the plan has start={bucket.start!r}, expected 'ready' or 'end'")
    for slot, padding in zip(bucket.slots, bucket.padding()):
        if padding < 0 or slot.offset_bytes % bucket.reduce_dtype.itemsize or bucket.slots[0].offset_bytes:
            raise ValueError(f"apexfx: bucket {index} of the plan has no room for {slot.parameter!r} at offset_bytes="
                             f"{slot.offset_bytes}; slots must follow each other from 0 to total_bytes={bucket.total_bytes}")


def _kind(bucket: Bucket) -> Any:
    return (bucket.dtype, bucket.reduce_dtype, bucket.output_dtype, bucket.device, bucket.predivide, bucket.postdivide,
            bucket.start)


def _to_json(bucket: Bucket) -> dict[str, Any]:
    row = {f.name: getattr(bucket, f.name) for f in dataclasses.fields(bucket)}
    row |= {name: _name(row[name]) for name in ("dtype", "reduce_dtype", "output_dtype")}
    return row | {"slots": [dataclasses.asdict(slot) for slot in bucket.slots]}


def _from_json(row: dict[str, Any]) -> Bucket:
    dtypes = {name: getattr(torch, row[name]) for name in ("dtype", "reduce_dtype", "output_dtype")}
    slots = tuple(Slot(s["parameter"], tuple(s["shape"]), s["offset_bytes"],
                       tuple(s["dim_order"]) if s.get("dim_order") else None, tuple(s.get("shared_with", ())))
                  for s in row["slots"])
    return Bucket(**(row | dtypes | {"slots": slots}))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(bucket: Bucket) -> str:
    path = [_name(bucket.dtype), _name(bucket.reduce_dtype), _name(bucket.output_dtype)]
    return " > ".join(name for i, name in enumerate(path) if i == 0 or name != path[i - 1])


def _describe(spec: GradientSpec) -> str:
    return f"{_name(spec.dtype)}{list(spec.shape)} giving {_name(spec.output_dtype)}"


def _fold(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]}"
