"""What a training step is made of: `checked`, of what a user gives, and `set_up`, from which on things change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import passes
from .._torch import under_fully_shard
from ..compiler.model_index import ModelIndex
from ..compiler.model_setup import check_model, set_up
from ..compiler.process_groups import Groups
from ..distributed.agreement import Agreement
from ..host_memory import keep_freed_memory
from ..report.data import Report
from .agreed_settings import settings_of_rank
from .model import StepModel, check_modules, warn_of_half_parameters
from .objective import ObjectiveModules
from .optimizer_list import OptimizerList
from .options import StepOptions
from .parameters import check_optimizer, trained_parameters
from .parts import in_order
from .parts.loss_scale import SCALE
from .parts.norm import SKIPS
from .parts.part import Part
from .parts.safeguard import LOG, STATE, SafeguardLog
from .slices import Slices
from .slots import Slots
from .wrong_call import note_second_updates

if TYPE_CHECKING:
    from .sharded import ShardedModel
    from .sharded_update import ShardedUpdate


@dataclass(frozen=True)
class Checked:
    """What a training step is to be made of, which has been checked; None where it has no such part."""

    model: nn.Module
    objective: Callable[..., Any]  # of the model and the batch
    objective_modules: ObjectiveModules
    optimizers: OptimizerList
    options: StepOptions
    casts_to: torch.dtype | None  # what float32 parameters are to be cast to
    loss_scaling: float | str | None  # "dynamic", or a number
    parts: Sequence[Part]  # of its end, but for the updates
    slots: Slots
    safeguard: SafeguardLog | None
    report: Report
    groups: Groups
    sharded: ShardedModel | None  # under fully_shard
    sharded_update: ShardedUpdate | None  # by shard=
    device: torch.device  # of what was trained when the step was made

    @property
    def of_rows(self) -> bool:
        """Whether each rank updates its rows of the parameters."""
        return self.sharded is not None or self.sharded_update is not None


@dataclass(frozen=True)
class Components(Checked):
    """What a training step is made of, once the model is set up."""

    step_model: StepModel  # the model, with other classes of modules during a call
    index: ModelIndex
    agreement: Agreement | None
    slices: Slices | None  # by slices=

    @functools.cached_property
    def may_skip(self) -> bool:
        """Whether a step may be skipped."""
        return SKIPS in self.slots

    @functools.cached_property
    def scale(self) -> Tensor | None:
        """What the loss is multiplied with."""
        return self.slots[SCALE] if self.loss_scaling is not None else None

    @functools.cached_property
    def skips(self) -> Tensor | None:
        """How many steps were skipped, in all and in a row."""
        return self.slots[SKIPS] if self.may_skip else None

    @property
    def reduces_each_call(self) -> bool:
        """Whether each call, one that accumulates too, reduces its gradients at once, to rows."""
        return self.sharded is not None or self.options.shard == "gradients"


def checked(model: nn.Module, objective: Callable[..., Any], optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
            given: StepOptions, modules: Sequence[nn.Module]) -> Checked:
    """Return what a step is to be made of, and refuse what none can be. Nothing has changed then."""
    config = given.config
    check_model(model, config, "train_step", give="give train_step() the module",
                inner="give train_step() the inner module, and ddp=True instead of the wrapper", may_be_sharded=True)
    passes.check_names(config, is_train_step=True)
    report, sharded = Report(given.describe()), _sharded(model)
    groups = Groups(config, sharded.group if sharded is not None else None)
    check_modules(model, groups.batch_norm)
    objective_modules, optimizers = ObjectiveModules(objective, model, modules), OptimizerList(optimizer)
    trained = trained_parameters(model, objective_modules, optimizers)
    options = given.over(groups.num_ranks)
    half = config.half_dtype(p.device for p in model.parameters())
    casts_to = half if config.level.half_parameters else None
    loss_scaling = options.loss_scaling({p.dtype for p in trained} | (sharded.dtypes if sharded is not None else set()), half)
    sharded_update = _sharded_update(options, groups, optimizers, trained)
    shared = sharded_update if options.slices is not None else None
    rows_over = groups.gradients if options.shard is not None and shared is None else groups.shards
    parts = in_order(options, loss_scaling, optimizers, rows_over and rows_over.group_name, shared)
    slots = Slots([slot for part in parts for slot in part.slots()], trained[0])
    safeguard = None if options.safeguard is None else SafeguardLog(options.safeguard, slots[SKIPS], slots[STATE], slots[LOG])
    if sharded is not None:
        sharded.check(model, trained, optimizers, options)
    if sharded_update is not None:
        slots.layout = optimizers.layout = sharded_update
    made = Checked(model, objective, objective_modules, optimizers, options, casts_to, loss_scaling, parts, slots, safeguard,
                   report, groups, sharded, sharded_update, trained[0].device)
    check_optimizer(optimizers, trained, options, loss_scaling, report, casts_to, of_rows=made.of_rows)
    if sharded is None or not sharded.casts:
        warn_of_half_parameters(model, config, report)
    return made


def set_up_step(made: Checked) -> Components:
    """Have the ranks compare what is trained, and how; copy what model and objective hold from rank 0, and cast the model."""
    model, options, groups, optimizers = made.model, made.options, made.groups, made.optimizers
    if made.device.type == "cpu":
        keep_freed_memory()
    note_second_updates(optimizers, made.report)
    slices = Slices(options, groups.gradients, made.device) if options.slices is not None else None
    agreement = groups.agreement(options.config.buckets)
    if agreement is not None and (groups.gradients or groups.shards) is not None:
        agreement.ensure("options of the training step and its optimizer", settings_of_rank(optimizers, options) + (
            [["what the bits depend on", slices.settings()]] if slices is not None else []))
    parameters, buffers = made.objective_modules.named_tensors()
    set_up(model, options.config, groups, agreement, parameters=parameters, buffers=buffers)
    step_model = StepModel(model, made.objective_modules, groups.batch_norm, made.casts_to, made.report, made.sharded)
    return Components(**vars(made), step_model=step_model, index=ModelIndex(lambda: model), agreement=agreement, slices=slices)


def _sharded_update(options: StepOptions, groups: Groups, optimizers: OptimizerList,
                    trained: Sequence[Tensor]) -> ShardedUpdate | None:
    """Return what shards the update where `shard=` asks for that."""
    if options.shard is None:
        return None
    from .sharded_update import ShardedUpdate, check_shard

    check_shard(options, optimizers, trained)
    return ShardedUpdate(groups.gradients, trained[0].device, full_matrices=not options.parts)


def _sharded(model: nn.Module) -> ShardedModel | None:
    """Return what `fully_shard` was told of a model, where it is under that."""
    if not under_fully_shard(model.modules()):
        return None
    from .sharded import ShardedModel

    return ShardedModel(model)
