"""What `initialize` does to a model: parameters cast, forward wrapped, checkpoints in float32.

The wrapped forward belongs to a subclass of the model's own class, of the same name, that the instance is moved to. So
`deepcopy`, `copy`, pickling and DataParallel's replicas run their own parameters, as any module does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import backend_of, has_forward_pre_hook, has_state_dict_hook
from ..compiler.refusals import is_parallel_wrapper
from ..compiler.transformed import get_compiled
from ..config import HALVES
from ..precision.call_casts import Cast, CastCall
from ..subclassing import reduced, subclass
from ._amp_state import _amp_state, warn_or_err
from .executor import CastExecutor

log = logging.getLogger(__name__)

_PATCH = "_amp_forward"


@dataclass
class ForwardPatch:
    """How the forward of one model is wrapped.

    Attributes:
        inputs: dtype the floating inputs are cast to, or None.
        outputs: dtype the outputs are cast to, or None.
        only: the output dtypes that are cast; None for every floating one.
        executor: on while the forward runs, or None.
        own_forward: a `forward` that had been set on the instance.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype | None
    only: tuple[torch.dtype, ...] | None
    executor: CastExecutor | None
    own_forward: Any = None

    def call(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        executor = self.executor
        inside = executor is not None and executor.depth > 0
        call = None
        if self.inputs is not None:
            call = CastCall(args, kwargs, Cast(self.inputs, others=self.inputs))
            args, kwargs = call.args, call.kwargs
        with executor if executor is not None and not inside else contextlib.nullcontext():
            result = forward(*args, **kwargs)
        if call is not None:
            call.check()
        if self.outputs is None or inside:  # inside another initialised model, outputs keep their dtypes
            return result
        return Cast(self.outputs, only=self.only, others=self.outputs if self.only is None else None)(result)


@torch.compiler.disable(reason="amp's O1 casts in eager mode; pass compile=True to amp.initialize to have them in the graph")
def _call_eagerly(patch: ForwardPatch, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    log.warning("amp: torch.compile leaves a model initialised at O1 to eager; pass compile=True to amp.initialize instead")
    return patch.call(forward, args, kwargs)


def check_parameters(model: nn.Module) -> None:
    """Raise RuntimeError where a parameter or buffer is float16 already, unless `_amp_state` allows it."""
    if _amp_state.allow_incoming_model_not_fp32:
        return
    if _PATCH in model.__dict__ and any(p.dtype == torch.float16 for p in model.parameters()):
        raise RuntimeError("apexfx: the model has been through amp.initialize before, and its parameters are float16 since "
                           "then: call amp.initialize once, with all optimizers of the model in a list, or give a new model")
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.dtype == torch.float16:
                warn_or_err(f"Found {kind} {name} of {tensor.dtype}, expected torch.float32. When using amp.initialize, do "
                            "not call .half() on your model before passing it, no matter which opt_level you choose.")


def check_wrapper(model: Any) -> None:
    """Raise where `model` is no module, or one of the wrappers that go around an initialised model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"amp.initialize was given a model of {type(model).__name__}, expected a torch.nn.Module")
    if is_parallel_wrapper(model):
        raise RuntimeError(f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be "
                           "applied to the model(s) AFTER the model(s) have been returned from amp.initialize.")
    if isinstance(model, torch.jit.ScriptModule) or backend_of(model) is not None:
        raise TypeError(f"amp.initialize was given a {type(model).__name__}, expected a plain module: call it before "
                        "torch.jit or torch.compile, or pass compile=True")


def check_not_transformed(model: nn.Module) -> None:
    """Raise where casts of amp would meet the graphs of `apexfx.transform`, which hold their own."""
    for name, module in model.named_modules():
        if get_compiled(module) is not None:
            where = f"Submodule {name!r} of the incoming model" if name else "Incoming model"
            raise RuntimeError(f"{where} was made by apexfx.transform(): its graphs hold their casts, and amp would cast on top "
                               "of them. Give amp.initialize the module it was made from, with compile=True. For the loss "
                               "scale alone: amp.initialize(model, optimizer, opt_level='O0', cast_model_type=False, "
                               "loss_scale='dynamic')")


def patch_forward(model: nn.Module, patch: ForwardPatch) -> None:
    """Wrap the forward of `model`; a second time replaces the first wrapper."""
    earlier = model.__dict__.get(_PATCH)
    patch.own_forward = earlier.own_forward if earlier is not None else model.__dict__.pop("forward", None)
    cls = type(model)
    if earlier is None:
        model.__class__ = _amp_class(cls)
    model.__dict__[_PATCH] = patch
    if patch.executor is not None:
        for module in model.modules():
            if isinstance(module, nn.RNNBase) and not has_forward_pre_hook(module, _float_input):
                module.register_forward_pre_hook(_float_input, with_kwargs=True)


def cast_around(
    model: nn.Module, *, inputs: bool, outputs: torch.dtype | None, only: tuple[torch.dtype, ...] | None
) -> None:
    """Have a compiled model take and give the dtypes that a wrapped forward does, as far as its graphs do not.

    Args:
        inputs: float64 inputs become float32; the graphs cast all others.
        outputs, only: as in `ForwardPatch`.
    """
    if inputs:
        model.register_forward_pre_hook(_single_inputs, with_kwargs=True)
    if outputs is not None:
        cast = Cast(outputs, only=only, others=outputs if only is None else None)
        model.register_forward_hook(functools.partial(_cast_outputs, cast), prepend=True)


def _single_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cast = Cast(torch.float32, only=(torch.float64,))
    return cast(args), cast(kwargs)


def _cast_outputs(cast: Cast, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    return cast(result)


def _float_input(module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bring half inputs to the weights' dtype: torch compares the two before the executor sees the call."""
    if module.all_weights[0][0].dtype != torch.float32:
        return None
    cast = Cast(torch.float32, only=HALVES)
    return cast(args), cast(kwargs)


class _AmpModule:
    """Mixed into the class of a model whose forward amp wraps."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(super(), self, _AmpModule, _amp_class, protocol)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__[_PATCH].inputs in HALVES:
            save_float32(self)  # what was put in since
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__[_PATCH].inputs in HALVES:
            save_float32(self)
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def apexfx_before_transform(self, where: str, opt_level: str) -> str:
        """Refuse `apexfx.transform` where it would cast on top of amp; return a note on casts that its graphs hold, or "".

        Args:
            where: the module, as a message names it.
            opt_level: of the transform.
        """
        patch = self.__dict__[_PATCH]
        if patch.executor is not None:
            raise ValueError(f"apexfx: {where} was given to amp.initialize, which casts each of its calls in eager mode, so no "
                             "graph of it can be captured. Pass compile=True to amp.initialize, or let transform() alone decide")
        if patch.inputs not in HALVES:
            return ""
        if opt_level != "O0":
            raise ValueError(f"apexfx: {where} was given to amp.initialize, which has cast it to {patch.inputs}; "
                             f"opt_level={opt_level!r} would cast on top of that. Pass compile=True to "
                             "amp.initialize, or opt_level='O0' here for the other passes, or let transform() alone decide")
        return f"apexfx: {where} was given to amp.initialize: its casts to {patch.inputs} are part of the captured graphs"


@functools.cache
def _amp_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)  # keeps the signature, which Hugging Face inspects
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = self.__dict__[_PATCH]
        own = patch.own_forward if patch.own_forward is not None else functools.partial(cls.forward, self)
        if torch.compiler.is_compiling():
            return patch.call(own, args, kwargs) if patch.executor is None else _call_eagerly(patch, own, args, kwargs)
        return patch.call(own, args, kwargs)

    return subclass(cls, _AmpModule, forward=forward)


# ---- checkpoints in float32 ---------------------------------------------------------------------------------------------

# Set on a half parameter: its float32 master.
MASTER = "_amp_master"


def save_float32(model: nn.Module) -> None:
    """Have `state_dict` hold float32 for what was cast to half, and `load_state_dict` reach the masters."""
    for module in model.modules():
        if not has_state_dict_hook(module, _upcast):
            module.register_state_dict_post_hook(_upcast)
            module.register_load_state_dict_pre_hook(_load_master)


def _upcast(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    own = {"recurse": False, "remove_duplicate": False}
    for name, tensor in (*module.named_parameters(**own), *module.named_buffers(**own)):
        key = prefix + name
        if key in state_dict and tensor.dtype in HALVES:
            state_dict[key] = full_precision(tensor)


def full_precision(tensor: Tensor) -> Tensor:
    """Return the float32 value of a half tensor: its master where it has one and was not edited since, element by element."""
    master, tensor = getattr(tensor, MASTER, None), tensor.detach()
    if master is None or master.shape != tensor.shape:
        return tensor.float()
    master = master.detach().to(tensor.device)
    return torch.where(master.to(tensor.dtype) == tensor, master, tensor.float())


def _load_master(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        master = getattr(parameter, MASTER, None)
        loaded = state_dict.get(prefix + name)
        if master is not None and isinstance(loaded, Tensor) and loaded.shape == master.shape:
            with torch.no_grad():
                master.copy_(loaded)
