"""What a checkpoint holds of a training step."""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch import Tensor, nn

from .._torch import is_dtensor, tree_leaves, tree_map
from ..graph.printing import first_names
from ..optimizers._checkpoints import short
from ..optimizers.state_layout import WHOLE, check_own
from ..ranks import rank
from .components import Components
from .parts.loss_scale import of_grad_scaler
from .slices import check_saved
from .slots import section

log = logging.getLogger(__name__)

_ALWAYS = {"model", "optimizer", "scaler", "num_ranks"}
_OTHERS = {"objective", "kept"}  # that are no sections of slots


def save(components: Components) -> dict[str, Any]:
    """Return the state of a step; see `TrainStep.state_dict`."""
    state = {"model": components.model.state_dict(), "optimizer": components.optimizers.state_dict(), "scaler": {},
             "num_ranks": components.groups.num_ranks}
    if of_objective := components.objective_modules.state_dict():
        state["objective"] = of_objective
    components.slots.save(state, _named(components))
    if components.slices is not None:
        state["slices"] = components.slices.save()
    state["kept"] = _kept(components, state)
    return state


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with whole tensors in memory of their own in the place of rows, on rank 0; {} on the others."""
    keeps = rank() == 0

    def of(value: Any) -> Any:
        value = value.full_tensor() if is_dtensor(value) else value
        return value.detach().to("cpu", copy=True) if keeps and isinstance(value, Tensor) else value if keeps else None

    gathered = tree_map(of, state)
    return gathered if keeps else {}


def load(components: Components, state: dict[str, Any]) -> None:
    """Load what `save` returned; see `TrainStep.load_state_dict`. Nothing has changed where it raises."""
    if components.sharded is not None:
        components.sharded.reshard()
    state = _checked(components, state)
    components.objective_modules.refresh(components.optimizers)
    holders = {"model": components.model, "optimizer": components.optimizers, "objective": components.objective_modules}
    if "objective" not in state and holders.pop("objective").state_dict():
        log.warning("apexfx: the state has nothing of the objective, whose parameters stay as they are")
    if isinstance(held := copy.copy(state["model"]), dict):  # with the versions that modules have noted in it
        own = components.model.state_dict()
        held.update({name: WHOLE.placed(x, own[name]) for name, x in held.items() if name in own and isinstance(x, Tensor)})
    before = {name: copy.deepcopy(holder.state_dict()) for name, holder in holders.items()}
    try:
        for name, holder in holders.items():
            holder.load_state_dict(held if name == "model" else state[name])
        components.optimizers.check_held(names_of_parameters(components))
        _check_kept(components, state)
    except BaseException as error:
        for name, holder in holders.items():
            holder.load_state_dict(before[name])
        if "Unexpected key(s) in state_dict" in str(error) and (of_wrapper := _of_wrapper(state, components.model)):
            error.args = (f"apexfx: {of_wrapper}. {error}",)
        error.add_note("  apexfx: nothing of the step has changed")
        raise
    if components.slices is not None:
        components.slices.load(state.get("slices"))
    elif state["num_ranks"] != components.groups.num_ranks and rank() == 0:
        log.warning("apexfx: the state was saved by %d ranks and is loaded by %d: the batch that a step sees, and with it "
                    "the right learning rate, may be another", state["num_ranks"], components.groups.num_ranks)
    components.slots.load(state, _named(components))


def _checked(components: Components, state: Any) -> dict[str, Any]:
    """Return a state as a step saves it; one that is damaged is refused, and what does not fit is told of."""
    if not isinstance(state, dict) or not state.keys() >= _ALWAYS:
        empty = "{}, which is what state_dict(full=True) returns on all ranks but the first"
        given = state if isinstance(state, dict) else {}
        keys = sorted(map(repr, given))
        kind = first_names(keys) or empty if isinstance(state, dict) else type(state).__name__
        held = [name for name, each in given.items() if isinstance(each, dict) and each.keys() >= _ALWAYS]
        of_loop = "Load what a loop has saved into the model and the optimizer themselves, which the step shares" + (
            '; or give it {"scaler": {}, **saved, "num_ranks": 1}' if given.keys() >= {"model", "optimizer"} else "")
        of_wrapper = _of_wrapper(given, components.model)
        cure = f"Give it what is in {held[0]!r}" if held else f"{of_loop}; {of_wrapper}" if of_wrapper else of_loop
        missing = ", ".join(map(repr, sorted(_ALWAYS - given.keys())))
        raise ValueError(f"apexfx: load_state_dict() expected what state_dict() of a step returns. {cure}. Given was {kind}; "
                         f"{missing} missing")
    for held in tree_leaves(state):
        check_own(held)
    if not isinstance(ranks := state["num_ranks"], int) or ranks < 1:
        raise ValueError(f"apexfx: the state was given with num_ranks={ranks!r}, expected a whole number, 1 or more")
    if not isinstance(kept := state.get("kept", []), list) or not all(isinstance(each, int) for each in kept):
        raise ValueError(f"apexfx: the state was given with kept={short(kept)}, expected a list of whole numbers; load what "
                         "state_dict() has returned")
    for name in state.keys() - _ALWAYS - _OTHERS | {"scaler"}:
        section(state, (name, ""))
    own: dict[str, Any] = {"scaler": {}}
    if components.slices is not None:
        own["slices"] = {}
        if "slices" in state:
            check_saved(state["slices"])
    components.slots.save(own, {})
    is_of_step = not (isinstance(state["scaler"], dict) and "_growth_tracker" in state["scaler"])
    state = {**state, "scaler": of_grad_scaler(state["scaler"])}
    components.slots.check(state, _named(components))
    if is_of_step and state["scaler"].keys() != own["scaler"].keys():
        log.warning("apexfx: the state was saved with %s, and this step has loss_scale=%r: what the state lacks begins anew, "
                    "and what the step has no use for is dropped", sorted(state["scaler"]) or "no loss scale",
                    components.loss_scaling)
    for name in sorted((state.keys() ^ own.keys()) - _ALWAYS - _OTHERS):
        anew = "random numbers begin at update 0; step.state_dict() has it" if name == "slices" else "tensors begin anew"
        log.warning(f"apexfx: the state has nothing of %s=, whose {anew}" if name in own else
                    "apexfx: the state has tensors of %s=, which are dropped; make the step with that to go on with them", name)
    for name in sorted(state["parts"].keys() ^ own["parts"].keys()) if state.get("parts") and "parts" in own else ():
        log.warning("apexfx: the state has no slot %r of parts=, which begins anew" if name in own["parts"] else
                    "apexfx: the state has the slot %r of parts=, which no part of this step declares and which is dropped", name)
    return state


def _of_wrapper(state: dict[str, Any], model: nn.Module) -> str:
    """Return what to do about names of a model in a wrapper; "" where there are none, or of `model` too."""
    for prefix, wrapper in (("module.", "under DDP or DataParallel"), ("_orig_mod.", "that torch.compile() has returned")):
        held_by = [text for text, held in [("state", state), *((f"state[{name!r}]", held) for name, held in state.items())]
                   if isinstance(held, dict) and held and all(str(key).startswith(prefix) for key in held)]
        if held_by and prefix[:-1] not in dict(model.named_children()):
            return (f"the names in {held_by[0]} are those of a model {wrapper}: take {prefix!r} off by "
                    f"torch.nn.modules.utils.consume_prefix_in_state_dict_if_present({held_by[0]}, {prefix!r})")
    return ""


def _kept(components: Components, state: dict[str, Any]) -> list[int]:
    """Return of each parameter how many entries optimizers, and the slots in a state, have of it."""
    sections = [held for name, section in state.items() if name not in ("model", "optimizer", "objective")
                and isinstance(section, dict) for held in section.values() if isinstance(held, dict)]
    of_optimizers = [{p: len(held) for p, held in each.state.items() if isinstance(held, dict)} for each in components.optimizers]
    return [sum(held.get(p, 0) for held in of_optimizers) + sum(name in held for held in sections)
            for name, p in _named(components).items()]


def _check_kept(components: Components, state: dict[str, Any]) -> None:
    """Refuse a state that has lost what was kept of a parameter that is frozen now: `dcp.load` fills what is there alone."""
    for (name, p), saved, given in zip(_named(components).items(), state.get("kept", ()), _kept(components, state)):
        if saved > given and not p.requires_grad:
            raise ValueError(f"apexfx: the state was saved with {saved} entries that belong to parameter {name!r}, of optimizer "
                             f"and averages, and was given with {given}: torch.distributed.checkpoint.load() fills what the "
                             "state_dict() of a new step has, and that is of the parameters that are trained. Call "
                             "requires_grad_(True) on it before state_dict(), and freeze it again after load_state_dict()")


def names_of_parameters(components: Components) -> dict[int, str]:
    """Return the names of what may be trained, by id."""
    return {id(p): name for name, p in _named(components).items()}


def _named(components: Components) -> dict[str, Tensor]:
    """Return what may be trained by its name."""
    of_objective, _ = components.objective_modules.named_tensors()
    return {**dict(components.model.named_parameters()), **of_objective}
