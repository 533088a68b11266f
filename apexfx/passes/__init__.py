"""The passes, one a file, and the ordered table that turns a config into a schedule."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..config import TransformConfig
from ..graph.inputs import Placeholder
from ..precision.policy import Policy
from .base import Pass, validate
from .bucket_allreduce import BucketAllreduce
from .cancel_casts import CancelCasts
from .channels_last import ChannelsLast
from .fuse_batchnorm import FuseBatchnorm
from .gather_shards import GatherShards, ShardGroup
from .gather_updated import GatherUpdated
from .outline_layers import OutlineLayers
from .precision import Precision
from .recompute import Recompute
from .scatter_gradients import ScatterGradients
from .schedule_comm import ScheduleComm
from .schedule_shards import ScheduleShards
from .skip_writes import SkipWrites
from .sync_batchnorm import SyncBatchnorm
from .unscale_clip_update import UnscaleClipUpdate
from .update_early import UpdateEarly


@dataclass(frozen=True)
class Context:
    """What a schedule depends on besides the options: the captured graph's inputs and the process groups.

    Attributes:
        placeholders: the inputs of the captured graph.
        gradients: the group that gradients are averaged over, or None.
        batch_norm: the group that batch norm statistics are summed over, or None.
        reduce_gradients: False in the variant for local gradient accumulation.
        is_train_step: the graph is that of a whole training step.
        memory_budget: bytes alive at once in that graph that are enough, or None.
        left_out: bytes of the optimizer's state, alive as well, that the graph does not take.
        safeguard: a step that is skipped changes nothing at all.
        shards: the parameters that are rows, as they are gathered.
        sharded_sums: the places of what accumulates their gradients.
        sharded_over: the group that these are sharded over, or None.
        shard: where each rank updates its rows of the parameters "optimizer", or "gradients" where each call reduces its
            gradients to rows, too; None where each updates all.
        cast_by_policy: whether `fully_shard` was told in which dtypes to compute.
        has_backward: False of a graph that applies gradients which other graphs have computed.
        waits: whether the ranks compare what the graph communicates while it runs, and it waits for that.
    """

    placeholders: Sequence[Placeholder]
    gradients: dist.ProcessGroup | None
    batch_norm: dist.ProcessGroup | None
    reduce_gradients: bool
    is_train_step: bool = False
    memory_budget: int | None = None
    left_out: int = 0
    safeguard: bool = False
    shards: Sequence[ShardGroup] = ()
    sharded_sums: Sequence[int] = ()
    sharded_over: dist.ProcessGroup | None = None
    shard: str | None = None
    cast_by_policy: bool = False
    has_backward: bool = True
    waits: bool = False

    @property
    def devices(self) -> list[torch.device]:
        """Where the parameters are, in order; without any, where the inputs are."""
        tensors = [p for p in self.placeholders if p.device is not None]
        return [p.device for p in tensors if p.kind == "param"] or [p.device for p in tensors]


@dataclass(frozen=True)
class Row:
    """One built-in pass.

    Attributes:
        pass_type: its class.
        option: what asks for it.
        build: makes it; returns None when it was not asked for.
        needed: why a training step cannot do without it, for the error; "" where it can.
    """

    pass_type: type[Pass]
    option: str
    build: Callable[[TransformConfig, Context], Pass | None]
    needed: str = ""


def _sync_batchnorm(config: TransformConfig, context: Context) -> Pass | None:
    if not config.sync_bn or context.batch_norm is None:
        return None
    return SyncBatchnorm(group_name=context.batch_norm.group_name)


def _reduction(pass_type: type[BucketAllreduce], config: TransformConfig, context: Context) -> Pass | None:
    wanted = ScatterGradients if context.shard else BucketAllreduce
    reduces = context.reduce_gradients or context.shard == "gradients"
    if config.buckets is None or context.gradients is None or not reduces or pass_type is not wanted:
        return None
    decomposes = {"decompositions": _inductor_decompositions} if wanted is ScatterGradients and config.inner == "inductor" else {}
    return pass_type(placeholders=context.placeholders, config=config.buckets, group_name=context.gradients.group_name,
                     world_size=dist.get_world_size(context.gradients), waits=context.waits, **decomposes)


def _gather_updated(config: TransformConfig, context: Context) -> Pass | None:
    if context.shard is None or context.gradients is None or not context.reduce_gradients:
        return None
    return GatherUpdated(group_name=context.gradients.group_name, world_size=dist.get_world_size(context.gradients))


def _gather_shards(config: TransformConfig, context: Context) -> Pass | None:
    if context.sharded_over is None:
        return None
    return GatherShards(placeholders=context.placeholders, shards=context.shards, group_name=context.sharded_over.group_name,
                        world_size=dist.get_world_size(context.sharded_over), sums=context.sharded_sums)


def _schedule_shards(config: TransformConfig, context: Context) -> Pass | None:
    if context.sharded_over is None:
        return None
    return ScheduleShards(placeholders=context.placeholders, shards=context.shards, group_name=context.sharded_over.group_name)


def _recompute(config: TransformConfig, context: Context) -> Pass | None:
    # Under "eager" every op that is computed again is a kernel of its own.
    if not context.is_train_step or config.inner == "eager" and context.memory_budget is None:
        return None
    budget = context.memory_budget
    return Recompute(placeholders=context.placeholders, budget=budget and max(0, budget - context.left_out))


def _unscale_clip_update(config: TransformConfig, context: Context) -> Pass | None:
    if not context.is_train_step:
        return None
    return UnscaleClipUpdate(_inductor_decompositions) if config.inner == "inductor" else UnscaleClipUpdate()


def _outline_layers(config: TransformConfig, context: Context) -> Pass | None:
    if config.inner != "inductor":
        return None
    from .._torch_compilers import inductor_config

    in_cpp = config.inner_options.get("cpp_wrapper", inductor_config.cpp_wrapper)  # which calls no subgraph in torch 2.13
    return None if in_cpp else OutlineLayers()


def _inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    from .._torch_compilers import inductor_decompositions

    return inductor_decompositions()


_SHARED = "without which the ranks would not share an update; leave shard= out"

TABLE: tuple[Row, ...] = (
    Row(SyncBatchnorm, "sync_bn=True", _sync_batchnorm),
    Row(Precision, "opt_level=", lambda config, context: None if context.cast_by_policy else Precision(
        level=config.level, half_dtype=config.half_dtype(context.devices), overrides=config.precision)),
    Row(CancelCasts, "always", lambda config, context: CancelCasts()),
    # Under "eager" the graph stays what eager would run, bit for bit.
    Row(FuseBatchnorm, "inner=\"inductor\", where measured faster",
        lambda config, context: FuseBatchnorm() if config.inner == "inductor" else None),
    Row(GatherShards, "train_step() of a model under fully_shard()", _gather_shards,
        "without which each rank would train on its own rows alone; leave fully_shard() out"),
    Row(BucketAllreduce, "ddp=True", functools.partial(_reduction, BucketAllreduce),
        "without which each rank would train on its own gradients; leave ddp=True out"),
    Row(ScatterGradients, "train_step(), ddp=True, shard=", functools.partial(_reduction, ScatterGradients), _SHARED),
    Row(ScheduleComm, "ddp=True or sync_bn=True",
        lambda config, context: ScheduleComm() if context.gradients is not None or context.batch_norm is not None else None),
    Row(ScheduleShards, "train_step() of a model under fully_shard()", _schedule_shards),
    Row(ChannelsLast, "train_step(), inner=\"inductor\"",
        lambda config, context: ChannelsLast() if context.is_train_step and config.inner != "eager" else None),
    Row(UnscaleClipUpdate, "train_step()", _unscale_clip_update,
        "which updates the parameters; a training step without it would train nothing"),
    Row(SkipWrites, "train_step(), safeguard=", lambda config, context: SkipWrites() if context.safeguard else None,
        "without which safeguard= would keep what a skipped step has written; leave safeguard= out"),
    Row(UpdateEarly, "train_step() without clipping or a loss scale",
        lambda config, context: UpdateEarly() if context.is_train_step else None),
    Row(GatherUpdated, "train_step(), ddp=True, shard=", _gather_updated, _SHARED),
    Row(Recompute, "train_step(), inner=\"inductor\" or memory_budget=", _recompute),
    Row(OutlineLayers, "inner=\"inductor\", where layers are equal", _outline_layers),
)


def schedule(config: TransformConfig, context: Context) -> list[Pass]:
    """Return the passes for one graph in order: the table's, less `skip=`, then the user's `passes=`.

    Raises:
        ValueError: see `check_names`.
    """
    check_names(config, is_train_step=context.is_train_step)
    built = [row.build(config, context) for row in TABLE if row.pass_type.name not in config.skip
             and (context.has_backward or row.pass_type is UnscaleClipUpdate)]
    return [p for p in built if p is not None] + [p for p in config.passes if p.name not in config.skip
                                                  and (context.has_backward or p.stage == "step")]


def check_names(config: TransformConfig, *, is_train_step: bool = False) -> None:
    """Refuse passes of one name, names in `skip=` that no pass has, and what `precision=` cannot mean.

    Args:
        is_train_step: of a training step, the only one with passes of the stage "step".
    """
    built_in = [row.pass_type.name for row in TABLE]
    validate(config.passes, [row.pass_type for row in TABLE if row.pass_type.name not in config.skip])
    for place, pass_ in enumerate(config.passes):
        if pass_.name in built_in:
            raise ValueError(f"apexfx: {type(pass_).__name__} is named {pass_.name!r}, as a built-in pass is, and skip= would "
                             "leave out both; give it another name")
        if pass_.stage == "step" and not is_train_step:
            raise ValueError(f"apexfx: pass {pass_.name!r} has stage='step', which only the graph of apexfx.train_step() has")
        if pass_.stage == "code" and config.inner == "eager":
            raise ValueError(f"apexfx: pass {pass_.name!r} has stage='code', and inner='eager' makes no code; give it another "
                             "stage, or use inner='inductor'")
        if any(pass_.name == earlier.name for earlier in config.passes[:place]):
            raise ValueError(f"apexfx: two passes are named {pass_.name!r}, and skip= and reports go by names; give each a class "
                             "attribute `name` of its own")
    for row in TABLE if is_train_step else ():
        if row.needed and row.pass_type.name in config.skip:
            raise ValueError(f"apexfx: skip names {row.pass_type.name!r}, {row.needed}")
    known = built_in + [p.name for p in config.passes]
    for name in config.skip:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"apexfx: skip names {name!r}, which is no pass" + (f"; did you mean {near[0]!r}?" if near else ".")
                             + f" The passes are {', '.join(known)}")
    Policy(config.level, config.dtype or torch.bfloat16, config.precision)


def describe() -> list[dict[str, Any]]:
    """Return one row a built-in pass, in order: name, stage, numeric tier, what asks for it, summary."""
    return [
        {"pass": row.pass_type.name, "stage": row.pass_type.stage, "numeric": row.pass_type.numeric,
         "asked for by": row.option, "what it does": (row.pass_type.__doc__ or "").strip().splitlines()[0]}
        for row in TABLE
    ]
