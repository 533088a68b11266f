"""DistributedDataParallel: Apex's wrapper, on the bucket plan that the graph pass uses too."""

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
from ..compiler import compiled_model
from ..compiler.model_setup import set_up
from ..compiler.refusals import check_whole
from ..config import BucketConfig
from ..distributed.agreement import Agreement, Label
from ..distributed.broadcast import broadcast_from_first
from ..distributed.watchdog import watched
from ..transform import TransformedModule, make_transformed, source_class
from .arguments import check_arguments, communicators, names_of
from .bucket_assignment import BucketPlanner
from .checksum import check_parameters
from .flat import apply_flat_dist_call as apply_flat_dist_call
from .flat import extract_tensors as extract_tensors
from .flat import flat_dist_call as flat_dist_call
from .flat import flatten as flatten
from .flat import split_by_type as split_by_type
from .flat import split_half_float_double as split_half_float_double
from .flat import unflatten as unflatten
from .grad_bucket import CommHook
from .overlapped_reducer import OverlappedReducer, ReducerOptions
from .reducer import Reducer as Reducer

_BUFFER_POLICIES = ("start", True, False)
_NOT_COPIED = ("process_group", "communicators", "streams", "_reducer", "_agreement")


class DistributedDataParallel(nn.Module):
    """Average the gradients of `module` over the ranks during backward.

    On a module that `transform()` made, the allreduces become nodes of its backward graphs. On any other, gradient
    hooks launch the same buckets while backward runs. Parameters are copied from rank 0 at the start. A failure on one
    rank (another model, a skipped or failed backward, an unused parameter) raises on every rank; nothing hangs longer
    than `timeout_s`.

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
        num_allreduce_streams: buckets take turns on that many communicators (and, on CUDA, streams).
        allreduce_communicators: (process groups, CUDA streams or Nones) to take turns on, `num_allreduce_streams` of each.
        gradient_average: False leaves the sum.
        gradient_predivide_factor: divide by it before the sum, and by world size / it after.
        gradient_average_split_factor: ignored, as in Apex.
        prof: mark each bucket in the profiler.

    Further arguments:
        device_ids, output_device: as torch's; at most one device, to which inputs are moved.
        process_group: default all ranks.
        broadcast_buffers: "start": buffers are copied from rank 0 once; True: before every training forward too, as
            torch does; False: never, as Apex does.
        find_unused_parameters: a parameter without gradient on some rank counts as zero there. Without it a parameter
            has a gradient in every backward on every rank, or in none; anything else is an error on every rank.
        static_graph: every backward uses the same parameters equally often; the ranks compare notes after the first
            backward only. Allows reentrant activation checkpoints.
        comm_dtype: reduce in this dtype.
        layout, bucket_cap_mb, plan, timeout_s: see `BucketConfig`. layout="ddp" gives torch DDP's gradients, bitwise.
        check_parameters_every: every so many training forwards, one small allreduce checks that all ranks still hold
            the same parameters; 0 never.

    Raises:
        ValueError, TypeError: arguments that contradict each other or do not fit the module.
        RankMismatchError: ranks hold different models.
        RankFailureError: in backward, on every rank: see above.
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
        allreduce_communicators: tuple[Sequence[dist.ProcessGroup], Sequence[Any]] | None = None,
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
        timeout_s: float = 300.0,
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
        self.prof = prof
        self.in_graph = isinstance(module, TransformedModule)
        self._num_forwards = 0
        self.communicators: Sequence[dist.ProcessGroup] = [self.process_group]
        self.streams: Sequence[Any] = []
        if self.in_graph:
            self.module = data_parallel_copy(module, config, self.process_group, broadcast_buffers=bool(broadcast_buffers))
            self._reducer = None
            return
        self.module = module
        self._start()
        self._agreement.ensure("options of DistributedDataParallel", [self._describe()])
        self._agreement.ensure_model([*module.named_parameters(), *module.named_buffers()])
        self.communicators, self.streams = communicators(self.process_group, num_allreduce_streams, allreduce_communicators)
        self._reducer.options.groups, self._reducer.options.streams = self.communicators, self.streams
        broadcast_from_first(module.parameters(), self._state_group)
        if broadcast_buffers:
            broadcast_from_first(module.buffers(), self._state_group)
        self._reducer.use_parameters(self._active_key())

    def _start(self) -> None:
        """Make what lives on this process: the reducer and its agreement with the other ranks."""
        copied = self.__dict__.get("_label", "")
        label = self._label = str(Label(self.process_group, "copy" if copied else "ddp", of=copied))
        self._agreement = Agreement(self.process_group, label, self.config.timeout_s)
        find_unused, static = self.find_unused_parameters, self.static_graph
        planner = BucketPlanner(self.config, self.process_group, find_unused=find_unused, static=static)
        options = ReducerOptions(self.communicators, self.streams, self.retain_allreduce_buffers, self.prof)
        self._reducer = OverlappedReducer(planner, options, self._agreement, label, self._active_parameters)

    def _describe(self) -> dict[str, Any]:
        plan = self.config.plan
        fields = {f.name: str(getattr(self.config, f.name)) for f in dataclasses.fields(self.config) if f.name != "plan"}
        return fields | {"plan": str(plan) if plan is not None else None, "find_unused": self.find_unused_parameters,
                         "static": self.static_graph, "buffers": self.broadcast_buffers,
                         "check_every": self.check_parameters_every}

    def _active_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that take gradients now, by name: those with elements, for there is nothing else to average."""
        check_whole(self.module)
        return [(n, p) for n, p in self.module.named_parameters() if p.requires_grad and p.numel()]

    def _active_key(self) -> tuple[Any, ...]:
        """Return what changes when other parameters take gradients, or when one gets another dtype or device."""
        return tuple([(id(p), p.dtype, p.device) for p in self.module.parameters() if p.requires_grad])

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
        reducer = self._live_reducer()
        reducer.before_forward()
        reducer.use_parameters(self._active_key())
        outputs = self.module(*inputs, **kwargs)
        reducer.after_forward(outputs, counts=trains)
        return outputs

    @property
    def _state_group(self) -> dist.ProcessGroup:
        """What parameters and buffers are broadcast over."""
        return watched(self.process_group, "module state", self.config.timeout_s)

    def _synchronize_state(self) -> None:
        if self.broadcast_buffers is True:
            broadcast_from_first(self.module.buffers(), self._state_group)
        self._num_forwards += 1
        if self.check_parameters_every and self._num_forwards % self.check_parameters_every == 0:
            check_parameters(self.module, self._state_group)

    @property
    def _synchronizer(self) -> Any:
        """What averages gradients while it is `enabled`: the reducer, or the graphs' `GradientSync`."""
        return compiled_model.of(self.module).compiler.gradient_sync if self.in_graph else self._live_reducer()

    def _live_reducer(self) -> OverlappedReducer:
        """Return the reducer; a copy gets its own here, when it first trains, and so may be made on one rank alone."""
        if self._reducer is None:
            if self.process_group is None:
                raise RuntimeError("apexfx: this DistributedDataParallel was loaded without a process group; wrap its .module "
                                   "anew after torch.distributed.init_process_group(), or use .module for inference")
            self._start()
        return self._reducer

    # ---- accumulation --------------------------------------------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards in the block stay local; the first one after it averages the accumulated sum.

        Every rank runs backwards inside, as many as it likes, or none does; anything else raises in the first one after it.
        """
        return self._synchronizer.no_sync()

    def disable_allreduce(self) -> None:
        """Keep gradients local until `enable_allreduce()`."""
        self._synchronizer.enabled = False

    def enable_allreduce(self) -> None:
        """Average gradients again, those accumulated meanwhile included."""
        self._synchronizer.enabled = True

    # ---- inspection ----------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` reduce each bucket, as torch DDP does: it divides by itself and returns a future."""
        if self.in_graph:
            raise ValueError("apexfx: the allreduces of a transformed module are nodes of its graph, where no hook runs; use "
                             "comm_dtype=, or wrap the module that is not transformed")
        if not callable(hook):
            raise TypeError(f"apexfx: hook={hook!r} was given, expected a callable of (state, bucket)")
        contradicted = [name for name, value in (
            ("gradient_average=False", not self.config.gradient_average),
            ("gradient_predivide_factor", self.config.gradient_predivide_factor != 1.0),
            ("num_allreduce_streams", len(self.communicators) > 1),
        ) if value]
        if contradicted:
            raise ValueError(f"apexfx: a communication hook divides and communicates by itself, so {contradicted[0]} has no "
                             "effect beside it; leave that out, or do it in the hook")
        self._live_reducer().comm_hook = (state, hook)

    @property
    def bucket_plan(self) -> Any:
        """The buckets in use: print, save, edit, replay with `plan=`."""
        if self.in_graph:
            return compiled_model.of(self.module).report.buckets()
        assignment = self._reducer.assignment if self._reducer is not None else None
        return assignment.plan if assignment is not None else None

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """With `retain_allreduce_buffers`, the reduced buffers of the last backward."""
        return self._reducer.buffers if self._reducer is not None and self.retain_allreduce_buffers else []

    # ---- copies --------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in _NOT_COPIED}
        groups = [self.process_group, *self.communicators] if self.process_group is not None else []
        return {**state, "_group_names": [group.group_name for group in groups]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop("_group_names")
        super().__setstate__(state)
        self.process_group, self.communicators, self.streams, self._reducer = None, [], [], None
        if names and dist.is_available() and dist.is_initialized():
            self.process_group, *self.communicators = (resolve_process_group(name) for name in names)


def data_parallel_copy(
    module: nn.Module, buckets: BucketConfig, process_group: dist.ProcessGroup, *, broadcast_buffers: bool
) -> nn.Module:
    """Return a module on the parameters and submodules of `module`, transformed with its options and `ddp=buckets`.

    `module` itself is to be left alone from now on: a backward through it raises `UnsynchronizedGradientError`.
    """
    config = dataclasses.replace(compiled_model.of(module).config, ddp=buckets, process_group=process_group)
    compiler = compiler_for(config)
    set_up(module, config, compiler.groups, compiler.agreement, broadcast_buffers=broadcast_buffers)
    state = {name: value for name, value in module.__dict__.items() if name != "_apexfx"} | compiled_model.of(module).own_forward
    return make_transformed(source_class(module), state, config, compiler)
