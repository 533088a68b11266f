"""Which settings of a training step and its optimizers have to be the same on all ranks, which compare them first."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..compiler.model_setup import set_up
from ..compiler.process_groups import Groups
from ..distributed.agreement import Agreement
from .objective import ObjectiveModules
from .optimizer_list import OptimizerList
from .options import StepOptions
from .slices import Slices


def set_up_step(model: nn.Module, objective_modules: ObjectiveModules, optimizers: OptimizerList, groups: Groups,
                options: StepOptions, slices: Slices | None) -> Agreement | None:
    """Compare what is trained, and how, over the ranks; copy what model and objective hold from rank 0, and cast the model."""
    agreement = groups.agreement(options.config.buckets)
    if agreement is not None and (groups.gradients or groups.shards) is not None:
        own = settings_of_rank(optimizers, options)
        own += [["what the bits depend on", slices.settings()]] if slices is not None else []
        agreement.ensure("options of the training step and its optimizer", own)
    parameters, buffers = objective_modules.named_tensors()
    set_up(model, options.config, groups, agreement, parameters=parameters, buffers=buffers)
    return agreement


def settings_of_rank(optimizers: OptimizerList, options: StepOptions) -> list[Any]:
    """Return, as JSON-able rows, what replicas have to do alike with equal gradients."""
    from ..compiler.rewritten_graph import numeric_options  # which imports torch's compilers

    own = [[name, _numbers(value)] for name, value in vars(options).items() if name not in ("config", "parts")]
    own += [["part", part.key] for part in options.parts]
    groups = [[f"group {place} of {type(optimizer).__name__}",
               {"parameters": len(group["params"]),
                **{name: _number(value) for name, value in group.items() if name != "params"}}]
              for optimizer in optimizers for place, group in enumerate(optimizer.param_groups)]
    return [["options", numeric_options(options.config)], *own,
            ["optimizer", optimizers.name], ["clipping", optimizers.clipping(options.max_grad_norm)], *groups]


def _number(option: Any) -> str:
    """Return an option of a group as text; what is no number by its type."""
    if isinstance(option, Tensor):
        return str(option.tolist() if option.numel() < 9 else list(option.shape))
    return str(option) if isinstance(option, (bool, int, float, str, tuple, list)) else type(option).__name__


def _numbers(option: Any) -> Any:
    """Return an option that has fields of its own, a safeguard, as those that are numbers: a folder may be each rank's own."""
    if not dataclasses.is_dataclass(option):
        return option
    return {name: value for name, value in dataclasses.asdict(option).items() if not isinstance(value, (str, Path))}
