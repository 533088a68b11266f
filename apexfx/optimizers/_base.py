"""What the fused optimizers share: gathering tensors, device scalars, master weights, and checkpoints.

A step is one op call per group (per device, and per kind of parameter where a group mixes kinds): the op unscales,
clips, updates and writes the low-precision model copy while it reads each gradient once. Nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from ..config import HALVES
from ..ops.multi_tensor import by_device, multi_tensor_l2norm
from ._checkpoints import check_numbers, lacking, unwrap_state, wrapped_state
from .state_layout import Layout
from .update import Update, call_op, clip_coefficient, counts_updates, inverse_of

_DTYPES = (torch.float32, *HALVES, torch.float64)


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimizers; a subclass names its op and state, and gives the op's hyperparameters.

    Its op takes (params, grads, *states, model copies[, step], lr, *hyperparameters, device scalars by keyword).

    Follows torch's conventions: closures, hooks, `state_dict` (float32 state survives, for parameters of any dtype),
    and GradScaler's `grad_scale` / `found_inf` attributes. When `grad_scale` is set and `found_inf` is not, the
    gradients are checked here and the step is skipped on the device if one is not finite. A step that was not skipped
    leaves the gradients unscaled.

    A CUDA graph replays the kernels of the captured step alone, so a capture needs `capturable=True` and, before it, a step in
    which every parameter has a gradient; else RuntimeError.

    After a step that needed them, `last_grad_norm` and `last_found_inf` hold the norm of all (unscaled) gradients and
    the flag, as tensors on the device.
    """

    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler.step
    _op: str  # its name
    _state_names: tuple[str, ...] = ()  # tensors like the parameter, float32, zero at first
    _scalar_state_names: tuple[str, ...] = ()  # one number a parameter, made by the subclass
    own_options = ("set_grad_none", "capturable", "master_weights", "max_grad_norm")  # which it has beside its groups
    clip_epsilon = 1e-6  # added to the norm that divides `max_grad_norm`
    last_grad_norm: Tensor | None = None
    last_found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        set_grad_none: bool,
        capturable: bool,
        master_weights: bool,
        max_grad_norm: float | None,
        **defaults: Any,
    ):
        check_numbers(type(self).__name__, {**defaults, "max_grad_norm": max_grad_norm})
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        self.max_grad_norm = max_grad_norm
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; under `capturable` its learning rate becomes a tensor on the parameters' device."""
        check_numbers(type(self).__name__, param_group)
        super().add_param_group(param_group)
        self._normalize(self.param_groups[-1])

    def _normalize(self, group: dict[str, Any]) -> None:
        """Bring `step` (and `lr` under `capturable`) to float32 tensors on the device of the group's parameters."""
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        step = group.get("step", 0)
        group["step"] = torch.as_tensor(step, dtype=torch.float32).detach().to(device, copy=True).reshape(())
        if self.capturable:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop (None) or zero the gradients; by default as `set_grad_none` says."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's result."""
        return self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        # Apart from `step`, which torch wraps once a class to run hooks: a subclass's step must not run them twice.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if captured:
            self._check_capturable()
        gathered = [[(update, [p.grad for p in update.params])
                     for update in self._gather(group, self._has_gradient, captured=captured)] for group in self.param_groups]
        scalars = self._scalars([grad for updates in gathered for _, grads in updates for grad in grads])
        for group, updates in zip(self.param_groups, gathered):
            for update, grads in updates:
                # Every update of a group starts from the same count; the op counts up.
                device = update.params[0].device
                alone = len(updates) == 1 and device == group["step"].device
                update.step = group["step"] if alone else group["step"].to(device, copy=True)
                moved = {k: v.to(device, non_blocking=True) for k, v in scalars.items()}
                self._run_update(update, grads, moved)
                if not alone and update is updates[-1][0]:
                    group["step"].copy_(update.step)
                written = grads if "grad_scale" in moved else []
                torch.autograd.graph.increment_version([*update.params, *update.masters, *written])
        return loss

    @staticmethod
    def _run_update(update: Update, grads: list[Tensor], scalars: dict[str, Tensor]) -> None:
        """Call the op, which unscales the gradients as torch's fused optimizers do, and count the step where the op does not."""
        lr, lr_tensor = _learning_rate(update.group, update.params[0].device)
        models = update.params if update.masters else []
        call_op(update.op, update.masters or update.params, grads, list(update.states.values()), models, update.step, lr,
                update.numbers, {"lr_tensor": lr_tensor, **scalars}, unscales="grad_scale" in scalars)
        if not counts_updates(update.op):
            update.step.add_((scalars["found_inf"] == 0).float() if "found_inf" in scalars else 1.0)

    def _has_gradient(self, param: Tensor) -> bool:
        grad = param.grad
        if grad is not None and grad.is_sparse:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients; use torch.optim.SparseAdam")
        return grad is not None

    def _hyperparameters(self, group: dict[str, Any], first_run: bool) -> tuple[Any, ...]:
        """Return what the op takes after the learning rate, in its order.

        Args:
            first_run: whether the parameters' state was made in this step.
        """
        raise NotImplementedError

    def _check_capturable(self) -> None:
        """Raise where the replays of a captured step would all use the learning rate of the capture."""
        name = type(self).__name__
        if not self.capturable:
            raise RuntimeError(f"{name}.step() in the capture of a CUDA graph would freeze the learning rate in it; make the "
                               "optimizer with capturable=True")
        for group in self.param_groups:
            lr = group["lr"]
            if not isinstance(lr, Tensor) or any(lr.device.type != param.device.type for param in group["params"]):
                raise RuntimeError(f"{name}.step() in the capture of a CUDA graph found the learning rate {lr!r}, which the "
                                   "graph would freeze; set it in place, group['lr'].fill_(value)")

    def updates_of(self, trained: Collection[int], layout: Layout) -> list[Update]:
        """Return the updates of a step of a whole graph; missing state is made.

        Args:
            trained: ids of the parameters to update.
            layout: what this rank has of each parameter.
        """
        # Without dampening a first buffer of zeros gives what SGD's first step does.
        return [update for group in self.param_groups
                for update in self._gather(group, lambda p: id(p) in trained, layout)]

    def _gather(self, group: dict[str, Any], wanted: Callable[[Tensor], bool], layout: Layout | None = None, *,
                captured: bool = False) -> list[Update]:
        """Return the updates of the parameters that are wanted, one for each kind of them; of a whole graph by `layout`."""
        updates: dict[tuple[Any, ...], Update] = {}
        names = (*self._names(group), *self._scalar_state_names)
        for param in group["params"]:
            if not wanted(param):
                continue
            state, first_run = self.state[param], False
            if self.master_weights or any(name not in state for name in names):
                first_run = any(name not in state for name in self._names(group))
                if fault := lacking(type(self).__name__, state, names):
                    raise ValueError(f"{type(self).__name__}: the state of a parameter of shape {list(param.shape)} {fault}. "
                                     "Load what the same class has saved, or begin with a new optimizer")
                if param.dtype not in _DTYPES:
                    raise RuntimeError(f"{type(self).__name__} got a parameter of {param.dtype}; expected float32, float16, "
                                       "bfloat16 or float64")
                if captured and self._lacks_state(group, param, state):
                    raise RuntimeError(f"{type(self).__name__}.step() in the capture of a CUDA graph would make the state of a "
                                       f"parameter of shape {tuple(param.shape)}, and every replay would make it anew; take one "
                                       "step, in which every parameter has a gradient, before the capture")
                self._init_state(group, layout.rows(param) if layout is not None else param, state)
            if layout is not None:
                state.update((name, layout.placed(layout.as_state(held, param), param)) for name, held in state.items()
                             if isinstance(held, Tensor))
            master = state.get("master_param")
            key = (param.device, master is not None, first_run, param.dtype is torch.float64)
            update = updates.get(key)
            if update is None:
                numbers = self._hyperparameters(group, first_run and layout is None)
                update = updates[key] = Update(self._op, group, numbers, states={name: [] for name in names}, step=group["step"])
            update.params.append(param)
            if master is not None:
                update.masters.append(master)
            for name, tensors in update.states.items():
                tensors.append(state[name])
        return list(updates.values())

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._state_names

    def _state_dtype(self, param: Tensor, name: str) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else torch.float32

    def _needs_master(self, group: dict[str, Any], param: Tensor) -> bool:
        return self.master_weights and param.dtype in HALVES

    def _lacks_state(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> bool:
        masters = ("master_param",) if self._needs_master(group, param) else ()
        return any(name not in state for name in (*self._names(group), *self._scalar_state_names, *masters))

    def _init_state(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        if self._needs_master(group, param) and "master_param" not in state:
            state["master_param"] = param.detach().to(torch.float32, copy=True, memory_format=torch.preserve_format)
        for name in self._names(group):
            if name not in state:
                dtype = self._state_dtype(param, name)
                state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def _scalars(self, grads: list[Tensor]) -> dict[str, Tensor]:
        """Return the device scalars of this step: grad_scale, found_inf, clip_coefficient, those that apply."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scalars = {"grad_scale": grad_scale, "found_inf": found_inf}
        scalars = {k: v.detach().float().reshape(()) for k, v in scalars.items() if v is not None}
        clips = self.max_grad_norm is not None and self.max_grad_norm > 0.0
        if grads and (clips or ("grad_scale" in scalars and "found_inf" not in scalars)):
            inverse = inverse_of(scalars["grad_scale"], torch.float32) if "grad_scale" in scalars else None
            norm, flag = global_norm(grads, inverse)
            self.last_grad_norm, self.last_found_inf = norm, flag
            if "grad_scale" in scalars and "found_inf" not in scalars:
                scalars["found_inf"] = flag
            if clips:
                scalars["clip_coefficient"] = clip_coefficient(norm, self.max_grad_norm, self.clip_epsilon)
        return scalars

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's layout; every parameter also gets the group's `step`, so that torch's optimizer loads it."""
        state_dict = super().state_dict()
        state_dict["state"] = dict(state_dict["state"])
        for group in state_dict["param_groups"]:
            for index in group["params"]:
                if index in state_dict["state"]:
                    state_dict["state"][index] = {**state_dict["state"][index], "step": group["step"].clone()}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of its torch counterpart; state keeps float32 whatever it was.

        Raises:
            ValueError: other groups than this optimizer's, or state of another optimizer or list of parameters.
        """
        # Hooks around torch's own loading: the last to see the dict going in, and the first to see the state after.
        before = self.register_load_state_dict_pre_hook(wrapped_state)
        after = self.register_load_state_dict_post_hook(unwrap_state, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _translate(self, group: dict[str, Any]) -> dict[str, Any]:
        """Check a loaded group, and turn torch's hyperparameter names into ours."""
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise ValueError(f"{type(self).__name__} cannot load a state dict with {name}=True")
        return group

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.own_options}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._normalize(group)


def _learning_rate(group: dict[str, Any], device: torch.device) -> tuple[float, Tensor | None]:
    """Return (number, None) or (0.0, tensor on the device); a host tensor is read as a number, without a sync."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return float(lr), None
    if lr.device.type == "cpu" and device.type != "cpu":
        return float(lr), None
    return 0.0, lr.detach().to(device, torch.float32)


def global_norm(grads: list[Tensor], inv_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of all tensors together and the flag that one is not finite, on the first one's device."""
    norms, flags = [], []
    for device, (on_device,) in by_device(grads).items():
        scale = None if inv_scale is None else inv_scale.to(device, non_blocking=True)
        norm, _, flag = multi_tensor_l2norm(on_device, scale)
        norms.append(norm)
        flags.append(flag)
    if len(norms) == 1:
        return norms[0], flags[0]
    first = norms[0].device
    together = torch.stack([norm.to(first, non_blocking=True) for norm in norms])
    return torch.linalg.vector_norm(together), torch.stack([f.to(first, non_blocking=True) for f in flags]).amax()

