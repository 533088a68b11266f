"""What amp keeps on an optimizer: its parameters by kind, the gradients set aside, and the flag to skip on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import foreach_add_, foreach_copy_
from ..config import HALVES
from ..distributed.no_sync import local_gradients
from .models import MASTER
from .scaler import LossScaler
from .session import Session


class AmpOptimizerState:
    """`optimizer._amp_stash`, with Apex's attribute names.

    With master weights, "fp16" parameters are the model's half ones (of either half type) and the optimizer's groups
    hold float32 masters instead of them. Without, every parameter is its own master.

    Attributes:
        found_inf: flag tensor of the overflows since the last step, or None: the step is skipped where it is not 0.
        in_scale_loss: a `scale_loss` is to unscale its gradients.
        params_have_scaled_gradients: a `scale_loss(..., delay_unscale=True)` left gradients scaled.
        has_unscaled_gradients: one without has unscaled them, and no step was made since.
    """

    def __init__(self, session: Session, *, master_weights: bool) -> None:
        self.session = session
        self.master_weights = master_weights
        self.lazy_init_called = False
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.has_unscaled_gradients = False
        self.in_scale_loss = False
        self.found_inf: Tensor | None = None
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        self.all_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp32_params: list[Tensor] = []
        self.all_fp16_grad_stash: list[Tensor | None] = []
        self.all_fp32_grad_stash: list[Tensor | None] = []
        self._known: set[Tensor] = set()  # masters, and what is its own

    # ---- parameters -------------------------------------------------------------------------------------------------

    def adopt_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Take in what is new in the optimizer's groups: added by hand, or trained only from now on."""
        for number, group in enumerate(optimizer.param_groups):
            for parameter, master in self.adopt(group, number).items():
                if parameter in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(parameter)

    def adopt(self, group: dict[str, Any], number: int) -> dict[Tensor, Tensor]:
        """Take in the new parameters of a group, put masters in place of half ones; return {model parameter: master}."""
        halves: list[Tensor] = []
        masters: list[Tensor] = []
        others: list[Tensor] = []
        for i, parameter in enumerate(group["params"]):
            if parameter in self._known or not parameter.requires_grad:
                continue
            if not parameter.is_floating_point():
                raise TypeError(f"Optimizer's parameters must be floating tensors. Received {parameter.dtype}")
            if not (self.master_weights and parameter.dtype in HALVES):
                others.append(parameter)
                continue
            master = parameter.detach().clone().float().requires_grad_()
            group["params"][i] = master
            halves.append(parameter)
            masters.append(master)
        for groups, added in ((self.fp16_groups, halves), (self.fp32_from_fp16_groups, masters),
                              (self.fp32_from_fp32_groups, others)):
            groups += [[] for _ in range(len(groups), number + 1)]
            groups[number] += added
        self.all_fp16_params += halves
        self.all_fp32_from_fp16_params += masters
        self.all_fp32_from_fp32_params += others
        self._known.update((*masters, *others))
        if halves:
            self.link()
        return dict(zip(halves, masters))

    def link(self) -> None:
        """Let every half parameter know its master, for checkpoints."""
        for parameter, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params):
            setattr(parameter, MASTER, master)

    @torch.no_grad()
    def reconcile(self) -> None:
        """Bring edits of the model's half parameters (a broadcast, a clamp) into the masters, element by element.

        Each is looked at, since one through `.data` leaves no trace.
        """
        for parameter, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params):
            master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Round every master into its model parameter."""
        if self.all_fp16_params:
            foreach_copy_(self.all_fp16_params, self.all_fp32_from_fp16_params)
            self.link()  # another optimizer of the same parameters may have stepped last

    def zero_model_grads(self, set_to_none: bool) -> None:
        """Drop or zero the gradients of the model's half parameters, which the optimizer does not know."""
        for parameter in self.all_fp16_params:
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.detach_()
                    parameter.grad.zero_()

    def drop_master_grads(self) -> None:
        """Set the gradients of masters to None; the model's own stay, scaled, as in Apex."""
        for master in self.all_fp32_from_fp16_params:
            master.grad = None

    # ---- gradients around a backward pass -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Set accumulated gradients aside, so that only new ones are unscaled and checked."""
        if not any(p.grad is not None for p in self._all_parameters()):
            self.forget_gradients()
        for p in self._local_parameters():
            local_gradients[p] = p.grad is not None and bool(p.grad.any())
        if self.all_fp16_params:
            self.all_fp16_grad_stash = _take_grads(self.all_fp16_params)
        self.set_float32_aside()

    def set_float32_aside(self) -> None:
        """Do that for the parameters that are their own masters, so that `unscale` leaves them as they are and adds them."""
        self.all_fp32_grad_stash = _take_grads(self.all_fp32_from_fp32_params)

    def _local_parameters(self) -> list[Tensor]:
        """Return the parameters that have accumulated inside of a data-parallel model's `no_sync()`."""
        if not local_gradients:
            return []
        return [p for p in (*self.all_fp16_params, *self.all_fp32_from_fp32_params) if p in local_gradients]

    def _all_parameters(self) -> list[Tensor]:
        return [*self.all_fp16_params, *self.all_fp32_from_fp16_params, *self.all_fp32_from_fp32_params]

    def forget_gradients(self) -> None:
        """Forget what is known of gradients that are gone: whether they overflowed, are scaled, or are not any more."""
        self.found_inf, self.params_have_scaled_gradients, self.has_unscaled_gradients = None, False, False

    def check_unscaled(self) -> None:
        """Refuse to add scaled gradients to those that are not scaled any more, whose sum would be unscaled once more.

        Raises:
            RuntimeError: there are some.
        """
        if self.has_unscaled_gradients and not self.params_have_scaled_gradients and any(
                p.grad is not None and bool(p.grad.any()) for p in self._all_parameters()):
            raise RuntimeError("amp.scale_loss was given delay_unscale=True after a scale_loss that has unscaled its gradients, "
                               "with neither step() nor zero_grad() in between: those would be unscaled once more. Give "
                               "delay_unscale=True to all but the last")

    def put_back(self) -> None:
        """Undo `prepare` after an exception: what the failed backward left is dropped."""
        for parameters, stash in (
            (self.all_fp16_params, self.all_fp16_grad_stash),
            (self.all_fp32_from_fp32_params, self.all_fp32_grad_stash),
        ):
            for parameter, grad in zip(parameters, stash or [None] * len(parameters)):
                parameter.grad = grad
        self._forget_stash()

    @torch.no_grad()
    def unscale(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Unscale the new gradients, add what was set aside, and set `found_inf` where a new one is not finite."""
        new, outputs, add_to, added = [], [], [], []
        for parameter, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params):
            if parameter.grad is None:
                continue
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            unscaled = torch.empty_like(grad, dtype=torch.float32)
            new.append(grad)
            outputs.append(unscaled)
            if master.grad is None:
                master.grad = unscaled
            else:
                add_to.append(master.grad)
                added.append(unscaled)
        stash = self.all_fp32_grad_stash or [None] * len(self.all_fp32_from_fp32_params)
        for parameter, earlier in zip(self.all_fp32_from_fp32_params, stash):
            grad = parameter.grad
            if grad is None:
                parameter.grad = earlier
            elif grad.is_sparse or earlier is not None and earlier.is_sparse:
                grad = grad.coalesce() if grad.is_sparse else grad
                values = grad.values() if grad.is_sparse else grad
                scaler.unscale([values], [values], found_inf)
                parameter.grad = grad if earlier is None else earlier + grad
            else:
                new.append(grad)
                outputs.append(grad)
                if earlier is not None:
                    add_to.append(grad)
                    added.append(earlier)
        scaler.unscale(new, outputs, found_inf)
        if add_to:
            foreach_add_(add_to, added)
        self._forget_stash()

    def _forget_stash(self) -> None:
        for p in self._local_parameters():
            local_gradients[p] = False
        self.all_fp16_grad_stash = []
        self.all_fp32_grad_stash = []

    def takes_closures(self) -> bool:
        """Return whether steps may be given a closure: none is skipped, and there are no masters that move within one."""
        scalers = self.session.scalers if self.session is not None else []
        return not scalers or not self.master_weights and not any(scaler.dynamic for scaler in scalers)

    def skip_on(self, found_inf: Tensor) -> None:
        """Skip the next step where `found_inf`, or a flag given before it, is not 0."""
        if self.found_inf is not None:
            found_inf = torch.maximum(self.found_inf, found_inf.to(self.found_inf.device, non_blocking=True))
        self.found_inf = found_inf

    # ---- copies ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "found_inf": None, "session": None, "in_scale_loss": False}

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpOptimizerState:
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__getstate__().items()})
        duplicate.session = self.session
        return duplicate


def _take_grads(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients off `parameters`; [] where there are none."""
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return [] if all(grad is None for grad in grads) else grads
