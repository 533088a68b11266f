"""What an update of a training loop does, seen from outside: its losses, gradients, steps, and the lines that make them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import tree_leaves, tree_map, versions
from ..compiler.forward_errors import place_of_user
from .in_float64 import CASTS, widened

_UNSCALE = "non_finite_check_and_unscale"
_HOW_ALONE = ("foreach", "fused", "capturable", "differentiable", "initial_lr", "params")  # options that change no update


class WatchedLoop(TorchFunctionMode):
    """What an update of a loop does: looks on at `backward()`, at writes of gradients, and at `optimizer.step()`.

    Attributes:
        params: by name, those that its optimizers hold.
        losses: what `backward()` was called on. gradients: after the last of these. stepped: at `optimizer.step()`.
        held: whether there were gradients before the first backward. writes: whether parameters change outside of a step.
        options: by parameter, of its group, at the step. modes: which modules train, at the first forward.
        wrote: of each op that wrote gradients in between, whether it is a GradScaler's, and the line.
        steps: how often each optimizer was stepped. autocast: its dtype, or None. at_backward, at_step: the last lines
            that did it.
    """

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], exact: bool) -> None:
        super().__init__()
        self._model, self._optimizers, self._exact, self._widens = model, optimizers, exact, exact
        self.autocast: torch.dtype | None = None
        held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        self.params = {name: p for name, p in model.named_parameters() if id(p) in held}
        model.register_forward_pre_hook(self._note_modes)
        for each in optimizers:
            each.register_step_pre_hook(self._before_step)
            each.register_step_post_hook(self._after_step)

    def start(self) -> None:
        self.losses: list[float] = []
        self.wrote: list[tuple[bool, str]] = []
        self.steps: dict[int, int] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.modes: dict[str, bool] = {}
        self.gradients = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.stepped = dict(self.gradients)
        self.held, self.writes, self.at_backward, self.at_step = False, False, "", ""
        self._written = versions(self.params.values())

    def finish(self) -> None:
        self.writes |= versions(self.params.values()) != self._written

    @property
    def left_out(self) -> list[str]:
        """The steps that are not called."""
        return [f"{type(each).__name__}.step()" for each in self._optimizers if id(each) not in self.steps]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = next(iter(self.params.values())).device.type if self.params else "cpu"
        if self.autocast is None and torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)
        if func is not Tensor.backward:
            name = getattr(func, "__name__", "")
            writes = name.endswith("_") and not name.startswith("__") or name in ("__set__", "__setitem__")
            if writes and self.losses and not self.steps and self._is_gradient(args):
                self.wrote.append((_UNSCALE in name, place_of_user("in the loop")))
            of_scaler = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.amp")  # whose numbers are float32
            if self._widens and not of_scaler and func is not Tensor.view:  # of bits as another dtype
                func, args, kwargs = CASTS.get(func, func), *tree_map(widened, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))
        if not self.losses:
            self.held = any(p.grad is not None and bool(p.grad.any()) for p in self.params.values())
        self.losses.append(float(args[0].detach()))
        self.at_backward = place_of_user("in the loop")
        func(*args, **(kwargs or {}))
        self.gradients = gradients_of(self.params)

    def _is_gradient(self, args: Any) -> bool:
        grads = {id(p.grad) for p in self.params.values() if p.grad is not None}
        return any(id(x) in grads or id(x) in map(id, self.params.values()) for x in tree_leaves(args) if isinstance(x, Tensor))

    def _note_modes(self, model: nn.Module, *_: Any) -> None:
        self.modes = self.modes or {name: module.training for name, module in model.named_modules()}

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.at_step, self._widens = place_of_user("in the loop"), False  # Muon computes in bfloat16 on both sides
        self.writes |= versions(self.params.values()) != self._written
        self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # of a GradScaler, where it is fused
            self.wrote.append((True, self.at_step))
        self.stepped.update({name: g / (1.0 if scale is None else scale) for name, g in gradients_of(
            {name: p for name, p in self.params.items() if id(p) in held}).items()})
        self.options.update(options_of(self._model, optimizer))

    def _after_step(self, *_: Any) -> None:
        self._written, self._widens = versions(self.params.values()), self._exact


def options_of(model: nn.Module, optimizers: Any) -> dict[str, dict[str, Any]]:
    """Return, by parameter, the class of its optimizer and the options of its group."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: {"class": type(each).__name__, **{k: v for k, v in group.items() if k not in _HOW_ALONE}}
            for each in listed(optimizers) for group in each.param_groups for p in group["params"] if id(p) in names}


def gradients_of(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the gradients of parameters, zeros for none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in params.items()}


def listed(given: Any) -> list[Any]:
    """Return what may be None, one or several as a list."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
