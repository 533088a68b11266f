"""FP16_Optimizer: float32 masters and loss scaling around any optimizer, after apex.fp16_utils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..amp.optimizers import process_optimizer
from ..amp.properties import Properties
from ..amp.scaler import LossScaler, check_state
from ..amp.session import Session


class FP16_Optimizer:  # Apex's name
    """Wraps `init_optimizer`, whose half parameters are replaced by float32 masters at once.

    Use `optimizer.backward(loss)` in place of `loss.backward()`. A step after an overflow is skipped on the device.

    Args:
        static_loss_scale: the scale where it is not dynamic.
        dynamic_loss_args: init_scale, scale_factor, scale_window, min_loss_scale, max_loss_scale.
        verbose: print the overflow messages.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        device = next((p.device for group in init_optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        self.loss_scaler = LossScaler("dynamic" if dynamic_loss_scale else static_loss_scale, device=device,
                                      **((dynamic_loss_args or {}) if dynamic_loss_scale else {}))
        session = Session(Properties(), torch.float16, [], None)
        self._stash = process_optimizer(init_optimizer, session, master_weights=True)
        self._found_inf: Tensor | None = None
        self._unscaled = False  # what the float32 parameters of the model hold as gradients
        self.first_closure_call_this_step = True

    # ---- names of Apex ------------------------------------------------------------------------------------------------

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        return self._stash.fp16_groups

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        return self._stash.fp32_from_fp16_groups

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        return self._stash.fp32_from_fp32_groups

    @property
    def all_fp16_params(self) -> list[Tensor]:
        return self._stash.all_fp16_params

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        return self._stash.all_fp32_from_fp16_params

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        return self._stash.all_fp32_from_fp32_params

    @property
    def overflow(self) -> bool:
        """Whether the last backward pass overflowed; reading it waits for the device."""
        return self._found_inf is not None and self.loss_scaler.dynamic and bool(self._found_inf)

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    # ---- one iteration ------------------------------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zero, or set to None, the gradients of masters and model."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        self._stash.all_fp32_grad_stash, self._unscaled = [], False
        self._stash.found_inf = None  # of gradients that are gone

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss, then `update_master_grads()` unless told not to.

        Gradients accumulate scaled in the model's parameters, until the masters get them.
        """
        if self._unscaled:
            self._stash.set_float32_aside()
            self._unscaled = False
        self.loss_scaler.scaled(loss).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the model's gradients, unscaled, to the masters; check them and move the scale."""
        found_inf = self.loss_scaler.new_flag()
        for master in self._stash.all_fp32_from_fp16_params:
            master.grad = None  # the model's gradient holds everything accumulated so far
        self._stash.unscale(self.loss_scaler, found_inf)
        self._unscaled = True
        skip = self.loss_scaler.update_scale(found_inf)
        self._found_inf = skip
        if skip is not None:
            self._stash.skip_on(skip)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients by their norm together; return the norm, or -1 after an overflow (on the device)."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        if self._found_inf is None or not self.loss_scaler.dynamic:
            return norm
        return torch.where(self._found_inf.to(norm.device) != 0, torch.full_like(norm, -1.0), norm)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and round them into the model; nothing changes after an overflow.

        A closure must call `backward` of this object. It is evaluated again while it overflows, as in Apex, which
        waits for the device.
        """
        if closure is not None:
            return self._step_with_closure(closure)
        self.optimizer.step()
        self._report()
        return None

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            if not self.first_closure_call_this_step:  # the optimizer has moved the masters since
                self._stash.copy_masters_to_model()
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                self._stash.found_inf = None
                self._report()
                loss = closure()
            return loss

        self.first_closure_call_this_step = True
        result = self.optimizer.step(evaluate)
        self.first_closure_call_this_step = True
        return result

    def _report(self) -> None:
        if self.verbose:
            self.loss_scaler.report_overflows(printer=print)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients by group; None, with a warning, after an overflow. Waits for the device."""
        if self.overflow:
            print("Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state.  "
                  "Gradients are currently invalid (may be inf, nan, or stale).  Returning None.")
            return None
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]] for group in self.optimizer.param_groups
        ]

    # ---- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return Apex's keys; everything in it is plain, so `torch.load(weights_only=True)` reads it."""
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or what Apex's did (its scaler is an object there); masters are copied.

        Raises:
            ValueError: an entry is missing, or does not fit. The optimizer's own are checked as it loads them, before the others.
        """
        scaler = _checked(state_dict, self.fp32_from_fp16_groups)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.loss_scaler.dynamic = self.dynamic_loss_scale
        self.loss_scaler.load_state_dict(scaler)
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self._found_inf = self._stash.found_inf = None
        for masters, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"]):
            for master, value in zip(masters, saved):
                master.copy_(value)
        self._stash.copy_masters_to_model()

    def __getstate__(self) -> Any:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")


def _checked(state: Any, groups: list[list[Tensor]]) -> dict[str, Any]:
    """Return the scaler's part of a state; raise ValueError where the state is not that of an FP16_Optimizer of these masters."""
    names = ("loss_scaler", "dynamic_loss_scale", "first_closure_call_this_step", "optimizer_state_dict", "fp32_from_fp16")
    missing = [name for name in names if name not in state] if isinstance(state, dict) else names
    if missing:
        raise ValueError(f"FP16_Optimizer.load_state_dict was given a state that lacks {', '.join(missing)}; give it what "
                         "state_dict() has returned")
    scaler = state["loss_scaler"]
    if not isinstance(scaler, dict):
        scaler = {name: getattr(scaler, f"_{name}", None) for name in ("loss_scale", "unskipped")}
    check_state(scaler)
    saved = state["fp32_from_fp16"]
    shapes = [[getattr(master, "shape", None) for master in group] if isinstance(group, list) else group for group in saved] \
        if isinstance(saved, list) else saved
    if shapes != [[master.shape for master in group] for group in groups]:
        raise ValueError("FP16_Optimizer.load_state_dict was given masters (fp32_from_fp16) of other shapes than its own: "
                         "it was saved for another model")
    return scaler
