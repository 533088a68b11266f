"""Which parameters a training step trains, what is refused of them, and that all ranks hold the same."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import has_gradient_hooks, is_alone_in_memory
from ..compiler.model_setup import set_up
from ..compiler.process_groups import Groups
from ..distributed.agreement import Agreement, Label
from ..graph.inputs import Placeholder
from .objective import ObjectiveModules
from .optimizer_list import OptimizerList
from .options import StepOptions


def trained_parameters(model: nn.Module, objective_modules: ObjectiveModules, optimizers: OptimizerList) -> list[Tensor]:
    """Return the parameters of the optimizers that require a gradient.

    Raises:
        ValueError: some are in two optimizers, are neither the model's nor the objective's, are on another device, share memory,
            or have hooks; there are none.
    """
    objective_modules.refresh(optimizers)
    names = {id(p): name for name, p in (*model.named_parameters(), *objective_modules.named_tensors()[0].items())}
    held = [p for group in optimizers.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in names]
    if foreign:
        shapes = ", ".join(str(list(p.shape)) for p in foreign[:3])
        raise ValueError(f"apexfx: {optimizers.name} holds {len(foreign)} parameters that are neither the model's nor "
                         f"the objective's (of shape {shapes}{', ...' if len(foreign) > 3 else ''}). Give the optimizer the "
                         "parameters of this model, of a loss that is a module, and of train_step(modules=[...]), which names "
                         "others; register parameters that are in no module in one (torch.nn.ParameterList)")
    owners = Counter(p for each in optimizers for p in {id(p) for group in each.param_groups for p in group["params"]})
    if shared := [names[p] for p, count in owners.items() if count > 1]:
        raise ValueError(f"apexfx: {len(shared)} parameters are in more than one of the optimizers {optimizers.name}, each of "
                         f"which would update them: {', '.join(sorted(shared)[:3])}{', ...' if len(shared) > 3 else ''}; give "
                         "each to one of them")
    if twice := [names[p] for p, count in Counter(map(id, held)).items() if count > 1]:
        raise ValueError(f"apexfx: a group of {optimizers.name} holds {twice[0]!r} more than once, and each would update it; "
                         "give it once")
    trained = [p for p in held if p.requires_grad]
    if not trained:
        raise ValueError(f"apexfx: {optimizers.name} holds no parameter that requires a gradient")
    devices = {p.device for p in trained}
    if len(devices) > 1:
        raise ValueError(f"apexfx: the parameters are on {', '.join(sorted(map(str, devices)))}; a step runs on one device")
    if hooked := [names[id(p)] for p in trained if has_gradient_hooks(p)]:
        raise ValueError(f"apexfx: a hook is registered on parameter {hooked[0]!r} (register_hook or "
                         "register_post_accumulate_grad_hook), which a training step as one graph would not run; remove it, "
                         "or train with apexfx.transform() and the optimizer's own step()")
    _check_memory(model, objective_modules, {id(p) for p in trained})
    return trained


def _check_memory(model: nn.Module, objective_modules: ObjectiveModules, trained: set[int]) -> None:
    """Refuse a trained parameter that shares memory with another tensor: their updates would meet there.

    Args:
        trained: ids of the parameters.
    """
    parameters, buffers = objective_modules.named_tensors()
    named = [*model.named_parameters(), *model.named_buffers(), *parameters.items(), *buffers.items()]
    for one, other in overlapping([tensor for _, tensor in named]):
        if trained & {id(named[one][1]), id(named[other][1])}:
            raise ValueError(f"apexfx: {named[one][0]!r} and {named[other][0]!r} share memory and are two tensors, each "
                             "of which would be updated as if it were alone; register one Parameter under both names")


def check_state(named: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse state that shares memory with other state, or a parameter, as after `load_state_dict(other.state_dict())`.

    Args:
        named: (name, tensor) of what a step updates; one tensor of two parameters is there twice.
    """
    for one, other in overlapping([tensor for _, tensor in named]):
        raise ValueError(f"apexfx: {named[one][0]!r} and {named[other][0]!r} share memory, and each would be updated as if it "
                         "were alone: load_state_dict() copies nothing; give it copy.deepcopy(optimizer.state_dict())")


def overlapping(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the places of each two tensors that reach over the same memory, in their order, not in that of their addresses."""
    ranges = sorted((str(tensor.device), *_extent(tensor), place) for place, tensor in enumerate(tensors) if _has_memory(tensor))
    pairs = []
    for i, (device, _, end, place) in enumerate(ranges):
        for other_device, begin, _, other in ranges[i + 1:]:
            if other_device != device or begin >= end:
                break
            pairs.append((min(place, other), max(place, other)))
    return sorted(pairs)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's memory begins, and where it ends."""
    reach, begin = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())), tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.itemsize


