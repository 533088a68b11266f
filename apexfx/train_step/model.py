"""The model of a training step: what is done to it, for the time of a call, so that Dynamo can trace it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch import (
    called_while_traced,
    forward_hooks,
    global_module_hooks,
    has_backward_hooks,
    saves_by_hooks,
    under_fully_shard,
)
from ..compiler.buffers_put_back import left_as_it_was
from ..compiler.dynamo_batch_norm import traceable_batch_norm
from ..compiler.traceable import TraceableClasses, all_modules, path_of
from ..config import HALVES, TransformConfig
from ..graph.printing import count_text, first_names
from ..precision.call_casts import Cast, CastCall
from ..precision.half_model import keeps_float32
from ..report.data import Report
from .capture_errors import NotOneGraph
from .objective import ObjectiveModules

if TYPE_CHECKING:
    from .options import StepOptions
    from .sharded import ShardedModel

log = logging.getLogger(__name__)

_HALF_INPUTS = "apexfx_half_inputs"  # the name of two hooks


class StepModel:
    """Runs the user's own modules, those of a call that Dynamo could not trace by other classes.

    Args:
        model: the user's.
        objective_modules: those of a loss, which are looked through as well.
        group: over which all batch norms of the model are synchronized, or None where only `torch.nn.SyncBatchNorm` are.
        half: what inputs of the model are cast to before its forward, or None.
        report: where what a batch norm does is noted.
        sharded: the model where it is under `fully_shard`.

    Attributes:
        model, objective_modules: as given.
        classes: of their modules.
    """

    def __init__(self, model: nn.Module, objective_modules: ObjectiveModules, group: dist.ProcessGroup | None,
                 half: torch.dtype | None, report: Report, sharded: ShardedModel | None = None) -> None:
        self.model, self.objective_modules, self._group, self._sharded = model, objective_modules, group, sharded
        cast = _CastInputs(half) if half is not None else None
        self._hooks = (cast.enter, cast.leave) if cast is not None else None
        self.classes = TraceableClasses(group, report)

    @contextlib.contextmanager
    def traceable(self, *, casts_inputs: bool = True, cached: bool = False) -> Iterator[nn.Module]:
        """Yield the model, which Dynamo can trace until the end of the context.

        Args:
            casts_inputs: False where what runs the model does that.
            cached: for graphs that were compiled before alone, whose guards see modules and the hooks of each.

        Raises:
            ValueError: as `check_modules`.
        """
        if global_module_hooks() or not cached and any(map(has_backward_hooks, all_modules(self.model))):
            check_modules(self.model, self._group)  # raises
        with contextlib.ExitStack() as stack:
            if self._sharded is not None:
                stack.enter_context(self._sharded.plain())
            if self._hooks is not None and casts_inputs:  # Dynamo evaluates the forward before any pass has put casts in
                stack.enter_context(forward_hooks(self.model, _HALF_INPUTS, *self._hooks))
            stack.enter_context(self.classes.in_place(self.model, self.objective_modules.children(), cached=cached))
            if not cached:
                stack.enter_context(_hooks_of_hugging_face())
            yield self.model

    def run_in_eager(self, objective: Callable[..., Any], batch: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Run an objective as it is, in float32 where the level has made the model half, for what it raises.

        Parameters, buffers and random numbers are afterwards as they were. A model that is sharded would wait for other ranks:
        it does not run, and False is returned.
        """
        if self._sharded is not None:
            return False
        halves = [(p, p.data) for p in self.model.parameters() if self._hooks is not None and p.dtype in HALVES]
        with left_as_it_was(self.model, *self.objective_modules.given), torch.enable_grad():
            try:
                for p, half in halves:
                    p.data = half.float()
                objective(self.model, *batch, **named)
            finally:
                for p, half in halves:
                    p.data = half
        return True


