"""What a checkpoint holds of a training step."""

from __future__ import annotations

import copy
import logging
from typing import Any

from .parts import StepParts

log = logging.getLogger(__name__)

_ALWAYS, _SOMETIMES = {"model", "optimizer", "scaler", "num_ranks"}, {"objective", "safeguard", "ema"}


def save(parts: StepParts) -> dict[str, Any]:
    """Return the state of a step; see `TrainStep.state_dict`."""
    state = {"model": parts.model.state_dict(), "optimizer": parts.optimizers.state_dict(), "scaler": parts.scale.state_dict(),
             "num_ranks": parts.num_ranks}
    if of_objective := parts.objective_modules.state_dict():
        state["objective"] = of_objective
    if parts.safeguard is not None:
        state["safeguard"] = parts.safeguard.state_dict()
    if parts.ema is not None:
        state["ema"] = parts.ema.state_dict(parts.model)
    return state


def load(parts: StepParts, state: dict[str, Any]) -> None:
    """Load what `save` returned; see `TrainStep.load_state_dict`. Nothing has changed where it raises."""
    _check(parts, state)
    parts.objective_modules.refresh(parts.optimizers)
    holders = {"model": parts.model, "optimizer": parts.optimizers, "objective": parts.objective_modules}
    if "objective" not in state and holders.pop("objective").state_dict():
        log.warning("apexfx: the state has nothing of the objective, whose parameters stay as they are")
    before = {name: copy.deepcopy(holder.state_dict()) for name, holder in holders.items()}
    try:
        for name, holder in holders.items():
            holder.load_state_dict(state[name])
        parts.optimizers.check_held(names_of_parameters(parts))
    except BaseException:
        for name, holder in holders.items():
            holder.load_state_dict(before[name])
        raise
    if state["num_ranks"] != parts.num_ranks:
        log.warning("apexfx: the state was saved by %d ranks and is loaded by %d: the batch that a step sees, and with it "
                    "the right learning rate, may be another", state["num_ranks"], parts.num_ranks)
    parts.scale.load_state_dict(state["scaler"])
    if parts.safeguard is not None:
        parts.safeguard.load_state_dict(_of_safeguard(state))
    if parts.ema is not None:
        parts.ema.load_state_dict(state.get("ema", {"averages": {}, "counts": {}}), parts.model)


def _check(parts: StepParts, state: Any) -> None:
    if not isinstance(state, dict) or set(state) - _SOMETIMES != _ALWAYS:
        kind = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"apexfx: load_state_dict() was given {kind}, expected what state_dict() returns: {sorted(_ALWAYS)}")
    if not isinstance(ranks := state["num_ranks"], int) or ranks < 1:
        raise ValueError(f"apexfx: the state was given with num_ranks={ranks!r}, expected a whole number, 1 or more")
    parts.scale.check(state["scaler"])
    if parts.safeguard is not None:
        parts.safeguard.check(_of_safeguard(state))
    if parts.ema is not None and "ema" in state:
        parts.ema.check(state["ema"], parts.model)
    elif parts.ema is not None:
        log.warning("apexfx: the state has no averages of ema=, which begin anew")
    elif "ema" in state:
        log.warning("apexfx: the state has averages, which are dropped; make the step with ema= to go on with them")


def names_of_parameters(parts: StepParts) -> dict[int, str]:
    """Return the names of what may be trained, by id."""
    of_objective, _ = parts.objective_modules.named_tensors()
    return {id(p): name for name, p in (*parts.model.named_parameters(), *of_objective.items())}


def _of_safeguard(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a safeguard, skips included: a loss scale counts them where there is one."""
    own = state.get("safeguard", {})
    return {**state["scaler"], **own} if isinstance(own, dict) else own
