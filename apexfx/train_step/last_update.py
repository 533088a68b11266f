"""The last update: its call, its norm, whether it was skipped, and where that began.

An update that is skipped changes nothing, so that its graph can be computed once more on copies of what it ran on.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import tree_leaves, tree_map, versions
from ..compiler.traced import Traced
from ..graph.marks import KIND, NAME
from ..observe import bundle
from ..observe.interpreter import Interpreter
from ..observe.non_finite import NonFinite
from ..ops.apply_gradients import is_fault
from ..random_state import forked_random
from ..ranks import num_ranks, rank
from .components import Components
from .parts.loss_scale import BACKOFF_FACTOR, SCALE
from .parts.safeguard import NOT_SEARCHED, Event

if TYPE_CHECKING:
    from .step_graphs import StepGraphs


class LastCall:
    """A call: its batch, by reference, and the state of the random number generators before it.

    Args:
        batch, named: what the step is called with, before it runs.
        device: the step's.

    Attributes:
        batch, named: the same tensors, in containers of its own.
        random, random_of_device: states of torch's random number generators before the call; None on the CPU.
    """

    def __init__(self, batch: tuple[Any, ...], named: dict[str, Any], device: torch.device) -> None:
        self.batch, self.named = tree_map(lambda leaf: leaf, (batch, named))
        self._device = device
        self.random, self._random_of_python = torch.get_rng_state(), random.getstate()
        self.random_of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.end()

    def end(self) -> None:
        """Take the batch as it is now for that of the call, which has ended: a step that is skipped takes its own writes back."""
        self._tensors = self._tensors_now()  # kept, for their ids to stay their own
        self._versions = versions(self._tensors)

    def batch_has_changed(self) -> bool:
        """Return whether a tensor of the batch was written since, or one is in the place of another."""
        return versions(self._tensors_now()) != self._versions

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """Have random numbers be those of the call, in this context."""
        with forked_random([self._device] if self.random_of_device is not None else []):
            random.setstate(self._random_of_python)
            torch.set_rng_state(self.random)
            if self.random_of_device is not None:
                torch.cuda.set_rng_state(self.random_of_device, self._device)
            yield

    def _tensors_now(self) -> list[Tensor]:
        """Return the tensors of the batch, those in attributes of an object too: of a dataclass, of a tokenizer's encoding."""
        leaves = tree_leaves((self.batch, self.named))
        held = tree_leaves([vars(leaf) for leaf in leaves if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__")])
        return [x for x in (*leaves, *held) if isinstance(x, Tensor) and not x.is_inference()]


def graph_of(graphs: StepGraphs, call: LastCall, *, scale_factor: float) -> tuple[Traced, list[Any]]:
    """Return the graph of a call after all passes, and copies of its inputs as they were.

    Args:
        scale_factor: what the loss scale was then, divided by what it is now.

    Raises:
        Exception: there is no such graph.
    """
    with call.random_state():
        traced = graphs.trace(call.batch, call.named)
    inputs = [bundle.exact_copy(x) if isinstance(x, Tensor) else x for x in traced.inputs]
    for node, copied in zip(traced.gm.graph.find_nodes(op="placeholder"), inputs):
        if (node.meta.get(KIND), node.meta.get(NAME)) == ("state", SCALE):
            copied.mul_(scale_factor)
    return traced, inputs


def first_non_finite(graphs: StepGraphs, calls: Sequence[LastCall], *, scale_factor: float, accumulates: bool,
                     first_slice: int | None = None) -> tuple[str, LastCall]:
    """Run the graphs of calls once more, op by op; say in a sentence where what is not finite begins, and return the call.

    Every rank does so alone, with its own values in the place of what the others would send.

    Args:
        graphs, scale_factor: as of `graph_of`.
        calls: those of the last update that are known, in order.
        accumulates: whether there were others, which accumulated gradients for these.
        first_slice: of the global batch, which one the first of these calls computed; None where they computed none.
    """
    on_rank = f", on rank {rank()}" if num_ranks() > 1 else ""
    unwritten = [(place, call) for place, call in enumerate(calls) if not call.batch_has_changed()]
    for place, call in unwritten:
        try:
            traced, inputs = graph_of(graphs, call, scale_factor=scale_factor)
            observer = NonFinite(traced.gm.graph)
            with call.random_state(), torch.no_grad():
                Interpreter(traced.gm, [observer]).run(*inputs)
        except Exception as error:  # whatever the model does in another run, memory included: training goes on
            return f"the step could not be run op by op to find where: {bundle.error_text(error)}", call
        if (finding := observer.first()) is not None:
            return f"{finding}{f', in slice {first_slice + place}' if first_slice is not None else ''}{on_rank}", call
    if len(unwritten) < len(calls):
        return "the batch was written since, so the op was not looked for", calls[-1]
    others = ["a call before, which accumulated its gradients"] if accumulates else []
    if num_ranks() > 1:
        others.append(f"rank {1 - rank()}" if num_ranks() == 2 else "another rank, whose event says more")
    if others:
        batch = "the slices" if first_slice is not None else "the last batch"
        return f"all is finite in {batch}{on_rank.replace(', on', ' of')}; it was that of {', or of '.join(others)}", calls[-1]
    return "all is finite op by op: it was a kernel that fuses several, or the model has changed since", calls[-1]


class LastUpdate:
    """What a step knows of its last update, by a call or `flush()`.

    Args:
        components, graphs: of the step.
        name_of: a parameter, by its place.

    Attributes:
        call: the last one, where it applied gradients and may have been skipped; with `slices=`, the one of this rank where
            something that is not finite began, once `where` has looked for it.
        recorded: whether it was looked at for a bundle.
        verdict: of it, the code of a `Verdict`, on the device; None where it accumulated, or failed.
        norm: of the gradients that were applied last; None before.
    """

    def __init__(self, components: Components, graphs: StepGraphs, name_of: Callable[[int], str | None]) -> None:
        self._graphs, self._components, self._safeguard, self._name_of = graphs, components, components.safeguard, name_of
        self._slices, self._device = components.slices, components.device
        self._earlier: list[LastCall] = []  # the other slices of the update
        self.norm: Tensor | None = None
        self.forget_call()

    def forget_call(self) -> None:
        """Forget the last call."""
        self.call = self._begun = self.verdict = self._said = None
        self.recorded = False

    def start_call(self, batch: tuple[Any, ...], named: Mapping[str, Any], *, first: bool) -> None:
        """Keep what it takes to compute a call once more, which begins; `first` of an update."""
        self.forget_call()
        if first:
            self._earlier.clear()
        if self._components.may_skip:
            self._begun = LastCall(batch, named, self._device)

    def keep_slice(self) -> None:
        """Note that the call that has begun has computed a slice, and others follow."""
        if self._begun is not None and self._slices is not None:
            self._begun.end()
            self._earlier.append(self._begun)

    def finish_call(self, verdict: Tensor, norm: Tensor) -> None:
        """Note that the call that has begun, or a flush, applied gradients."""
        self.verdict, self.norm, self.call = verdict, norm, self._begun
        if self.call is not None:
            self.call.end()

    def events(self) -> list[Event]:
        """Return those of the safeguard, the last one with the op where it began; waits for the device."""
        events = self._safeguard.read(self._name_of)
        unexplained = events and events[-1].where == NOT_SEARCHED
        if unexplained and self.verdict is not None and is_fault(self.verdict):
            events[-1] = self._safeguard.explain_last(self.where())
        return events

    def where(self) -> str:
        """Say where the last call first computed something that is not finite."""
        if self.call is None:
            return "That call accumulated gradients" if self.verdict is None \
                else "flush() applied what calls had accumulated, op not searched"
        if self._said is None:
            self._said, self.call = first_non_finite(
                self._graphs, [*self._earlier, self.call], scale_factor=self.scale_factor(),
                accumulates=self._components.options.accumulates and self._slices is None,
                first_slice=self._slices and self._slices.first)
        return self._said

    def scale_factor(self) -> float:
        """Return what the loss scale was in the last call, divided by what it is now, if that was skipped."""
        overflowed = self._components.loss_scaling == "dynamic" and is_fault(self.verdict) and not self.norm.isfinite()
        return 1 / BACKOFF_FACTOR if overflowed else 1.0
