"""The loss scale of a training step: tensors that its graph adapts, and what the host learns of them without waiting."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..config import is_number
from ..host_copy import HostCopy
from .saved_numbers import Saved, check_saved

log = logging.getLogger(__name__)
SCALE, GROWTH, SKIPS = "loss_scale", "growth_tracker", "skips"
MAX_SCALE = 2.0**24
_FIRST_SCALE = 2.0**16  # both as Apex has them
_BOUNDS = {SCALE: (2.0**-126, 2.0**126)}  # float32 holds the reciprocal, too
_WARN_AFTER_SKIPS = 8


class LossScale:
    """A loss scale and the number of skipped steps.

    Args:
        mode: "dynamic", a number, or None for none.
        device: of the tensors.

    Attributes:
        tensors: those that the graph reads and writes, by name.
    """

    def __init__(self, mode: float | str | None, device: torch.device) -> None:
        self.mode = mode
        self.tensors: dict[str, Tensor] = {}
        self._first = _FIRST_SCALE if mode == "dynamic" else mode
        if mode is not None:
            self.tensors[SCALE] = torch.full((), self._first, dtype=torch.float32, device=device)
        if mode == "dynamic":
            self.tensors[GROWTH] = torch.zeros((), dtype=torch.int32, device=device)
        if mode is not None:
            self.tensors[SKIPS] = torch.zeros(2, dtype=torch.float32, device=device)  # in all, and in a row up to now
        self.forget()

    @property
    def value(self) -> float:
        """The factor of the next loss; waits for the device."""
        return float(self.tensors[SCALE]) if self.mode is not None else 1.0

    def forget(self) -> None:
        """Forget what the host has seen of earlier steps."""
        self._warn_at, self._copy = _WARN_AFTER_SKIPS, None

    def skips_to_tell(self) -> int:
        """Return how many steps in a row were skipped where it is time to say so, else 0; does not wait for the device."""
        if self._copy is not None and not self._copy.ready():
            return 0
        in_a_row = int(self._copy.get()[1]) if self._copy is not None else 0
        self._copy = HostCopy(self.tensors[SKIPS])
        if in_a_row < self._warn_at:
            self._warn_at = self._warn_at if in_a_row else _WARN_AFTER_SKIPS
            return 0
        self._warn_at *= 8
        return in_a_row

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the tensors."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def check(self, state: Any) -> None:
        """Refuse what is the state of no loss scale.

        Raises:
            ValueError: what is given, and expected.
        """
        what = "the state of a loss scale ('scaler' of a step's state_dict(), or a GradScaler's state_dict())"
        check_saved(what, _of_grad_scaler(state), {
            name: Saved(tensor, *_BOUNDS.get(name, ())) for name, tensor in self.tensors.items()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned and `check` let through, or a GradScaler's; a static scale stays as it was given."""
        is_own, state = "_growth_tracker" not in state, _of_grad_scaler(state)
        if is_own and state.keys() != self.tensors.keys():
            log.warning("apexfx: the state was saved with %s, and this step has loss_scale=%r: what the state lacks begins anew, "
                        "and what the step has no use for is dropped", sorted(state) or "no loss scale", self.mode)
        for name, tensor in self.tensors.items():
            if name in state and (self.mode == "dynamic" or name != SCALE):
                tensor.copy_(state[name])
            else:
                tensor.fill_(self._first if name == SCALE else 0)
        self.forget()


def _of_grad_scaler(state: Any) -> Any:
    """Return the state of torch's GradScaler as a step's; others as they are."""
    if not isinstance(state, dict) or "_growth_tracker" not in state:
        return state
    return {name: torch.tensor(number, dtype=dtype) if is_number(number) else number
            for name, number, dtype in ((SCALE, state.get("scale"), torch.float32), (GROWTH, state["_growth_tracker"], None))}
