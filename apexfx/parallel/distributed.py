"""DistributedDataParallel: Apex's wrapper, around torch's, or around the graphs of a transformed module."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import resolve_process_group, tree_map
from ..backend import compiler_for
from ..compiler.model_setup import set_up
from ..compiler.transformed import get_compiled
from ..config import BucketConfig
from ..distributed.agreement import Agreement
from ..distributed.broadcast import broadcast_from_first
from ..ranks import has_group
from ..train_step.replicas import check_replicas
from ..transform import TransformedModule, make_transformed, source_of
from .arguments import check_arguments, names_of
from .averaging import AveragingOptions, EagerAveraging
from .flat import apply_flat_dist_call as apply_flat_dist_call
from .flat import extract_tensors as extract_tensors
from .flat import flat_dist_call as flat_dist_call
from .flat import flatten as flatten
from .flat import split_by_type as split_by_type
from .flat import split_half_float_double as split_half_float_double
from .flat import unflatten as unflatten
from .reducer import Reducer as Reducer

_BUFFER_POLICIES = ("start", True, False)
_NOT_COPIED = ("process_group", "_averaging", "_agreement")


class DistributedDataParallel(nn.Module):
    """Average the gradients of `module` over the ranks during backward.

    On a module that `transform()` made, the allreduces become nodes of its backward graphs. On any other, torch's
    DistributedDataParallel averages, see `averaging.py`. Parameters are copied from rank 0 at the start; a rank with another
    model raises on every rank.

    Apex's arguments:
        module: the model; `state_dict()` keys carry "module." in front.
        message_size: elements at which a bucket is closed; None: 10,000,000 as in Apex, or less for a small model, see
            `BucketConfig`.
        delay_allreduce: one allreduce a dtype at the end of backward, whatever `message_size` is, of the gradients that any rank
            has.
        shared_param: must be None, as in Apex.
        allreduce_trigger_params: parameters whose gradient closes a bucket, instead of `message_size`.
        retain_allreduce_buffers: gradients become views of the reduced buffers, which are kept in `allreduce_buffers`.
        allreduce_always_fp32: reduce half gradients in float32.
        num_allreduce_streams: ignored: NCCL has a stream of its own, and what is averaged is the same.
        allreduce_communicators: must be None; `process_group` is the communicator.
        gradient_average: False leaves the sum.
        gradient_predivide_factor: divide by it before the sum, and by world size / it after.
        gradient_average_split_factor: ignored, as in Apex.
        prof: ignored: torch's profiler shows each allreduce.

    Further arguments:
        device_ids, output_device: as torch's; at most one device, to which inputs are moved.
        process_group: default all ranks.
        broadcast_buffers: "start": buffers are copied from rank 0 once; True: before every training forward too, as
            torch does; False: never, as Apex does.
        find_unused_parameters, static_graph: as torch's; with the first, averages are made after the backward. Without them a
            parameter has a gradient in every backward, as in the first, or in none.
        comm_dtype: reduce in this dtype.
        layout, bucket_cap_mb, plan, timeout_s: see `BucketConfig`. layout="ddp" gives torch DDP's gradients, bitwise; a plan
            is for a transformed module.
        check_parameters_every: every so many training forwards, one small allreduce checks that all ranks still hold
            the same parameters; 0 never.

    Raises:
        ValueError, TypeError: arguments that contradict each other or do not fit the module.
        RankMismatchError: ranks hold different models.
        UnsynchronizedGradientError: in backward, on this rank: a gradient that is not averaged.
    """

    averages_gradients = True

    def __init__(
        self,
        module: nn.Module,
        message_size: int | None = None,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Sequence[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        *,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool | str = "start",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        comm_dtype: torch.dtype | None = None,
        layout: str = "reverse",
        bucket_cap_mb: float = 25.0,
        plan: Any = None,
        timeout_s: float | None = None,
        check_parameters_every: int = 0,
    ) -> None:
        super().__init__()
        check_arguments(locals(), _BUFFER_POLICIES)
        config = BucketConfig(
            message_size=message_size, layout=layout, bucket_cap_mb=bucket_cap_mb, delay_allreduce=delay_allreduce,
            trigger_params=names_of(module, allreduce_trigger_params), allreduce_always_fp32=allreduce_always_fp32,
            gradient_average=gradient_average, gradient_predivide_factor=gradient_predivide_factor, comm_dtype=comm_dtype,
            plan=plan, timeout_s=timeout_s,
        )
        self.config = config
        self.process_group = process_group or dist.group.WORLD
        self.device_ids = [torch.device(d) if not isinstance(d, int) else torch.device("cuda", d) for d in device_ids or ()]
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.check_parameters_every = check_parameters_every
        self.in_graph = isinstance(module, TransformedModule)
        self._num_forwards = 0
        self._averaging: EagerAveraging | None = None
        if self.in_graph:
            self.module = data_parallel_copy(module, config, self.process_group, broadcast_buffers=bool(broadcast_buffers))
            return
        if plan is not None:
            raise ValueError("apexfx: plan= is replayed by graphs alone; wrap apexfx.transform(module), or leave it out")
        self.module = module
        self._start()
        self._agreement.ensure("options of DistributedDataParallel", [self._describe()])
        self._agreement.ensure_model([*module.named_parameters(), *module.named_buffers()])
        broadcast_from_first(module.parameters(), self.process_group)
        if broadcast_buffers:
            broadcast_from_first(module.buffers(), self.process_group)

    def _start(self) -> None:
        """Make what lives on this process: what averages, and its agreement with the other ranks."""
        self._agreement = Agreement(self.process_group, self.config.timeout_s)
        options = AveragingOptions(self.retain_allreduce_buffers, self.find_unused_parameters, self.static_graph)
        self._averaging = EagerAveraging(self.module, self.process_group, self.config, options)

    def _describe(self) -> dict[str, Any]:
        fields = {f.name: str(getattr(self.config, f.name)) for f in dataclasses.fields(self.config)}
        return fields | {"find_unused": self.find_unused_parameters, "static": self.static_graph,
                         "buffers": self.broadcast_buffers, "check_every": self.check_parameters_every}

    # ---- running -------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; in training, prepare for any number of backwards."""
        if self.device_ids:
            device = self.device_ids[0]
            inputs, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (inputs, kwargs))
        trains = torch.is_grad_enabled() and self.training
        if trains and self._synchronizer.enabled:
            self._synchronize_state()
        if self.in_graph or not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        return self._live_averaging().forward(inputs, kwargs)

    def _synchronize_state(self) -> None:
        if self.broadcast_buffers is True:
            broadcast_from_first(self.module.buffers(), self.process_group)
        if self.check_parameters_every:
            self._check_parameters()

    @torch.compiler.disable  # of each number it would make another graph
    def _check_parameters(self) -> None:
        self._num_forwards += 1
        if self._num_forwards % self.check_parameters_every == 0:
            check_replicas(self.module, self.process_group)

    @property
    def _synchronizer(self) -> Any:
        """What averages gradients while it is `enabled`: the eager form, or the graphs' `GradientSync`."""
        return get_compiled(self.module).compiler.gradient_sync if self.in_graph else self._live_averaging()

    def _live_averaging(self) -> EagerAveraging:
        """Return what averages; a copy gets its own here, when it first trains, and so may be made on one rank alone."""
        if self._averaging is None:
            if self.process_group is None:
                raise RuntimeError("apexfx: this DistributedDataParallel was loaded without a process group; wrap its .module "
                                   "anew after torch.distributed.init_process_group(), or use .module for inference")
            self._start()
        return self._averaging

    # ---- accumulation --------------------------------------------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards in the block stay local; the first one after it averages what has accumulated. On every rank, or on none."""
        return self._synchronizer.no_sync()

    def disable_allreduce(self) -> None:
        """Keep gradients local until `enable_allreduce()`."""
        self._synchronizer.enabled = False

    def enable_allreduce(self) -> None:
        """Average gradients again, those accumulated meanwhile included."""
        self._synchronizer.enabled = True

    # ---- inspection ----------------------------------------------------------------------------------------------------

    @property
    def bucket_plan(self) -> Any:
        """The buckets of a transformed module: print, save, edit, replay with `plan=`; None where torch's DDP has them."""
        return get_compiled(self.module).report.buckets() if self.in_graph else None

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """With `retain_allreduce_buffers`, the reduced buffers of the last backward."""
        return [buffer for _, buffer in sorted(self._averaging.buffers.items())] if self._averaging is not None else []

    # ---- copies --------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in _NOT_COPIED}
        return {**state, "_group_name": self.process_group.group_name if self.process_group is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name = state.pop("_group_name")
        super().__setstate__(state)
        known = name is not None and has_group()
        self.process_group, self._averaging = resolve_process_group(name) if known else None, None


def data_parallel_copy(
    module: nn.Module, buckets: BucketConfig, process_group: dist.ProcessGroup, *, broadcast_buffers: bool
) -> nn.Module:
    """Return a module on the parameters and submodules of `module`, transformed with its options and `ddp=buckets`.

    `module` itself is to be left alone from now on: a backward through it raises `UnsynchronizedGradientError`.
    """
    compiled = get_compiled(module)
    config = dataclasses.replace(compiled.config, ddp=buckets, process_group=process_group)
    compiler = compiler_for(config)
    set_up(module, config, compiler.groups, compiler.agreement, broadcast_buffers=broadcast_buffers)
    return make_transformed(source_of(module), config, compiler)
