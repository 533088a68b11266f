"""The whole training step as one graph: forward, loss, backward, allreduce, clipping, update and loss scale.

Read in this order; each file decides what stands beside it.

    options, step             what a user gives, calls, reads and saves
    components                what a step is made of: objective, parameters, leaves, optimizer_list, sharded, sharded_update
    parts/, slots             what its end does, one a file, and the tensors that these keep; checkpoint saves them
    state                     all that it reads and writes besides its batch: optimizer_state, hyperparameters, optimizer_changes
    all_or_nothing            a call that fails
    function, step_inputs     what Dynamo traces; model stands in for the modules meanwhile
    step_graphs               how a call runs it; in_pieces, what cannot be one graph
    captured_step             the captured graph: step_compiler, step_passes, derivatives
    accumulation, flush       updates of several calls; mean, losses with a denominator of their own; slices, any number of ranks
    last_update               what the last call did, and where a skip began: bundle_recorder, replicas, digest
    capture_errors            what a user is told where capture fails, and by wrong_call of a wrong call
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .function import SupervisedObjective
from .options import StepOptions, check_what_is_trained
from .parts.ema import EMA as EMA
from .parts.own import with_own
from .parts.part import Part as Part
from .parts.part import Slot as Slot
from .parts.safeguard import Event as Event
from .parts.safeguard import Safeguard as Safeguard
from .step import TrainStep as TrainStep

log = logging.getLogger(__name__)


def train_step(model: nn.Module, loss_fn: Callable[..., Any] | None = None,
               optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None, *,
               objective: Callable[..., Any] | None = None, loss_scale: float | str | None = None,
               max_grad_norm: float | None = None, accumulate: int = 1, slices: int | None = None, seed: int = 0,
               keep_grads: bool = False, memory_budget: int | None = None, fallback: str | None = None,
               safeguard: Safeguard | bool | None = None, shard: str | None = None, ema: EMA | None = None,
               parts: Sequence[Part] = (), modules: Sequence[nn.Module] = (), **options: Any) -> TrainStep:
    """Return a callable that runs a whole training step of `model` as one graph.

    It shares parameters, buffers and submodules with the model, and the state with the optimizer: evaluate the model, save and
    load either, change a learning rate as usual. The graph is captured at the first call.

        step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O2", max_grad_norm=1.0)
        for inputs, targets in loader:
            loss = step(inputs, targets)

    Args:
        model: any module that is not transformed.
        loss_fn: `loss_fn(output, *targets)` -> the loss: a scalar, or an `apexfx.Mean`, with a denominator of its own. The step
            is called with the model's input (a tensor, a tuple of positional or a dictionary of keyword arguments), then the
            targets.
        optimizer: updates inside of the graph, by an op or by its own `step()`, traced; one that no graph holds (SparseAdam,
            what counts in Python) runs its `step()` after the graph, on gradients that are averaged, unscaled and clipped; the
            report says so, and why. It may hold parameters of a loss that is a module, and of `modules`, too; any
            other leaf that the loss depends on has to be frozen. A list of optimizers over disjoint parameters (Muon for the
            matrices, AdamW for the rest) shares one norm and one loss scale; its state is a list, too, and a schedule belongs
            to one of them as usual.
        objective: `objective(model, *batch)` -> the loss, or (loss, anything else to return), in place of `loss_fn`. The
            step may be called by keyword then: `step(**batch)` computes `objective(model, **batch)`.
        loss_scale: "dynamic", a number, or None: dynamic where anything trained is computed in float16, or is float16; none
            for other dtypes.
        max_grad_norm: clip the norm of all gradients together to this; infinity measures it, for `step.grad_norm`, alone.
        accumulate: average the gradients of so many calls before they are reduced and applied, by the last of them.
        slices: make an update of so many slices of the global batch, a power of two, to the same bits on any number of ranks
            that divides it. Rank r of n computes slices r * slices / n to (r + 1) * slices / n - 1 in order, a call each.
        seed: with `slices`, the random numbers of a slice follow from it, from how many updates there were and from the slice.
        keep_grads: leave the averaged, unscaled and clipped gradients in `.grad`.
        memory_budget: bytes: where more are alive at once along the graph (`report.memory()`), elementwise values of the forward
            are computed again in the backward. None: under Inductor wherever that lowers the peak, and never under "eager".
        fallback: "transform" runs a step that cannot be captured as one graph in pieces: the model as `apexfx.transform` would,
            the rest op by op; a warning and the report say so. It goes with no part of the step's graph: safeguard, ema,
            parts, memory_budget, passes of the stage "step". None, the default, raises.
        safeguard: True or an `apexfx.Safeguard`: skip a step whose gradients are not finite, or are a spike, at every dtype, and
            leave nothing of it behind; `step.events` says which. Without it only a loss scale skips steps, and what the forward
            wrote stays.
        shard: "optimizer", with `ddp=True`: each rank keeps the optimizer's state of its rows of the parameters alone, updates
            those, and gets the others from the other ranks, in the same graph. "gradients": with `accumulate`, too, each call
            reduces its gradients at once, and each rank accumulates its rows alone.
        ema: an `apexfx.EMA`: average the model's parameters after each update, in the same graph; `step.ema_model` is a model of
            the averages.
        parts: each an `apexfx.Part` of your own, which does something with the gradients or the updated parameters in the same
            graph; they run in this order, before or behind clipping, or behind the update, as each says.
        modules: what else the optimizer trains, where a loss function or objective that is no module uses it.
        options: those of `apexfx.transform`. `fullgraph=True` makes a rewrite that matches nothing an error; False is refused,
            since a step is one graph.

    Raises:
        ValueError, TypeError: an option that does not exist, does not fit, or contradicts another; an optimizer with
            parameters that neither model nor objective has. Nothing has changed then.
        RankMismatchError: ranks hold different models.
    """
    own = {"loss_scale": loss_scale, "max_grad_norm": max_grad_norm, "accumulate": accumulate, "slices": slices,
           "seed": seed, "keep_grads": keep_grads, "memory_budget": memory_budget, "fallback": fallback, "safeguard": safeguard,
           "shard": shard, "parts": with_own(parts, EMA.checked(ema))}
    step_options = StepOptions.from_arguments(own, options, also=["loss_fn", "optimizer", "objective", "modules", "ema"])
    check_what_is_trained(loss_fn, optimizer, objective)
    step = TrainStep(model, objective or SupervisedObjective(loss_fn), optimizer, step_options, modules)
    if not options.keys() & {"opt_level", "dtype"} and "precision" not in step_options.config.skip:
        _tell_of_default(step_options.config.half_dtype(p.device for p in model.parameters()))
    return step


@functools.cache  # once in a process
def _tell_of_default(half: torch.dtype) -> None:
    log.warning("apexfx: opt_level= was not given, and O1 computes matrix products in %s, as torch.autocast does; "
                "opt_level='O0' computes in float32, as a loop without autocast", str(half).removeprefix("torch."))
