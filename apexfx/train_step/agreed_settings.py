"""Which settings of a training step and its optimizers have to be the same on all ranks, which compare them first."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from .optimizer_list import OptimizerList
from .options import StepOptions


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
