"""The options of amp, their O0-O3 presets, and the checks on every override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..config import OPT_LEVELS
from ._amp_state import warn_or_err

_BEFORE_INITIALIZE: dict[str, Any] = {
    "enabled": False, "opt_level": None, "cast_model_type": None, "patch_torch_functions": False,
    "keep_batchnorm_fp32": None, "master_weights": None, "loss_scale": 1.0,
}  # fmt: skip


class Properties:
    """The seven options, as attributes and as the dict `options`. Setting one checks it against `opt_level`.

    Raises:
        RuntimeError: an override that contradicts the level (printed instead under `_amp_state.hard_override`).
        AssertionError: `keep_batchnorm_fp32` is neither bool, "True", "False" nor None.
        ValueError: a `loss_scale` that is neither "dynamic" nor a number.
    """

    def __init__(self) -> None:
        self.__dict__["options"] = dict(_BEFORE_INITIALIZE)

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"amp has no option {name!r}; expected one of {', '.join(_BEFORE_INITIALIZE)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AttributeError(f"amp has no option {name!r}; expected one of {', '.join(_BEFORE_INITIALIZE)}")
        check = _CHECKS.get(name)
        self.options[name] = value if check is None else check(self.options["opt_level"], value)

    def _update_options_dict(self, new_options: dict[str, Any]) -> None:
        for name, value in new_options.items():
            if name not in self.options:
                raise ValueError(f"Tried to set unexpected option {name}")
            self.options[name] = value


def _check_cast_model_type(level: str | None, value: Any) -> Any:
    if level == "O1" and value is not None and value is not False and value != torch.float32:
        warn_or_err("O1 inserts casts around Torch functions rather than model weights, so with O1, the model weights "
                    f"themselves should remain FP32. cast_model_type={value} was given: use opt_level='O2' or 'O3' to "
                    "cast the model, or dtype= to choose the half type of O1")
    return value


def _check_patch_torch_functions(level: str | None, value: Any) -> Any:
    if level not in (None, "O1") and value:
        warn_or_err(f"Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'; at {level} "
                    "the model itself is cast")
    return value


def _check_keep_batchnorm(level: str | None, value: Any) -> Any:
    if level == "O1" and value is not None:
        warn_or_err("With opt_level O1, batchnorm parameters are fp32 already and its functions take half activations, "
                    f"so keep_batchnorm_fp32 should be None, found {value}")
    if value in ("True", "False"):
        return value == "True"
    assert value in (True, False, None), (
        f"keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found keep_batchnorm_fp32={value}"
    )
    return value


def _check_master_weights(level: str | None, value: Any) -> Any:
    if level == "O1" and value is not None:
        warn_or_err("It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should "
                    "be FP32.")
    return value


def _check_loss_scale(level: str | None, value: Any) -> Any:
    if value == "dynamic":
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"loss_scale={value!r} was given, expected 'dynamic' or a number") from None


_CHECKS: dict[str, Callable[[str | None, Any], Any]] = {
    "cast_model_type": _check_cast_model_type,
    "patch_torch_functions": _check_patch_torch_functions,
    "keep_batchnorm_fp32": _check_keep_batchnorm,
    "master_weights": _check_master_weights,
    "loss_scale": _check_loss_scale,
}


class _Level:
    """One row of the table of opt levels; calling it fills in a `Properties`."""

    opt_level = ""
    brief = ""
    more = ""

    def __call__(self, properties: Properties) -> Properties:
        level = OPT_LEVELS[self.opt_level]
        masters = level.cast_model and not level.half_parameters
        properties.enabled = True
        properties.opt_level = self.opt_level
        # None at O1: its models are cast call by call.
        properties.cast_model_type = torch.float16 if level.cast_model else None if level.patch_ops else torch.float32
        properties.patch_torch_functions = level.patch_ops
        properties.keep_batchnorm_fp32 = level.keep_batchnorm_fp32 if level.cast_model else None
        properties.master_weights = None if level.patch_ops else masters
        properties.loss_scale = "dynamic" if level.patch_ops or masters else 1.0
        return properties


class O0(_Level):
    opt_level = "O0"
    brief = "O0:  Pure FP32 training."
    more = "Your models are checked to be FP32 and run as they are: the baseline for accuracy."


class O1(_Level):
    opt_level = "O1"
    brief = "O1:  Insert automatic casts around Pytorch functions and Tensor methods."
    more = "Inside the models' forward, each function runs in the dtype its rule asks for; weights stay FP32."


class O2(_Level):
    opt_level = "O2"
    brief = "O2:  Half training with FP32 batchnorm and FP32 master weights."
    more = "Weights and inputs are half, batch norm is FP32, and the optimizer updates FP32 master weights."


class O3(_Level):
    opt_level = "O3"
    brief = "O3:  Pure half training."
    more = "Everything is half: the baseline for speed."


opt_levels: dict[str, _Level] = {"O0": O0(), "O1": O1(), "O2": O2(), "O3": O3()}
