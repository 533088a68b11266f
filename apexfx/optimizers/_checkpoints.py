"""What a fused optimizer's state goes through as it is loaded: checks, and a way around the casts of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ._base import FusedOptimizer


class _Kept:
    """A state tensor that passes through `Optimizer.load_state_dict`, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def wrapped_state(optimizer: FusedOptimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict for torch to load, with one count of steps a group and tensors that it will not cast.

    Raises:
        ValueError: state that is not of these parameters and this kind of optimizer.
    """
    groups = [optimizer._translate(dict(group)) for group in loaded["param_groups"]]
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


def unwrap_state(optimizer: FusedOptimizer) -> None:
    """Bring loaded tensors to their parameters' devices, in the dtypes that the optimizer keeps them in."""
    for param, values in optimizer.state.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, _Kept):
                dtype = optimizer._state_dtype(param, name)
                values[name] = value.tensor.detach().to(param.device, dtype, copy=True)


def _check(optimizer: FusedOptimizer, group: dict[str, Any], param: Tensor, index: Any, values: Any) -> None:
    what = f"{type(optimizer).__name__} cannot load the state of parameter {index}:"
    if not isinstance(values, dict):
        raise ValueError(f"{what} it is {type(values).__name__}, expected a dict")
    names = optimizer._names(group)
    held = [name for name, value in values.items() if value is not None and name != "step"]
    missing = [name for name in names if name not in held]
    if held and missing:
        raise ValueError(f"{what} it has {', '.join(held)} and lacks {', '.join(missing)}; was it saved by another optimizer?")
    for name in {*names, "master_param"}.intersection(held):
        shape = tuple(getattr(values[name], "shape", ()))
        if not isinstance(values[name], Tensor) or shape != tuple(param.shape):
            actual = f"a tensor of {shape}" if isinstance(values[name], Tensor) else type(values[name]).__name__
            raise ValueError(f"{what} its {name} is {actual}, expected a tensor of {tuple(param.shape)}; was it saved for "
                             "another list of parameters?")
