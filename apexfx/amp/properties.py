"""The options of amp, their O0-O3 presets, and the checks on every override."""

from __future__ import annotations

from typing import Any

import torch

from ..config import OPT_LEVELS
from ._amp_state import warn_or_err
from .scaler import check_scale

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
        self.options[name] = _checked(name, value, self.options["opt_level"])


_REFUSED_AT_O1 = {
    "cast_model_type": "O1 inserts casts around Torch functions rather than model weights, so with O1, the model weights "
                       "themselves should remain FP32. cast_model_type={} was given: use opt_level='O2' or 'O3' to cast the "
                       "model, or dtype= to choose the half type of O1",
    "keep_batchnorm_fp32": "With opt_level O1, batchnorm parameters are fp32 already and its functions take half activations, "
                           "so keep_batchnorm_fp32 should be None, found {}",
    "master_weights": "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should be "
                      "FP32.",
}


def _checked(name: str, value: Any, level: str | None) -> Any:
    """Return `value` as the option `name` takes it at `level`."""
    means_nothing = value is None or name == "cast_model_type" and (value is False or value == torch.float32)
    if level == "O1" and name in _REFUSED_AT_O1 and not means_nothing:
        warn_or_err(_REFUSED_AT_O1[name].format(value))
    if name == "patch_torch_functions" and level not in (None, "O1") and value:
        warn_or_err(f"Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'; at {level} the model "
                    "itself is cast")
    if name == "keep_batchnorm_fp32":
        value = {"True": True, "False": False}.get(value, value)
        assert value in (True, False, None), (
            "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found "
            f"keep_batchnorm_fp32={value}"
        )
    if name == "loss_scale" and value != "dynamic":
        return check_scale(name, value)
    return value


class _Level:
    """One row of the table of opt levels; calling it fills in a `Properties`."""

    opt_level: str
    brief: str  # as Apex prints it

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


class O1(_Level):
    opt_level = "O1"
    brief = "O1:  Insert automatic casts around Pytorch functions and Tensor methods."


class O2(_Level):
    opt_level = "O2"
    brief = "O2:  Half training with FP32 batchnorm and FP32 master weights."


class O3(_Level):
    opt_level = "O3"
    brief = "O3:  Pure half training."


opt_levels: dict[str, _Level] = {"O0": O0(), "O1": O1(), "O2": O2(), "O3": O3()}
