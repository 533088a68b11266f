"""initialize, state_dict, load_state_dict."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import HALVES, default_half
from ..precision.half_model import cast_model
from ..ranks import num_ranks
from ..transform import transform
from ._amp_state import _amp_state, maybe_print, warn_or_err
from .executor import CastExecutor
from .functions import replace_registered, take_registered
from .models import (
    ForwardPatch,
    cast_around,
    check_not_transformed,
    check_parameters,
    check_wrapper,
    patch_forward,
    save_float32,
)
from .optimizers import process_optimizer, unwrap
from .properties import O0 as O0
from .properties import O1 as O1
from .properties import O2 as O2
from .properties import O3 as O3
from .properties import Properties, opt_levels
from .scale_loss import AmpHandle
from .scaler import LossScaler, check_count, check_state
from .session import Session


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    dtype: torch.dtype | None = None,
    compile: bool = False,  # the keyword users look for
    inner: str = "inductor",
    agree: bool = True,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place; return them in the shape they were given.

    Args:
        models: one module, or a list.
        optimizers: one optimizer (or LARC), a list, or None.
        enabled: False returns everything unchanged.
        opt_level: "O0" float32, "O1" casts per function, "O2" half with float32 masters, "O3" half.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale: override the level's
            value where not None. `keep_batchnorm_fp32` and `loss_scale` may be strings, as from a command line.
        cast_model_outputs: dtype of the models' floating outputs; by default float32 at O0, O2 and O3, and float32 for
            half outputs at O1, so that the loss is computed in float32.
        num_losses: how many losses have a scaler of their own.
        verbosity: 0 silent, 1 the options and overflows, 2 also every cast.
        min_loss_scale, max_loss_scale: limits of a dynamic scale.
        dtype: the half type; float16 by default for models on CUDA, bfloat16 on the CPU.
        compile: return compiled models (see `apexfx.transform`) that do the same casts in their graphs; O2 then keeps
            the model's own float32 parameters as masters. `inner` is the compiler.
        agree: share overflows among all ranks, so that all skip or none.

    Raises:
        RuntimeError: an override that contradicts the level; a half model; a parallel wrapper; a transformed model, but at O0;
            an optimizer given twice.
        TypeError: models or optimizers of the wrong kind.
    """
    check_count("num_losses", num_losses)
    _amp_state.opt_properties = Properties()
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.session = None
        return models if optimizers is None else (models, optimizers)
    if not torch.backends.cudnn.enabled:
        raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True")
    if opt_level not in opt_levels:
        raise RuntimeError(f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'. Note that in "
                           "`O0`, `O1`, etc., the prefix O is the letter O, not the number zero.")
    model_list = _as_list(models, "models", nn.Module)
    optimizer_list = _optimizer_list(optimizers)
    _check_belong(optimizer_list, model_list)
    for model in model_list:
        check_wrapper(model)
    half = _half_type(dtype, model_list)
    overrides = {"cast_model_type": cast_model_type, "patch_torch_functions": patch_torch_functions,
                 "keep_batchnorm_fp32": keep_batchnorm_fp32, "master_weights": master_weights, "loss_scale": loss_scale}
    properties = _properties(opt_level, half, overrides)
    if (properties.patch_torch_functions or properties.cast_model_type) and not compile:
        for model in model_list:
            check_not_transformed(model)
    for model in model_list:
        check_parameters(model)
    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    session = _session(properties, half, model_list, num_losses, agree=agree)  # takes what was registered
    model_list = [_prepared(model, session, cast_model_outputs, inner if compile else None) for model in model_list]
    masters = bool(properties.master_weights) and not compile
    for optimizer in optimizer_list:
        process_optimizer(unwrap(optimizer), session, master_weights=masters)
        if properties.cast_model_type and not masters:
            unwrap(optimizer).load_state_dict(unwrap(optimizer).state_dict())
    models = model_list if isinstance(models, list) else model_list[0]
    return models if optimizers is None else (models, optimizers)


def _as_list(argument: Any, what: str, kind: type) -> list[Any]:
    if isinstance(argument, kind):
        return [argument]
    if isinstance(argument, list):
        return list(argument)
    swapped = isinstance(argument, torch.optim.Optimizer)
    raise TypeError(f"{what} must be either a single {kind.__name__} or a list of them, got {type(argument).__name__}"
                    + ("; models come first: amp.initialize(model, optimizer)" if swapped else ""))


def _optimizer_list(optimizers: Any) -> list[Any]:
    if optimizers is None:
        return []
    as_list = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in as_list:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise RuntimeError("An incoming optimizer is an FP16_Optimizer. An optimizer passed to amp.initialize must be "
                               "the plain one: amp keeps the masters itself")
        if not isinstance(unwrap(optimizer), torch.optim.Optimizer):
            raise TypeError("optimizers must be either a single optimizer or a list of optimizers, got "
                            f"{type(optimizer).__name__}")
    return list(as_list)


def _check_belong(optimizers: list[Any], models: list[nn.Module]) -> None:
    """Warn of an optimizer that would train none of the models."""
    parameters = {p for model in models for p in model.parameters()}
    for i, optimizer in enumerate(optimizers):
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and own and parameters.isdisjoint(own):
            warnings.warn(f"amp.initialize: none of the {len(own)} parameters of optimizers[{i}] ({type(optimizer).__name__}) "
                          "belongs to the models given; was it made for another model, or before the model was replaced "
                          "by a copy?", stacklevel=3)


