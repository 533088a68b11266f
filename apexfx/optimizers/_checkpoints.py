"""What a fused optimizer's state goes through as it is loaded: checks, and a way around the casts of torch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor


class _Kept:
    """A state tensor that passes through `Optimizer.load_state_dict`, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def wrapped_state(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict for torch to load into a fused optimizer, with one count of steps a group and tensors that it will
    not cast.

    Raises:
        ValueError: state that is not of these parameters and this kind of optimizer.
    """
    groups = [optimizer._translate(dict(group)) for group in loaded["param_groups"]]
    for group in groups:
        if absent := [name for name in _LIMITS if name in optimizer.defaults and name not in group]:
            raise ValueError(f"{type(optimizer).__name__} cannot load a group that has no {absent[0]!r}: it was saved by another "
                             "class")
        check_numbers(type(optimizer).__name__, {**optimizer.defaults, **group})
    own = optimizer.param_groups
    if [len(group["params"]) for group in groups] == [len(group["params"]) for group in own]:  # else torch raises
        for group, mine in zip(groups, own):
            for index, param in zip(group["params"], mine["params"]):
                if index in loaded["state"]:
                    _check(optimizer, {**optimizer.defaults, **group}, param, index, loaded["state"][index])
    state: dict[Any, Any] = {}
    for index, values in loaded["state"].items():
        if isinstance(values, dict):
            values = {k: _Kept(v) if isinstance(v, Tensor) else v for k, v in values.items() if v is not None}
        state[index] = values
    for group in groups:
        with_steps = [state[i] for i in group["params"] if isinstance(state.get(i), dict) and "step" in state[i]]
        steps = [values.pop("step") for values in with_steps]
        if "step" not in group and steps:
            numbers = [float(s.tensor if isinstance(s, _Kept) else s) for s in steps]
            group["step"] = max(numbers)  # one count a group: that of the parameters used most
    return {**loaded, "state": state, "param_groups": groups}


def unwrap_state(optimizer: torch.optim.Optimizer) -> None:
    """Bring loaded tensors to their parameters' devices, in the dtypes that the optimizer keeps them in."""
    for param, values in optimizer.state.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, _Kept):
                dtype = optimizer._state_dtype(param, name)
                values[name] = value.tensor.detach().to(param.device, dtype, copy=True)


# Entries of a parameter's state, the special ones first, and the classes that keep them.
_KEPT_BY = {
    ("exp_avg", "exp_inf"): "Adamax", ("square_avg", "acc_delta"): "Adadelta", ("square_avg",): "RMSprop", ("sum",): "Adagrad",
    ("exp_avg", "exp_avg_sq", "mu_product"): "NAdam", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): "Adam or AdamW with amsgrad",
    ("exp_avg", "exp_avg_sq"): "Adam or AdamW without amsgrad, or RAdam", ("momentum_buffer",): "SGD or Muon",
}


def lacking(cls: str, state: dict[str, Any], names: Sequence[str]) -> str:
    """Say which entries of a parameter's state are missing beside others, which would go on alone; "" where none are.

    Args:
        cls: of the optimizer.
        names: what it keeps.
    """
    other = ("step", "master_param") if [*names] == ["momentum_buffer"] else ()  # an SGD may have had no momentum before
    held = [name for name, value in state.items() if value is not None and name not in other]
    missing = [name for name in names if name not in held]
    if not held or not missing:
        return ""
    by = next((classes for entries, classes in _KEPT_BY.items() if {*entries} <= {*held}), "")
    return (f"has {', '.join(held)} and lacks {', '.join(missing)}, which {cls} keeps by its options: "
            + (f"it was saved by {by}" if by else "a part of it is lost, or it was saved by another class"))


def _check(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor, index: Any, values: Any) -> None:
    what = f"{type(optimizer).__name__} cannot load the state of parameter {index}:"
    if not isinstance(values, dict):
        raise ValueError(f"{what} it is {type(values).__name__}, expected a dict")
    names = optimizer._names(group)
    if fault := lacking(type(optimizer).__name__, values, (*names, *optimizer._scalar_state_names)):
        raise ValueError(f"{what} it {fault}")
    own_shapes = {**dict.fromkeys((*names, "master_param"), param.shape), **dict.fromkeys(optimizer._scalar_state_names, ())}
    for name in own_shapes.keys() & {name for name, value in values.items() if value is not None}:
        shape, expected = tuple(getattr(values[name], "shape", ())), tuple(own_shapes[name])
        if not isinstance(values[name], Tensor) or shape != expected:
            actual = f"a tensor of {shape}" if isinstance(values[name], Tensor) else type(values[name]).__name__
            raise ValueError(f"{what} its {name} is {actual}, expected a tensor of {expected}; was it saved for "
                             "another list of parameters?")


def short(value: Any) -> str:
    """Return a value as messages have it: numbers and text themselves, the kind of all else."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return f"{value.item()}"
    return f"{value!r:.40}" if isinstance(value, (int, float, str, NoneType)) else f"a {type(value).__name__}"


_LIMITS = {"lr": (0.0, math.inf), "eps": (0.0, math.inf), "weight_decay": (0.0, math.inf), "momentum": (0.0, math.inf),
           "dampening": (-math.inf, math.inf), "betas": (0.0, 1.0), "step": (0.0, math.inf), "max_grad_norm": (0.0, math.inf)}


def check_numbers(cls: str, options: Mapping[str, Any]) -> None:
    """Refuse the options of an optimizer, or of a group of one, that no update can be made with.

    Raises:
        ValueError, TypeError, RuntimeError: the option, and what was expected.
    """
    for name, given in options.items():
        if name not in _LIMITS or name == "max_grad_norm" and given in (None, math.inf):
            continue
        if name == "betas" and not (isinstance(given, (tuple, list)) and len(given) == 2):
            raise ValueError(f"{cls}: betas is {given!r}; expected two numbers")
        least, below = _LIMITS[name]
        for place, number in enumerate(given if name == "betas" else (given,)):
            what = f"betas[{place}]" if name == "betas" else name
            if isinstance(number, Tensor) and number.numel() != 1:
                raise ValueError(f"{cls}: {what} must hold one number, got a tensor of shape {tuple(number.shape)}")
            if not isinstance(number, (numbers.Real, Tensor)):
                raise TypeError(f"{cls}: {what} is {number!r} ({type(number).__name__}); expected a number")
            # A tensor is not waited for, but for the count that is loaded.
            if not (isinstance(number, Tensor) and name != "step") and not (least <= number < below and number > -math.inf):
                raise ValueError(f"{cls}: {what} is {number}; expected a finite number, at least {least:g}"
                                 + f" and below {below:g}" * (below < math.inf))
    if options.get("amsgrad"):
        raise RuntimeError(f"{cls} does not support amsgrad")