class MemoryCheck:
    """Refuses inputs that are the memory of what a step updates: they would be read before or after, as the graph happens to lie.

    What the forward writes, running statistics say, may share memory with what it shared memory with in the first call, or in
    `capture()`, for which the graph was compiled. All is compared with all then, and where something that is written has moved.
    As long as nothing has, an input that is alone in its memory shares none.

    Args:
        placeholders: the inputs.
        updated: the places of those that the step updates.
        written: the places of those that the forward writes.
    """

    def __init__(self, placeholders: Sequence[Placeholder], updated: Sequence[int], written: Sequence[int]) -> None:
        self._placeholders, self._updated, self._written = placeholders, set(updated), {*updated, *written}
        self._others = [place for place, p in enumerate(placeholders) if p.shape is not None and place not in self._written]
        self._is_written = [place in self._written for place in range(len(placeholders))]
        self._shared: list[tuple[int, int]] | None = None  # places of two that share memory which the forward writes
        self._where: list[int] | None = None  # is what is written
        self._extents: list[tuple[int, int]] = []  # of that, sorted

    def __call__(self, args: Sequence[Any]) -> None:
        """Look at the inputs of a call.

        Raises:
            ValueError: it names both.
        """
        where = list(map(Tensor.data_ptr, itertools.compress(args, self._is_written)))
        if self._shared or where != self._where or any(map(self._meets, (args[place] for place in self._others))):
            self._check_all(args)
            self._extents = sorted(map(_extent, filter(_has_memory, itertools.compress(args, self._is_written))))
            self._where = where

    def _meets(self, other: Tensor) -> bool:
        """Return whether a tensor reaches into what is written, which is disjoint."""
        if not _has_memory(other) or is_alone_in_memory(other):
            return False
        begin, end = _extent(other)
        place = bisect.bisect(self._extents, begin, key=operator.itemgetter(1))  # the first that ends behind `begin`
        return place < len(self._extents) and self._extents[place][0] < end

    def _check_all(self, args: Sequence[Any]) -> None:
        places = [place for place, p in enumerate(self._placeholders) if p.shape is not None]
        pairs = [(places[one], places[other]) for one, other in overlapping([args[place] for place in places])]
        refused = [pair for pair in pairs if not self._updated.isdisjoint(pair)]
        shared = [pair for pair in pairs if pair not in refused and not self._written.isdisjoint(pair)]
        if self._shared is None:
            self._shared = shared
        for pair in refused:
            first, second = (self._placeholders[place].name for place in pair)
            raise ValueError(f"apexfx: {first!r} and {second!r}, which the step reads, share memory that it updates; give it "
                             "a copy (.clone()) of a parameter, or use the parameter itself")
        for pair in sorted({*shared} ^ {*self._shared}):
            first, second = (self._placeholders[place].name for place in pair)
            change = "share" if pair in shared else "no longer share"
            raise ValueError(f"apexfx: since the step was compiled, {first!r} and {second!r} {change} memory that the forward "
                             "writes, and the graph would compute as before; undo that, or make a new step")


def set_up_step(model: nn.Module, objective_modules: ObjectiveModules, optimizers: OptimizerList, groups: Groups,
                   options: StepOptions) -> Agreement | None:
    """Compare what is trained, and how, over the ranks; copy what model and objective hold from rank 0, and cast the model."""
    label = Label(groups.user, "train_step") if groups.user is not None else ""
    agreement = groups.agreement(label, options.config.buckets)
    if agreement is not None and groups.gradients is not None:
        agreement.ensure("options of the training step and its optimizer", _update_rows(optimizers, options))
    parameters, buffers = objective_modules.named_tensors()
    set_up(model, options.config, groups, agreement, parameters=parameters, buffers=buffers)
    return agreement


def _update_rows(optimizers: OptimizerList, options: StepOptions) -> list[Any]:
    """Return, as JSON-able rows, what replicas have to do alike with equal gradients."""
    own = [[name, _numbers(value)] for name, value in vars(options).items() if name != "config"]
    groups = [[f"group {place} of {type(optimizer).__name__}",
               {name: str(value) for name, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}]
              for optimizer in optimizers for place, group in enumerate(optimizer.param_groups)]
    return [*own, ["optimizer", optimizers.name], ["own clipping", optimizers.own_clipping()], *groups]


def _numbers(option: Any) -> Any:
    """Return an option that has fields of its own, a safeguard, as those that are numbers: a folder may be each rank's own."""
    if not dataclasses.is_dataclass(option):
        return option
    return {name: value for name, value in dataclasses.asdict(option).items() if not isinstance(value, (str, Path))}
