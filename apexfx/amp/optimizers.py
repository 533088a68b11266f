"""What `initialize` does to an optimizer: masters in its groups, and steps that skip on a flag.

Work around a step is done by torch's own step hooks, so a scheduler may wrap `step` before or after. `zero_grad`,
`add_param_group` and the methods that downstream code calls come from a subclass of the optimizer's class, of the same
name, that the instance is moved to; so `deepcopy` and pickling keep working.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from .._torch import has_step_pre_hook, reads_found_inf
from ..precision.rules import HALVES
from ..subclassing import reduced, subclass
from .optimizer_state import AmpOptimizerState
from .scaler import LossScaler
from .session import Session


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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; with master weights, the given dict gets masters in place of half parameters."""
        stash = self.__dict__.get("_amp_stash")
        if stash is not None:
            params = param_group["params"]
            if isinstance(params, set):
                raise TypeError("optimizer parameters need to be organized in ordered collections, but the ordering of "
                                "tensors in sets will change between runs. Please use a list instead.")
            param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
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
            if not has_step_pre_hook(self, _before_step):  # loading a state dict comes here too
                register_hooks(self)

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
    register_hooks(optimizer)
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
    return subclass(cls, AmpOptimizer)


def register_hooks(optimizer: Any) -> None:
    """Register torch's hooks for the work around a step and around checkpoints."""
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    optimizer.register_state_dict_pre_hook(_settle)
    optimizer.register_load_state_dict_pre_hook(_settle)


def _settle(optimizer: Any, *state_dict: Any) -> None:
    _take_flag(optimizer)
    optimizer._amp_stash.predicated.settle(optimizer)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stash: AmpOptimizerState = optimizer._amp_stash
    _take_flag(optimizer)  # of a step that raised
    stash.reconcile()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        # The flag is raised inside it, too late for an optimizer that reads one as it begins: be ready to undo.
        stash.predicated.before(optimizer, without_grad=True)
        wrapped = _with_masters_copied(closure, stash)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})
    stash.predicated.settle(optimizer)
    if stash.found_inf is None:
        return None
    if is_clear(stash.found_inf):
        stash.found_inf = None
    elif _skips_on_flag(optimizer):
        optimizer.found_inf = stash.step_flag = stash.found_inf
        if _makes_state(optimizer):
            stash.predicated.before(optimizer, tensors=False)
    else:
        stash.predicated.before(optimizer)
    return None


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stash: AmpOptimizerState = optimizer._amp_stash
    found_inf, stash.found_inf = stash.found_inf, None
    _take_flag(optimizer)
    if found_inf is not None:
        stash.predicated.after(optimizer, found_inf)
    else:
        stash.predicated.discard()
    stash.copy_masters_to_model()
    stash.drop_master_grads()
    if stash.session is not None:
        stash.session.end_iteration()
        stash.session.report_overflows()


def is_clear(flag: Tensor) -> bool:
    """Return whether the host can tell without waiting that `flag` is 0."""
    return flag.device.type == "cpu" and not flag.numpy()


def _take_flag(optimizer: Any) -> None:
    """Take the flag off `optimizer` that `_before_step` put there; a GradScaler's stays."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if stash.step_flag is not None and optimizer.__dict__.get("found_inf") is stash.step_flag:
        del optimizer.found_inf
    stash.step_flag = None


def _skips_on_flag(optimizer: Any) -> bool:
    """Return whether `optimizer` reads `found_inf` itself: this package's, and torch's with fused=True."""
    return reads_found_inf(optimizer) and all(
        group.get("fused", True) for group in optimizer.param_groups  # a loaded state dict may have turned torch's off
    )


def _makes_state(optimizer: Any) -> bool:
    """Return whether the step that begins may be a parameter's first, which makes its state."""
    state = optimizer.state
    return any(p.grad is not None and p not in state for group in optimizer.param_groups for p in group["params"])


def _with_masters_copied(closure: Any, stash: AmpOptimizerState) -> Any:
    """Return `closure` for an optimizer that moves the masters between its evaluations."""
    calls = 0

    @functools.wraps(closure)
    def evaluate() -> Any:
        nonlocal calls
        if calls:
            stash.copy_masters_to_model()
        calls += 1
        return closure()

    return evaluate
