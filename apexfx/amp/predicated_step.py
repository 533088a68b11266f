"""A step of any optimizer that undoes itself on the device where a flag is set, without asking the flag.

Before the step, every tensor it may write is copied; after it, `torch.where(flag, copy, tensor)` puts the old bits back.
What lives on the host (state made by the first step, Python counters) is put right once the flag has reached the host:
at once on the CPU, before the next step or the next `state_dict` on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..config import is_number
from ..host_copy import HostCopy


class PredicatedStep:
    """The copies of one step of one optimizer."""

    def __init__(self) -> None:
        self._written: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._host_state: dict[Tensor, dict[str, Any]] = {}
        self._host_groups: list[dict[str, Any]] = []
        self._unsettled: tuple[HostCopy, Any] | None = None

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, *, tensors: bool = True, without_grad: bool = False) -> None:
        """Copy what the step may write.

        Args:
            tensors: False for what lives on the host only.
            without_grad: also parameters that have no gradient yet, as before a closure.
        """
        self.settle(optimizer)
        self._written = list(_tensors(optimizer, without_grad)) if tensors else []
        self._copies = [tensor.detach().clone() for tensor in self._written]
        self._host_state = {
            parameter: {key: _frozen(value) for key, value in optimizer.state.get(parameter, {}).items()}
            for parameter in _parameters(optimizer)
        }
        self._host_groups = [{k: v for k, v in group.items() if is_number(v)} for group in optimizer.param_groups]

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
        """Put the old values back where `found_inf` is not 0."""
        skip = {found_inf.device: found_inf != 0}
        for tensor, copy in zip(self._written, self._copies):
            if tensor.device not in skip:
                skip[tensor.device] = (found_inf != 0).to(tensor.device, non_blocking=True)
            tensor.copy_(torch.where(skip[tensor.device], copy, tensor))
        if self._changed_on_host(optimizer):
            self._unsettled = (HostCopy(found_inf), (self._host_state, self._host_groups))
            if found_inf.device.type == "cpu":
                self.settle(optimizer)
        self.discard()

    def discard(self) -> None:
        """Forget the copies: the step stands."""
        self._written, self._copies, self._host_state, self._host_groups = [], [], {}, []

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo what a skipped step did on the host, if it was skipped."""
        if self._unsettled is None:
            return
        copy, (states, groups) = self._unsettled
        self._unsettled = None
        if not copy.get().numpy().any():
            return
        for parameter, state in states.items():
            if not state:
                optimizer.state.pop(parameter, None)
            else:
                now = optimizer.state[parameter]
                for key in [key for key in now if key not in state]:
                    del now[key]
                now.update(state)
        for group, numbers in zip(optimizer.param_groups, groups):
            group.update(numbers)

    def _changed_on_host(self, optimizer: torch.optim.Optimizer) -> bool:
        for parameter, state in self._host_state.items():
            now = optimizer.state[parameter] if parameter in optimizer.state else {}
            if now.keys() != state.keys() or not all(_same(now[key], state[key]) for key in now):
                return True
        return any(
            group.get(key) != number
            for group, numbers in zip(optimizer.param_groups, self._host_groups)
            for key, number in numbers.items()
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors(optimizer: torch.optim.Optimizer, without_grad: bool) -> Iterator[Tensor]:
    """Yield every tensor a step may write: parameters with a gradient, their state, tensors among the group's options."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if without_grad or parameter.grad is not None:
                yield parameter
            if parameter in optimizer.state:
                yield from _in(optimizer.state[parameter])
        yield from _in({key: value for key, value in group.items() if key != "params"})


def _in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _in(item)


def _frozen(value: Any) -> Any:
    """Return `value` with its containers copied: an optimizer may append to a list in its state."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return type(value)(_frozen(item) for item in value) if type(value) in (list, tuple) else value


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, dict) and isinstance(before, dict):
        return now.keys() == before.keys() and all(_same(now[key], before[key]) for key in now)
    if isinstance(now, (list, tuple)) and isinstance(before, (list, tuple)):
        return len(now) == len(before) and all(map(_same, now, before))
    return not isinstance(now, Tensor) and not isinstance(before, Tensor) and bool(now == before)
