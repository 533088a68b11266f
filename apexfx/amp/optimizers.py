"""What `initialize` does to an optimizer: masters in its groups, and steps that skip on a flag.

`step`, `zero_grad`, `add_param_group` and the methods that downstream code calls come from a subclass of the optimizer's
class, of the same name, that the instance is moved to; so `deepcopy` and pickling keep working.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch import reads_found_inf
from ..config import HALVES
from ..subclassing import reduced, subclass
from .scaler import LossScaler
from .session import Session
from .stash import AmpOptimizerState


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside a wrapper such as LARC."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    return optimizer if inner is None else unwrap(inner)


class AmpOptimizer:
    """Mixed into the class of an initialised optimizer."""

    _amp_stash: AmpOptimizerState

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop (None) or zero the gradients of the model and of the masters."""
        if set_to_none is None:
            set_to_none = bool(getattr(self, "set_grad_none", True))
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]
        self._amp_stash.drop_master_grads()
        self._amp_stash.zero_model_grads(set_to_none)
        self._amp_stash.forget_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; with master weights, the given dict gets masters in place of half parameters."""
        stash = self.__dict__.get("_amp_stash")
        if stash is not None:
            params = param_group["params"]
            if isinstance(params, set):
                raise TypeError("optimizer parameters need to be organized in ordered collections, but the ordering of "
                                "tensors in sets will change between runs. Please use a list instead.")
            param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
            if not {*param_group["params"]}.isdisjoint(stash.all_fp16_params):
                raise ValueError("some parameters appear in more than one parameter group")  # torch sees their masters alone
            stash.adopt(param_group, len(self.param_groups))  # type: ignore[attr-defined]
        super().add_param_group(param_group)  # type: ignore[misc]

    # ---- names that downstream code reaches for ---------------------------------------------------------------------

    def _lazy_init_maybe_master_weights(self) -> None:
        self._amp_stash.lazy_init_called = True

    def _amp_lazy_init(self) -> None:
        self._amp_stash.lazy_init_called = True

    def _master_params_to_model_params(self) -> None:
        self._amp_stash.copy_masters_to_model()

    def _prepare_amp_backward(self) -> None:
        self._amp_stash.prepare()

    def _post_amp_backward(self, scaler: LossScaler) -> None:
        found_inf = scaler.new_flag()
        self._amp_stash.unscale(scaler, found_inf)
        if scaler.dynamic:
            self._amp_stash.skip_on(found_inf)

    # ---- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_amp_stash": self._amp_stash}  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if "_amp_stash" in self.__dict__:
            self._amp_stash.link()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(super(), self, AmpOptimizer, amp_class, protocol)


def process_optimizer(optimizer: torch.optim.Optimizer, session: Session, *, master_weights: bool) -> AmpOptimizerState:
    """Prepare `optimizer` in place; return its state of amp. Where it gets masters, gradients made before are dropped.

    Raises:
        RuntimeError: it was given to `initialize` before.
    """
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
    stash = AmpOptimizerState(session, master_weights=master_weights)
    stash.adopt_all(optimizer)
    if master_weights:
        for parameter in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params):
            parameter.grad = None
    _warn_of_half_sgd(optimizer)
    stash.lazy_init_called = True
    optimizer.__class__ = amp_class(type(optimizer))
    optimizer._amp_stash = stash
    if "step" in vars(optimizer):  # a scheduler that was made before has wrapped the method
        own = optimizer.step
        optimizer.step = types.MethodType(_with_amp(functools.wraps(own)(lambda self, *args, **kwargs: own(*args, **kwargs))),
                                          optimizer)
    if stash.all_fp16_params:
        optimizer.load_state_dict(optimizer.state_dict())  # state made before follows the masters' dtype
    return stash


def _warn_of_half_sgd(optimizer: torch.optim.Optimizer) -> None:
    """Warn of half parameters on the CPU in torch's SGD with fused=True.

    Its kernel leaves whole vectors of them as they are, and reads their momentum as if it were float32, uninitialised memory
    past its end included (pytorch/pytorch#191763; torch up to 2.13).
    """
    if isinstance(optimizer, torch.optim.SGD) and any(
        group.get("fused") and any(p.is_cpu and p.dtype in HALVES for p in group["params"]) for group in optimizer.param_groups
    ):
        warnings.warn("amp.initialize was given torch.optim.SGD(fused=True) with half parameters on the CPU, most of which it "
                      "leaves as they are (https://github.com/pytorch/pytorch/issues/191763); pass fused=False or take "
                      "apexfx.optimizers.FusedSGD", stacklevel=4)


@functools.cache
def amp_class(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return subclass(cls, AmpOptimizer, step=_with_amp(cls.step))


def _with_amp(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `step` with the work around it: it is left out where the gradients overflowed."""

    @functools.wraps(step)  # its marks too, of which one tells torch that its step hooks run inside
    def amp_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        stash: AmpOptimizerState = self._amp_stash
        if (args and args[0] is not None or kwargs.get("closure") is not None) and not stash.takes_closures():
            raise RuntimeError("amp: step() was given a closure, and whether its gradients overflow shows too late to skip the "
                               "step or to move the masters; call the closure, then step(). With a static loss_scale and without "
                               "master weights a closure may be given")
        found_inf, stash.found_inf, stash.has_unscaled_gradients = stash.found_inf, None, False
        result = None
        if found_inf is None or _skips_on_flag(self) or not is_set(found_inf):
            stash.reconcile()
            with _flagged(self, found_inf):
                result = step(self, *args, **kwargs)
            stash.copy_masters_to_model()
        stash.drop_master_grads()
        if stash.session is not None:
            stash.session.report_overflows()
        return result

    return amp_step


@contextlib.contextmanager
def _flagged(optimizer: Any, found_inf: Tensor | None) -> Iterator[None]:
    """Let `optimizer` read the flag as `optimizer.found_inf`; one that a GradScaler put there without amp stays."""
    if found_inf is None or not _skips_on_flag(optimizer):
        yield
        return
    optimizer.found_inf = found_inf
    try:
        yield
    finally:
        del optimizer.found_inf


def is_set(flag: Tensor) -> bool:
    """Return whether `flag` is not 0; waits for the device."""
    return bool(flag.cpu().numpy().any())


def _skips_on_flag(optimizer: Any) -> bool:
    """Return whether the coming step reads `found_inf` itself: this package's optimizers, and torch's with fused=True.

    Not a step that makes state: what it makes would stay where the step is skipped.
    """
    state, groups = optimizer.state, optimizer.param_groups
    return (reads_found_inf(optimizer)
            and all(group.get("fused", True) for group in groups)  # a loaded state dict may have turned torch's off
            and all(p in state for group in groups for p in group["params"] if p.grad is not None))
