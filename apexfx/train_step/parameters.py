"""Which parameters a training step trains, and what is refused of them and of their optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from .._torch import has_gradient_hooks
from ..compiler.process_groups import averaged_over_none
from ..config import HALVES
from ..graph.shared_memory import overlapping
from ..optimizers.update_rules import Option
from ..report.data import Report
from .hyperparameters import check_no_text
from .objective import ObjectiveModules
from .optimizer_list import OptimizerList
from .options import StepOptions
from .over_rows import OF_ROWS


def trained_parameters(model: nn.Module, objective_modules: ObjectiveModules, optimizers: OptimizerList) -> list[Tensor]:
    """Return the parameters of the optimizers that require a gradient.

    Raises:
        ValueError: some are in two optimizers, are neither the model's nor the objective's, are on another device, share memory,
            or have hooks; there are none.
    """
    objective_modules.refresh(optimizers)
    if on_meta := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(f"apexfx: parameter {on_meta[0]!r} is on the meta device and has no values; call "
                         "model.to_empty(device=...), initialize or load it, and make the optimizer and the step then")
    names = {id(p): name for name, p in (*model.named_parameters(), *objective_modules.named_tensors()[0].items())}
    held = [p for group in optimizers.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in names]
    if foreign:
        shapes = ", ".join(str(list(p.shape)) for p in foreign[:3])
        raise ValueError(f"apexfx: {optimizers.name} holds {len(foreign)} parameters that are neither the model's nor "
                         f"the objective's (of shape {shapes}{', ...' if len(foreign) > 3 else ''}). Give the optimizer the "
                         "parameters of this model (made before fully_shard(), or before a layer was replaced, it holds "
                         "others: make it anew), of a loss that is a module, "
                         "and of train_step(modules=[...]), which names others; register parameters that are in no module in "
                         "one (torch.nn.ParameterList)")
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
        raise ValueError(f"apexfx: {optimizers.name} holds no parameter that requires a gradient. Call requires_grad_(True) on "
                         "what this step trains before train_step(), which looks at it once; what is trained in turns, as the "
                         "networks of a GAN, is frozen around the calls of the other step")
    devices = {p.device for p in trained}
    if len(devices) > 1:
        raise ValueError(f"apexfx: the parameters are on {', '.join(sorted(map(str, devices)))}; a step runs on one device")
    if hooked := [names[id(p)] for p in trained if has_gradient_hooks(p)]:
        raise ValueError(f"apexfx: a hook is registered on parameter {hooked[0]!r} (register_hook or "
                         "register_post_accumulate_grad_hook), which a training step as one graph would not run; remove it. "
                         "keep_grads=True leaves the gradients in .grad behind a call; a part reads or changes them in the step "
                         "(parts=, docs/parts.md). Or train with apexfx.transform() and the optimizer's own step()")
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


def check_optimizer(optimizers: OptimizerList, trained: Sequence[Tensor], options: StepOptions, loss_scaling: float | str | None,
                    report: Report, half: torch.dtype | None = None, scheduled: Collection[Option] = (), *,
                    of_rows: bool) -> str:
    """Return why the optimizer updates outside of the graph, which the report says, too; "" where it does not.

    Args:
        half: what float32 parameters are about to be cast to; None where that is done, or not asked for.
        scheduled: what changes from step to step, besides the learning rate.
        of_rows: whether each rank updates its rows of the parameters.

    Raises:
        ValueError: it does not go with the options of the step.
        TypeError: a number of it is a text.
    """
    max_grad_norm, _ = optimizers.clipping(options.max_grad_norm)
    may_skip = loss_scaling is not None or options.safeguard is not None
    complex_ones = [p for p in trained if p.is_complex()]
    if complex_ones and (max_grad_norm is not None or may_skip):
        raise ValueError(f"apexfx: {len(complex_ones)} parameters are complex, and gradients of those can be neither clipped "
                         "nor unscaled in the graph, nor judged; leave out max_grad_norm, loss_scale and safeguard")
    for each in optimizers:
        check_no_text(each)
    outside = optimizers.unsupported_reason(half, scheduled)
    float16 = [p for p in trained if p.dtype == torch.float16 or p.dtype == torch.float32 and half == torch.float16]
    by_its_step = f"{optimizers.name} updates by its own step()" if outside or optimizers.any_by_its_step(half, scheduled) else ""
    if float16 and (by_its_step or options.keep_grads) and loss_scaling not in (None, 1.0):
        why = by_its_step or "keep_grads=True was given"
        raise ValueError(
            f"apexfx: {len(float16)} parameters are float16, and so are their gradients. {why}, so they would be unscaled "
            "in float16, where the small ones become zero. Use opt_level='O2' on a float32 model, an optimizer of "
            "apexfx.optimizers with master_weights=True that updates in the graph, or loss_scale=1.0 to train without one")
    on_cpu = {half if half is not None and p.dtype == torch.float32 else p.dtype for p in trained if p.device.type == "cpu"}
    if torch.__version__ < (2, 14) and on_cpu.intersection(HALVES) \
            and any(type(each) is torch.optim.SGD and each.defaults["fused"] for each in optimizers):
        raise ValueError("apexfx: SGD(fused=True) of torch 2.13 updates half parameters wrongly on the CPU; leave fused out")
    if outside and of_rows:
        raise ValueError(f"apexfx: {optimizers.name} updates outside of the graph ({outside}), and {OF_ROWS} updates inside of "
                         "it alone; use another optimizer")
    if outside:
        waits = "; each step waits for the device, to know whether it is skipped" if may_skip else ""
        where = f"{optimizers.name} updates outside of the graph, by its own step(): {outside}"
        if behind := [part for part in options.parts if part.place == "after_update"]:
            raise ValueError(f"apexfx: {where}. No part runs behind that, and {behind[0]} is to: give it place = 'after_clip' to "
                             "run before, or do it after each call of the step (torch.optim.swa_utils.AveragedModel averages)")
        report.note(f"apexfx: {where}{waits}")
    if not of_rows:
        _note_ranks_apart(options, report, may_average=bool(outside) or options.keep_grads)
    return outside


def _note_ranks_apart(options: StepOptions, report: Report, *, may_average: bool) -> None:
    """Say once that no gradient is averaged where other ranks are there.

    It is a warning, too, unless an optimizer outside of the graph, or a reader of `.grad`, may average by itself.
    """
    if none := averaged_over_none(options.config):
        message = (f"{none}: each rank trains a model of its own. Give ddp=True, and leave it out only where ranks are to "
                   "train apart, or something else averages")
        report.note(message) if may_average else report.warn(message)
