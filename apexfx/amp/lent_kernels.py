"""The fused kernels of torch's own optimizers, turned on for the steps of amp where the user left the choice to torch.

One kernel that skips on the flag takes the place of copies around a step that does not. The groups are given back as
they were, so checkpoints do not show it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from apexfx.passes.precision_rules import HALVES

from .stash import AmpOptimizerState

# torch's own whose fused kernels read the flag.
_HAVE_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def lend(optimizer: Any, stash: AmpOptimizerState) -> bool:
    """Turn on the fused kernel for one step; return whether it does what torch's loop would."""
    if type(optimizer)._amp_source_class not in _HAVE_FUSED:
        return False
    groups = optimizer.param_groups
    for group in groups:
        if group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable"):
            return False
    params = [parameter for group in groups for parameter in group["params"]]
    grads = [parameter.grad for parameter in params]
    # The kernels go through memory: they take a gradient's elements in the parameter's order, whatever its strides say.
    strides = [parameter.stride() for parameter in params]
    for stride, grad in zip(strides, grads):
        if grad is not None and (grad.layout is not torch.strided or grad.stride() != stride):
            return False
    facts = _facts(optimizer, params, [strides, [grad is None for grad in grads]])
    if facts != stash.lent_to:
        if not all(_kernel_is_right(optimizer, group) for group in groups):
            return False
        _move_counts(optimizer)
        stash.lent_to = _facts(optimizer, params, facts[:2])
    for group in groups:
        group["fused"] = True
        stash.lent.append(group)
    return True


def take_back(optimizer: Any) -> None:
    """Take back what a step was lent; one that raised has it still."""
    stash: AmpOptimizerState = optimizer._amp_stash
    for group in stash.lent:
        group["fused"] = None
    stash.lent = []
    if stash.lent_flag is not None and optimizer.__dict__.get("found_inf") is stash.lent_flag:  # not a GradScaler's
        del optimizer.found_inf
    stash.lent_flag = None


def _facts(optimizer: Any, params: list[Tensor], facts: list[Any]) -> list[Any]:
    """Add to `facts` everything else that `_kernel_is_right` concludes from: numbers, which keep no tensor alive."""
    state = optimizer.state
    values = [
        value for values in state.values() if values.__class__ is dict for value in values.values() if value.__class__ is Tensor
    ]
    facts.append([*map(id, params), *map(id, state)])
    facts.append([parameter.nbytes for parameter in params])  # moves with the dtype
    facts.append([parameter.is_cpu for parameter in params])
    facts.append([value.stride() for value in values])
    facts.append([value.nbytes for value in values])
    facts.append([group.get("momentum") for group in optimizer.param_groups])
    if not all(facts[4]):
        facts.append([value.device for value in values])
    return facts


def _kernel_is_right(optimizer: Any, group: dict[str, Any]) -> bool:
    """Return whether torch's fused kernel does what its loop does for a group.

    State has to have its parameter's strides, as gradients have. SGD's kernel on the CPU leaves whole vectors of half
    parameters as they are, and reads their momentum as if it were float32, uninitialised memory past its end included
    (pytorch/pytorch#191763; torch up to 2.13). It takes momentum buffers for all parameters of a group or for none.
    """
    halves_are_wrong = isinstance(optimizer, torch.optim.SGD)
    num_with_grad = num_with_state = 0
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        if parameter.is_cpu:
            if halves_are_wrong and parameter.dtype in HALVES:
                return False
        elif not parameter.is_cuda:
            return False
        state = optimizer.state.get(parameter)
        for value in (state or {}).values():
            if isinstance(value, Tensor) and value.dim() > 0 and not _is_like(value, parameter):
                return False
        num_with_grad += 1
        num_with_state += state is not None
    return not (group.get("momentum") and 0 < num_with_state < num_with_grad)


def _is_like(value: Tensor, parameter: Tensor) -> bool:
    return value.stride() == parameter.stride() and value.shape == parameter.shape and value.dtype == parameter.dtype


def _move_counts(optimizer: Any) -> None:
    """Bring the counts of steps to their parameters' devices, where the fused kernel reads them."""
    for parameter, state in optimizer.state.items():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, Tensor) and step.device != parameter.device:
            state["step"] = step.to(parameter.device, torch.float32, non_blocking=True)


def warn_of_half_sgd(optimizer: torch.optim.Optimizer) -> None:
    """Warn of half parameters on the CPU in torch's SGD with fused=True: see `_kernel_is_right`."""
    if isinstance(optimizer, torch.optim.SGD) and any(
        group.get("fused") and any(p.is_cpu and p.dtype in HALVES for p in group["params"]) for group in optimizer.param_groups
    ):
        warnings.warn("amp.initialize was given torch.optim.SGD(fused=True) with half parameters on the CPU, most of which it "
                      "leaves as they are (https://github.com/pytorch/pytorch/issues/191763); pass fused=False or take "
                      "apexfx.optimizers.FusedSGD", stacklevel=4)
