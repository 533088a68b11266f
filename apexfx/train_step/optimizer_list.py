"""The optimizers of a training step: one, or several over disjoint parameters, which share clipping and the loss scale."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph.printing import count_text
from ..optimizers._base import FusedOptimizer
from ..optimizers.held_state import check_held, check_loaded_options
from ..optimizers.state_layout import WHOLE, Layout
from ..optimizers.update_rules import FUSED, Option, has_op, options_of, unsupported_reason


class OptimizerList:
    """Optimizers, to be read, saved and stepped as if they were one.

    Args:
        optimizer: one, or a list.

    Attributes:
        name: what messages call it: "AdamW", "[Muon, AdamW]".
        layout: what this rank has of each parameter, and of its state.
    """

    layout: Layout = WHOLE

    def __init__(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        self._is_one = isinstance(optimizer, torch.optim.Optimizer)
        self._each = [optimizer] if self._is_one else list(optimizer)
        names = [type(each).__name__ for each in self._each]
        self.name = names[0] if self._is_one else f"[{', '.join(names)}]"
        self._norms = [_own_norm(each) for each in self._each]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._each)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for each in self._each for group in each.param_groups]

    def unsupported_reason(self, half: torch.dtype | None, changed: Collection[Option] = ()) -> str:
        """Return why none updates inside of the graph, as `unsupported_reason` of the first that cannot; "" where all do."""
        for place, each in enumerate(self._each):
            if reason := unsupported_reason(each, half, options_of(place, changed), self.layout):
                return reason if self._is_one else f"{type(each).__name__}: {reason}"
        return ""

    def any_by_its_step(self, half: torch.dtype | None, changed: Collection[Option] = ()) -> bool:
        """Return whether one is updated by its own `step()`, traced, and no op of ours; arguments as of `unsupported_reason`."""
        return any(type(each) not in FUSED and not has_op(each, options_of(place, changed), half)
                   for place, each in enumerate(self._each))

    def clipping(self, max_grad_norm: float | None) -> tuple[float | None, float]:
        """Return to which norm gradients are clipped, and what is added to the norm: an optimizer may do that itself.

        Args:
            max_grad_norm: the option of the step.

        Raises:
            ValueError: one of several clips itself, whose gradients are clipped together; both have a norm.
        """
        for each in self._each:
            if own := _own_norm(each):
                clips = f"{type(each).__name__} clips to max_grad_norm={own} itself"
                if not self._is_one:
                    raise ValueError(f"apexfx: {clips}, and is one of several optimizers; make it with max_grad_norm=None, and "
                                     "pass max_grad_norm to train_step(), which clips the gradients of all by one norm")
                if max_grad_norm is not None:
                    raise ValueError(f"apexfx: max_grad_norm={max_grad_norm} was given, and {clips}; leave one of them out")
                return own, each.clip_epsilon
        return max_grad_norm, 1e-6

    def named_state(self, params: Sequence[Tensor], names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the state of parameters, as it is: "layer1.weight.exp_avg".

        Args:
            names: of the parameters, by id.
        """
        for each in self._each:
            for p in params:
                if isinstance(held := each.state.get(p), dict):
                    yield from ((f"{names[id(p)]}.{key}", tensor) for key, tensor in held.items() if isinstance(tensor, Tensor))

    def step(self) -> None:
        """Have each do its own step."""
        for each in self._each:
            each.step()

    def state_dict(self) -> Any:
        """Return the state of the one, or those of all in a list."""
        states = [each.state_dict() for each in self._each]
        return states[0] if self._is_one else states

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: it is of another number of optimizers, of other groups, or of others.
        """
        if isinstance(state, list) == self._is_one or not self._is_one and len(state) != len(self._each):
            kind = f"those of {len(state)} optimizers" if isinstance(state, list) else "that of one optimizer"
            raise ValueError(f"apexfx: the state holds {kind}, and this step has {self.name}; make the step with the same ones")
        for each, own in zip(self._each, [state] if self._is_one else state):
            held = [len(group["params"]) for group in each.param_groups]
            try:
                given = [len(group["params"]) for group in own["param_groups"]] if "param_groups" in own else held
                if given != held:
                    raise ValueError(f"apexfx: the state has {count_text(len(given), 'parameter group')}, of {given} parameters, "
                                     f"and {type(each).__name__} of the step has {len(held)}, of {held}; make it with the groups "
                                     "that were saved, or load the model alone and begin with a new optimizer")
                each.load_state_dict(own)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                kind = f"has no {error.args[0]!r}, which {type(each).__name__} keeps" if isinstance(error, KeyError) \
                    else f"is not what state_dict() of {type(each).__name__} returns ({type(error).__name__}: {error})"
                raise ValueError(f"apexfx: the state of an optimizer was given that {kind}: it is damaged, or was saved by "
                                 "another class. Load it into that one, or load the model alone and begin with a new optimizer"
                                 ) from error
            check_loaded_options(each)

    def check_held(self, names: Mapping[int, str]) -> None:
        """Refuse options and state that lack something, and another norm than what the parts of the step were made with.

        Args:
            names: of the parameters, by id.
        """
        for each, norm in zip(self._each, self._norms):
            check_held(each, names)
            if (now := _own_norm(each)) != norm:
                raise ValueError(f"apexfx: max_grad_norm of {type(each).__name__} was {norm} when the step was made, and is now "
                                 f"{now}; make a new step")


def _own_norm(optimizer: torch.optim.Optimizer) -> float | None:
    """Return to which norm an optimizer of ours clips; others do that in their own step(), outside of the graph."""
    return optimizer.max_grad_norm if isinstance(optimizer, FusedOptimizer) else None
