"""Findings, of what a session saw and measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from ..._torch import BatchNorm, Compilation
from . import places
from .experiments import CompiledModule, merged
from .findings import Diagnosis, Finding, Saving
from .places import Place
from .plan import Plan
from .session import Session

_MANY_COMPILATIONS = 4  # steps in which one function is compiled: one, then dynamic shapes, evaluation
_DATA_SHARE = 0.25  # of a step
_SMALL_SHARE = 0.01  # of a step, which is not worth a line


def diagnosis(script: str, session: Session, plan: Plan) -> Diagnosis:
    """Return what a run of a script has shown."""
    ms_per_step, data_ms, optimizer_ms = session.typical_ms()
    findings, notes = [], []
    detectors = (_host_syncs, _parameter_loops, _graph_breaks, _not_compiled, _recompiles, _optimizers,
                 _unequal_means, _unaveraged_gradients, _data_parallel, _data_loading)
    for each in (finding for detector in detectors for finding in detector(session, plan)):
        (notes if isinstance(each, str) else findings).append(each)
    if not ms_per_step:
        notes.append(f"the script ended after {session.num_steps} steps, before one could be timed undisturbed")
    findings.sort(key=lambda each: (each.saving_ms is None, -(each.saving_ms or each.ms or 0.0)))
    return Diagnosis(script, str(session.device), session.num_ranks, session.num_steps, ms_per_step, data_ms, optimizer_ms,
                     findings, notes)


def _host_syncs(session: Session, plan: Plan) -> Iterator[Finding]:
    observer, waits = session.observer, session.device.type == "cuda"
    broken = {place for place, _ in plan.breaks}
    for place, uses in observer.reads.items() if observer is not None else ():
        if not observer.is_usual(uses) or place in broken:
            continue
        what = f"reads a value of the model to the host {_times(uses.count / observer.num_steps)} a step"
        ms = uses.ms / observer.num_steps
        yield Finding("host_sync", place, f"{what}, and waits for the device to compute it" if waits else
                      f"{what}: on a GPU, a wait for the device", "keep it a tensor, .detach(), and read it once in many steps",
                      ms, ms if waits else None,
                      f"up to; waits timed in {observer.num_steps} steps" if waits else "counted; the CPU waits for nothing")


def _parameter_loops(session: Session, plan: Plan) -> Iterator[Finding]:
    for span, lines in plan.loops.items():
        ms = sum(ops.uses.ms for ops in lines) / session.observer.num_steps
        place, count = Place(span[0], span[1]), len({key for ops in lines for key in ops.tensors})
        if (as_one := plan.foreach_ms.get(span)) is not None:
            yield Finding("ema_loop", place, f"averages {count} parameters one by one; one call for all takes {as_one:.2f} ms",
                          "torch._foreach_lerp_(averages, parameters, 1 - decay); AveragedModel(model, multi_avg_fn="
                          "get_ema_multi_avg_fn(decay)); or apexfx.train_step(..., ema=apexfx.EMA(decay))",
                          ms, ms - as_one if as_one < ms else None,
                          "its ops timed, without Python around them, and one call on copies")
        else:
            of = "gradients" if any(ops.of_gradients for ops in lines) else "parameters"
            names = ", ".join(sorted({name for ops in lines for name in ops.names}))
            yield Finding("parameter_loop", place, f"goes through {count} {of} one by one ({names})",
                          "one call for all: torch.nn.utils.clip_grad_norm_(..., foreach=True), torch._foreach_*", ms, None,
                          "its ops timed, without Python around them")


def _graph_breaks(session: Session, plan: Plan) -> Iterator[Finding]:
    for (place, reason), _ in plan.breaks.most_common():
        yield Finding("graph_break", place, f"ends a graph of torch.compile: {reason}",
                      "keep it a tensor, or have it in the graph: torch._dynamo.config.capture_scalar_outputs = True"
                      if "item()" in reason else "do this outside of what is compiled, or in ops of torch alone")


def _not_compiled(session: Session, plan: Plan) -> Iterator[Finding | str]:
    for index, note in enumerate(plan.constructed.compiled):
        if note.num_calls:
            continue
        target = note.module if note.module is not None else note.target
        name = type(target).__name__ if note.module is not None else getattr(target, "__name__", "a function")
        experiment, saved = plan.tried.get(f"compile {index}"), session.saving(f"compile {index}")
        if isinstance(experiment, CompiledModule) and experiment.error:
            yield f"{note.place}: compiling failed: {experiment.error}"
            saved = None
        yield Finding("compile_not_entered", note.place, f"what this torch.compile makes of {name} was not called in "
                      f"{session.num_steps} steps", "call what it returns, or model.compile(); where it is for later, as for an "
                      "evaluation, nothing", None, *_measured(saved))


def _recompiles(session: Session, plan: Plan) -> Iterator[Finding]:
    by_function: dict[tuple[Place, str], list[Compilation]] = defaultdict(list)
    for each in session.compilations:
        if places.is_of_user(each.filename):
            by_function[Place(each.filename, each.line), each.function].append(each)
    for (place, function), compiled in by_function.items():
        if len({session.compilations[each] for each in compiled}) >= _MANY_COMPILATIONS:
            reason = compiled[-1].reason.strip().partition("\n")[0]
            yield Finding("recompiles", place, f"{function} was compiled {len(compiled)} times, in "
                          f"{sum(each.seconds for each in compiled):.1f} s; the last time because of {reason}",
                          "make what differs a tensor, or dynamic=True, or pad batches to a few shapes")


def _optimizers(session: Session, plan: Plan) -> Iterator[Finding | str]:
    for index, optimizer in enumerate(session.optimizers):
        name, place = type(optimizer).__name__, plan.constructed.places.get(optimizer) or session.step_places[optimizer]
        groups, saved = optimizer.param_groups, session.saving(f"kernel {index}")
        if f"groups {index}" in plan.tried:
            yield Finding("optimizer_groups", place, f"{name} has {len(groups)} groups of parameters, of {len(merged(groups))} "
                          "different settings", "one group for each setting: each group is a call of its own", None,
                          *_measured(session.saving(f"groups {index}")))
        change = f"{name}(..., {'fused' if session.device.type == 'cpu' and 'fused' in groups[0] else 'foreach'}=True)"
        if any(group.get("foreach") is False and not group.get("fused") for group in groups):
            yield Finding("unfused_update", place, f"{name} updates one parameter after the other: foreach=False", change, None,
                          *_measured(saved))
        elif saved is not None and saved.is_clear and saved.ms > _SMALL_SHARE * session.typical_ms()[0]:
            yield Finding("unfused_update", place, f"{name} updates one parameter after the other, torch's default on the CPU",
                          change, None, *_measured(saved))


def _unequal_means(session: Session, plan: Plan) -> Iterator[Finding]:
    observer = session.observer
    for place, steps in observer.means.items() if observer is not None else ():
        counts = [[count.item() for _, count in calls] for calls in steps.values() if len({before for before, _ in calls}) > 1]
        if 2 * sum(min(each) < max(each) for each in counts) >= observer.num_steps:
            fewest, most = min(map(min, counts)), max(map(max, counts))
            yield Finding("unequal_means", place, f"adds the gradients of {max(map(len, counts))} means, over {fewest:g} to "
                          f"{most:g} targets each: a target weighs the more, the fewer its batch has", 'reduction="sum", divided '
                          "by the number of targets of all batches of the step; or apexfx.Mean(total, count), the loss of an "
                          "apexfx.train_step(..., accumulate=)")


def _unaveraged_gradients(session: Session, plan: Plan) -> Iterator[Finding]:
    for optimizer, names in session.unequal_gradients.items():
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        yield Finding("gradients_not_averaged", session.step_places[optimizer], f"{len(names)} of {count} gradients, as that of "
                      f"{names[0]}, differ between the ranks when {type(optimizer).__name__} steps: the ranks train apart",
                      "call the DistributedDataParallel module, not the one inside; step outside of no_sync(); or all_reduce "
                      "these")


def _data_parallel(session: Session, plan: Plan) -> Iterator[Finding]:
    modules = plan.constructed.of(DistributedDataParallel)
    place = plan.constructed.places[modules[0]] if modules else None
    if "buffers" in plan.tried:
        count = sum(len(module.modules_buffers) for module in modules)
        yield Finding("buffer_broadcast", place, f"each forward broadcasts {count} buffers from rank 0, and waits for them",
                      "DistributedDataParallel(..., broadcast_buffers=False), where they are constant or may differ by "
                      "rank", None, *_measured(session.saving("buffers")))
    if any(module.find_unused_parameters for module in modules):
        yield Finding("unused_search", place, "each forward searches its graph for parameters that get no gradient",
                      "DistributedDataParallel(..., find_unused_parameters=False), where each gets one")
    norms = [name for module in modules for name, each in module.module.named_modules()
             if isinstance(each, BatchNorm) and not isinstance(each, torch.nn.SyncBatchNorm) and each.training]
    if norms and session.num_ranks > 1:
        yield Finding("batch_norm_not_synchronized", place, f"{len(norms)} batch norms, as {norms[0]!r}, take statistics over "
                      "one rank's batch", "nn.SyncBatchNorm.convert_sync_batchnorm(model), or sync_bn=True of apexfx; leave it "
                      "where the batch of a rank is large")


def _data_loading(session: Session, plan: Plan) -> Iterator[Finding]:
    ms_per_step, data_ms, _ = session.typical_ms()
    if data_ms > _DATA_SHARE * ms_per_step:
        yield Finding("data_loading", plan.constructed.data_place, f"waits {data_ms:.2f} of {ms_per_step:.2f} ms a step for the "
                      "data loader", "more num_workers=, persistent_workers=True, or less work for a sample", data_ms, data_ms,
                      "up to; waits timed in undisturbed steps")


def _measured(saved: Saving | None) -> tuple[float | None, str]:
    """Return a saving in milliseconds, None where it may be chance, and how it was measured."""
    if saved is None:
        return None, "counted"
    text = f"with and without in turn, {saved.num_steps} steps each"
    if not saved.is_clear:
        return None, f"not predicted: {text}, {saved.ms:.2f} +-{saved.error_ms:.2f} ms, not more than chance"
    return saved.ms, f"{text}, +-{saved.error_ms:.2f} ms"


def _times(count: float) -> str:
    return {1.0: "once", 2.0: "twice"}.get(count, f"{count:.3g} times")