def _half_type(dtype: torch.dtype | None, models: list[nn.Module]) -> torch.dtype:
    if dtype is not None:
        if dtype not in HALVES:
            raise ValueError(f"dtype={dtype!r} was given, expected torch.float16, torch.bfloat16 or None")
        return dtype
    return default_half(p.device for model in models for p in model.parameters())


def _properties(opt_level: str, half: torch.dtype, overrides: dict[str, Any]) -> Properties:
    properties = opt_levels[opt_level](_amp_state.opt_properties)
    if properties.cast_model_type in HALVES:
        properties.cast_model_type = half
    maybe_print(f"Selected optimization level {opt_levels[opt_level].brief}", True)
    maybe_print("Defaults for this optimization level are:", True)
    _print_options(properties)
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if not overrides:
        maybe_print("Nothing overrides them.", True)
        return properties
    maybe_print(f"Overridden: {', '.join(f'{name}={value!r}' for name, value in overrides.items())}", True)
    for name, value in overrides.items():
        setattr(properties, name, value)
    maybe_print("After processing overrides, optimization options are:", True)
    _print_options(properties)
    return properties


def _print_options(properties: Properties) -> None:
    for name, value in properties.options.items():
        maybe_print(f"{name:22} : {value}", True)


def _session(
    properties: Properties, half: torch.dtype, models: list[nn.Module], num_losses: int, *, agree: bool
) -> Session:
    device = next((p.device for model in models for p in model.parameters()), torch.device("cpu"))
    many = agree and num_ranks() > 1
    group = dist.group.WORLD if many else None
    scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=_amp_state.min_loss_scale, max_loss_scale=_amp_state.max_loss_scale,
                   device=device, group=group, name=str(i))
        for i in range(num_losses)
    ]
    executor = None
    if properties.patch_torch_functions:
        rules, foreign = take_registered()
        executor = CastExecutor(half, rules)
        if _amp_state.verbosity == 2:
            executor.print_casts()
        handle = AmpHandle(executor, loss_scale=properties.loss_scale, verbose=_amp_state.verbosity == 2)
        earlier = getattr(_amp_state, "handle", None)
        if earlier is not None:
            earlier._restore_functions()
        replace_registered(handle, foreign)
        _amp_state.handle = handle
    session = Session(properties, half, scalers, executor)
    _amp_state.loss_scalers = scalers
    _amp_state.session = session
    return session


def _prepared(model: nn.Module, session: Session, cast_outputs: torch.dtype | None, inner: str | None) -> nn.Module:
    """Cast `model` in place and wrap its forward; with `inner` return a compiled model, which casts alike, in place of that."""
    properties = session.properties
    cast_type = properties.cast_model_type or None
    masters_in_graph = inner is not None and bool(properties.master_weights)
    if cast_type is not None:
        stored = torch.float32 if masters_in_graph else cast_type
        cast_model(model, stored, keep_batchnorm=bool(properties.keep_batchnorm_fp32))
        if stored in HALVES:
            save_float32(model)
    outputs, only = cast_outputs, None
    if cast_outputs is None and cast_type is not None:
        outputs = torch.float32
    elif cast_outputs is None and session.executor is not None:
        # Apex left half outputs and cast in the loss function; here the loss gets them in float32.
        outputs, only = torch.float32, HALVES
    if inner is not None:
        transformed = _transformed(model, session, cast_type, inner)
        cast_around(transformed, inputs=cast_type is not None, outputs=outputs, only=only)
        return transformed
    if cast_type is not None or outputs is not None:
        patch_forward(model, ForwardPatch(cast_type, outputs, only, session.executor))
    return model


def _transformed(model: nn.Module, session: Session, cast_type: torch.dtype | None, inner: str) -> nn.Module:
    """Return `model` compiled at the level that makes the casts of `session`, whatever the overrides of its level."""
    properties = session.properties
    if session.executor is not None:
        return transform(model, opt_level="O1", dtype=session.half, precision=session.executor.user_rules, inner=inner)
    if cast_type in HALVES:
        level = "O2" if properties.master_weights else "O3"
        return transform(model, opt_level=level, dtype=cast_type, keep_batchnorm_fp32=properties.keep_batchnorm_fp32, inner=inner)
    return transform(model, opt_level="O0", inner=inner)


def state_dict(destination: Any = None) -> Any:
    """Return {"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}, in `destination` if given. Waits for the device.

    Raises:
        AttributeError: nothing was initialised, or with `enabled=False`.
    """
    destination = OrderedDict() if destination is None else destination
    for i, scaler in enumerate(_scalers()):
        destination[f"loss_scaler{i}"] = scaler.state_dict()
    return destination


def load_state_dict(state_dict: Any) -> None:
    """Load what `state_dict` returned, here or in Apex, into the scalers in order.

    Raises:
        RuntimeError: keys that are no loss scalers' (after the others were loaded).
    """
    scalers = _scalers()
    if len(state_dict) != len(scalers):
        print(f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    states = [value for key, value in state_dict.items() if "loss_scaler" in key]
    for state in states:
        check_state(state)
    for scaler, state in zip(scalers, states):
        scaler.load_state_dict(state)
    if len(states) > len(scalers):
        print(f"Skipping loss_scaler[{len(scalers)}], since num_losses was set to {len(scalers)}")
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. ")


def _scalers() -> list[LossScaler]:
    if getattr(_amp_state, "session", None) is None:
        raise AttributeError("amp has no loss_scalers: call amp.initialize(..., enabled=True) first")
    return _amp_state.loss_scalers


__all__ = ["O0", "O1", "O2", "O3", "Properties", "initialize", "load_state_dict", "opt_levels", "state_dict", "warn_or_err"]
