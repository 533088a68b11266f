"""A shadow of an optimizer, which runs its `step()` on other parameters, and what the step has changed in Python."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._torch import plain_step, tree_flatten
from ...random_state import places_in_random
from ..settings import NUMBERS, attributes_of_parameter, comparable_value, copied, variables_of_program
from .symbolic_numbers import NotTraceable, answering_programs

_OUR_FILES = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCH_FILES, _TORCH_OPTIM = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(torch.optim.__file__) + os.sep


def run_step(shadow: torch.optim.Optimizer) -> None:
    """Run the step of a shadow, and put back what it changes of its program: only the shadow is another then.

    Raises:
        NotTraceable: it counts in its program, or draws random numbers of Python.
    """
    places = places_in_random()
    before = [(each, copied(each.value), comparable_value(each.value, id)) for each in variables_of_program(shadow)]
    try:
        with answering_programs():
            plain_step(type(shadow))(shadow)
    finally:
        changed = [(each, value) for each, value, was in before if repr(comparable_value(each.value, id)) != repr(was)]
        for each, value in changed:
            each.write(value)
    if changed:
        raise NotTraceable(f"counts in Python: {changed[0][0].name!r} of its program is another after it")
    if places_in_random() != places:
        raise NotTraceable("draws random numbers of Python")


def shadow_of(cls: type, attributes: Mapping[str, Any], groups: list[dict[str, Any]], state: Any) -> torch.optim.Optimizer:
    """Return an instance that has these groups and this state, and other attributes as they are, containers copied."""
    shadow = cls.__new__(cls)
    shadow.__dict__.update((k, copied(v)) for k, v in attributes.items())
    shadow.__dict__.update(param_groups=groups, state=state)
    return shadow


def facts_of(shadow: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a step in Python may change, by name."""
    facts = {f"self.{k}": copied(v) for k, v in vars(shadow).items() if k not in ("param_groups", "state")}
    for place, group in enumerate(shadow.param_groups):
        facts.update((f"{k!r} of group {place}", copied(v)) for k, v in group.items() if k != "params")
    facts.update((f"{k!r} of its state", copied(v)) for k, v in shadow.state.items() if not isinstance(k, Tensor))
    for place, p in enumerate(p for group in shadow.param_groups for p in group["params"]):
        facts.update((f"{k!r} of parameter {place}", copied(v)) for k, v in attributes_of_parameter(shadow, p).items())
    for place, held in enumerate(held for k, held in shadow.state.items() if isinstance(k, Tensor)):
        leaves = tree_flatten(dict(held) if isinstance(held, dict) else held)[0]
        facts.update((f"number {number} of the state of parameter {place}", leaf) for number, leaf in enumerate(leaves)
                     if isinstance(leaf, NUMBERS) or isinstance(leaf, torch.SymFloat))
    return facts


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or type(a) is type(b) and isinstance(a, (*NUMBERS, str, set, torch.device)) and a == b


def reason_of(error: BaseException) -> str:
    """Return what a step did that is no graph, and by which line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OUR_FILES)
              and (not frame.filename.startswith(_TORCH_FILES) or frame.filename.startswith(_TORCH_OPTIM)) and frame.line]
    what = str(error) if isinstance(error, NotTraceable) else f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not frames:
        return what
    return f"{what}, in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"
