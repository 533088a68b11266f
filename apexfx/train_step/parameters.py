"""Which parameters a training step trains, what is refused of them, and that all ranks hold the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import has_gradient_hooks
from ..buckets.plan import check_options
from ..compiler.graph_compiler import Groups
from ..config import BucketConfig
from ..distributed.agreement import Agreement, Label
from ..distributed.broadcast import broadcast_from_first
from .objective import ObjectiveModules
from .options import StepOptions


def trained_parameters(model: nn.Module, objective_modules: ObjectiveModules, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of the optimizer that require a gradient.

    Raises:
        ValueError: some are neither the model's nor the objective's, are on another device, share memory, or have hooks; there
            are none.
    """
    objective_modules.refresh(optimizer)
    names = {id(p): name for name, p in (*model.named_parameters(), *objective_modules.named_tensors()[0].items())}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in given if id(p) not in names]
    if foreign:
        shapes = ", ".join(str(list(p.shape)) for p in foreign[:3])
        raise ValueError(f"apexfx: {type(optimizer).__name__} holds {len(foreign)} parameters that are neither the model's nor "
                         f"the objective's (of shape {shapes}{', ...' if len(foreign) > 3 else ''}). Give the optimizer the "
                         "parameters of this model, and of modules that the loss function or objective is, has as an attribute "
                         "or names itself; register others in the model, or give them an optimizer of their own")
    trained = [p for p in given if p.requires_grad]
    if not trained:
        raise ValueError(f"apexfx: {type(optimizer).__name__} holds no parameter that requires a gradient")
    devices = {p.device for p in trained}
    if len(devices) > 1:
        raise ValueError(f"apexfx: the parameters are on {', '.join(sorted(map(str, devices)))}; a step runs on one device")
    if hooked := [names[id(p)] for p in trained if has_gradient_hooks(p)]:
        raise ValueError(f"apexfx: a hook is registered on parameter {hooked[0]!r} (register_hook or "
                         "register_post_accumulate_grad_hook), which a training step as one graph would not run; remove it, "
                         "or train with apexfx.transform() and the optimizer's own step()")
    _check_memory(model, objective_modules, {id(p) for p in trained})
    return trained


def missed_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Say which parameters of the model require a gradient and are not the optimizer's; "" where there are none."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missed = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if not missed:
        return ""
    return (f"apexfx: {len(missed)} parameters require a gradient and are in no group of the optimizer. The step does not update "
            "them; as in eager, it adds their gradients to .grad, for another optimizer to apply and clear "
            f"(requires_grad_(False) saves computing them): {', '.join(missed[:5])}{', ...' if len(missed) > 5 else ''}")


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


def overlapping(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the places of each two tensors that reach over the same memory."""
    ranges = []
    for place, tensor in enumerate(tensors):
        if tensor.layout == torch.strided and tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            ranges.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize, place))
    ranges.sort()
    for i, (device, _, end, place) in enumerate(ranges):
        for other_device, begin, _, other in ranges[i + 1:]:
            if other_device != device or begin >= end:
                break
            yield place, other


def agree_on_model(model: nn.Module, objective_modules: ObjectiveModules, optimizer: torch.optim.Optimizer, groups: Groups,
                   options: StepOptions) -> Agreement | None:
    """Compare what is trained, and how, over the ranks, and copy what model and objective hold from rank 0."""
    buckets = options.config.buckets
    parameters, others = objective_modules.named_tensors()
    if buckets is not None:
        check_options(buckets, {**dict(model.named_parameters(remove_duplicate=False)), **parameters},
                      dist.get_world_size(groups.gradients))
    agreement = None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **parameters, **others}
    if groups.user is not None and dist.get_world_size(groups.user) > 1 and dist.get_backend(groups.user) != "fake":
        agreement = Agreement(groups.user, Label(groups.user, "train_step"), (buckets or BucketConfig()).timeout_s,
                              getattr(groups.gradients or groups.batch_norm, "watchdog", None))
        agreement.ensure_model(tensors.items())
        if groups.gradients is not None:
            agreement.ensure("the options of the training step and its optimizer", _update_rows(optimizer, options))
    groups.separate_batch_norm()
    if groups.gradients is not None:
        broadcast_from_first(tensors.values(), groups.gradients)
    return agreement


def _update_rows(optimizer: torch.optim.Optimizer, options: StepOptions) -> list[Any]:
    """Return, as JSON-able rows, what replicas have to do alike with equal gradients."""
    own = [[field.name, getattr(options, field.name)] for field in dataclasses.fields(options) if field.name != "config"]
    groups = [[f"group {place} of {type(optimizer).__name__}",
               {name: str(value) for name, value in group.items() if name != "params" and not isinstance(value, Tensor)}]
              for place, group in enumerate(optimizer.param_groups)]
    return [*own, ["optimizer", type(optimizer).__name__], *groups]