def _hooks_of_hugging_face() -> contextlib.AbstractContextManager[Any]:
    """Have Dynamo call, and not trace, what models of transformers (5) put hooks on their layers by, at the first call that asks
    for hidden states or router logits: it takes a lock, which no graph can.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if (install := getattr(capturing, "maybe_install_capturing_hooks", None)) is None:
        return contextlib.nullcontext()
    return called_while_traced(install)


def check_modules(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse what a graph of the whole step would do otherwise than eager.

    Args:
        model, group: as of `StepModel`.

    Raises:
        ValueError: a module has a backward hook, or all have a hook; the model itself is a batch norm that needs another class; a
            module casts by itself.
    """
    if any(hasattr(type(module), "apexfx_before_transform") for module in model.modules()):
        raise ValueError("apexfx: the model went through amp.initialize: leave it out, opt_level= of the step does it")
    if global_module_hooks():
        raise ValueError("apexfx: a hook is registered on all modules (torch.nn.modules.module.register_module_...), and a "
                         "training step as one graph would not always run it; register it on the modules of the model")
    if traceable_batch_norm(model, group) is not None:
        raise ValueError(f"apexfx: the model itself is a {type(model).__name__}; put it into a torch.nn.Sequential")
    for module in model.modules():
        if has_backward_hooks(module):
            raise ValueError(f"apexfx: {path_of(model, module)} has a backward hook, which a training step as one graph would "
                             "not run; remove it, or register a hook on a tensor in the forward")


def warn_of_eval_mode(model: nn.Module, report: Report) -> None:
    """Say that no module of a model is in training mode; guards of graphs see the modes that they depend on."""
    if not any(module.training for module in model.modules()):
        message = ("apexfx: the step trains a model in eval mode, as from_pretrained() returns one: dropout is off, and batch "
                   "norms use their running statistics and leave them as they are. Call model.train() before the step, and after "
                   "each evaluation, unless this is meant")
        report.note(message)
        log.warning("%s", message)


def warn_of_half_parameters(model: nn.Module, config: TransformConfig, report: Report) -> None:
    """Say that the level casts where a model has half parameters, which a loop computes with as they are."""
    level, half = config.level, config.half_dtype(p.device for p in model.parameters())
    halves = [name for name, p in model.named_parameters() if p.dtype in HALVES]
    floats = [name for path, module in model.named_modules() if not (level.keep_batchnorm_fp32 and keeps_float32(module))
              for name, p in module.named_parameters(path, recurse=False) if p.dtype == torch.float32]
    if not halves or level.cast_model and not floats or "precision" in config.skip:
        return
    what = f"casts the float32 ones ({first_names(floats, 2)}) to {half}{', in place' if level.half_parameters else ''}" \
        if level.cast_model else "computes op by op in half or float32" if level.patch_ops else "computes with them in float32"
    report.warn(f"apexfx: the model has {count_text(len(halves), 'half parameter')} ({first_names(halves, 2)}), and "
                f"{config.opt_level} {what}. A loop computes in the dtypes that the model is written in; for that give "
                "opt_level='O0', skip=('precision',)")


def check_contexts() -> None:
    """Refuse a call in a context that looks at a backward, of which a graph has none."""
    # Without check_nan, torch itself may have it on: for the lines of ops, while another thread captures a graph.
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        reason = "torch.autograd.set_detect_anomaly(True) looks at the values of each gradient"
        raise NotOneGraph(f"apexfx: {reason}, which a training step as one graph does not stop for; leave it out, pass "
                          "fallback='transform', where it sees the model's backward as one function, or look for the op in "
                          "eager torch", reason)
    if saves_by_hooks():
        reason = "torch.autograd.graph.saved_tensors_hooks (save_on_cpu, too) changes what a backward reads"
        raise NotOneGraph(f"apexfx: {reason}, and a training step as one graph keeps nothing for one; leave it out "
                          "(memory_budget= has a step keep less), or pass fallback='transform'", reason)


def check_traceable(model: nn.Module, options: StepOptions) -> None:
    """Refuse to run a step on copies, on one rank, where what that holds is a part of what the ranks hold.

    Raises:
        ValueError: the model is under `fully_shard`, or the update is sharded.
    """
    if (sharded := under_fully_shard([model])) or options.shard:
        what = "of a model under fully_shard()" if sharded else "with shard="
        raise ValueError(f"apexfx: a step {what} is run by no rank alone, as compare(), check_loop(), check_splits(), record() "
                         f"and a search for what is not finite do; make a step without {what.split()[-1]}")


class _CastInputs:
    """Hooks that cast a model's inputs, as Apex patches forward, and refuse what would write into their copies."""

    def __init__(self, half: torch.dtype) -> None:
        self._cast = Cast(half, only=(torch.float32, *HALVES))
        self._calls: list[CastCall] = []  # under way

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call = CastCall(args, kwargs, self._cast)
        self._calls.append(call)
        return call.args, call.kwargs

    def leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._calls.pop().check()
