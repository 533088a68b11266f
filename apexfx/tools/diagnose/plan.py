"""Between the phases of a session: which loops were seen, and which changes to try."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..._torch import foreach_lerp_
from ..._torch_compilers import break_places
from . import places
from .constructors import Constructed
from .experiments import CompiledModule, Experiment, NoBroadcast, OneGroupASetting, OneKernel, merged
from .findings import typical
from .observer import ParameterOps
from .places import Place
from .session import Session, agreed, synchronize

_MANY_GROUPS = 8  # of an optimizer, where half of them would do
_MANY_PARAMETERS = 4  # that one line goes through
_REPEATS = 10
_AVERAGING = frozenset(("lerp", "lerp_", "mul", "mul_", "add", "add_", "sub", "sub_"))


Span = tuple[str, int, int]  # file, first and last line


class Plan:
    """What a session asks between its phases.

    Attributes:
        tried: name -> change; "groups 0" and "kernel 0" are of the first optimizer, "compile 0" of the first `torch.compile`.
        loops: over parameters -> what their lines do.
        foreach_ms: such a loop that averages -> how long one call for all of its parameters takes.
        breaks: (line, reason) -> how often a graph was broken there.
    """

    def __init__(self, constructed: Constructed) -> None:
        self.constructed = constructed
        self._num_earlier_breaks = len(break_places())
        self.tried: dict[str, Experiment] = {}
        self.loops: dict[Span, list[ParameterOps]] = defaultdict(list)
        self.foreach_ms: dict[Span, float] = {}
        self.breaks: Counter[tuple[Place, str]] = Counter()

    def note_loops(self, session: Session) -> None:
        """Note the loops over parameters that were seen, and time on copies what could stand in their place."""
        for place, ops in session.observer.loops.items():
            if len(ops.tensors) >= _MANY_PARAMETERS and session.observer.is_usual(ops.uses):
                self.loops[(place.file, *places.loop_around(place))].append(ops)
        for span, lines in self.loops.items():
            if all(set(ops.names) <= _AVERAGING and not ops.of_gradients and not ops.writes for ops in lines):
                self.foreach_ms[span] = _foreach_ms(list({key: t for ops in lines for key, t in ops.tensors.items()}.values()))

    def experiments(self, session: Session) -> dict[str, Experiment]:
        """Return the changes to try, the same on all ranks."""
        self._note_breaks()
        possible = {**self._of_optimizers(session.optimizers), **self._of_compile()}
        modules = self.constructed.of(DistributedDataParallel)
        if broadcasting := [module for module in modules if module.will_sync_module_buffers()]:
            possible["buffers"] = NoBroadcast(broadcasting)
        self.tried = {name: possible.get(name, Experiment()) for name in agreed(list(possible))}
        return self.tried

    def _of_optimizers(self, optimizers: Sequence[Optimizer]) -> dict[str, Experiment]:
        possible: dict[str, Experiment] = {}
        for place, optimizer in enumerate(optimizers):
            groups = optimizer.param_groups
            if len(groups) >= _MANY_GROUPS and 2 * len(merged(groups)) <= len(groups):
                possible[f"groups {place}"] = OneGroupASetting(optimizer)
            if _updates_one_by_one(optimizer):
                possible[f"kernel {place}"] = OneKernel(optimizer)
        return possible

    def _of_compile(self) -> dict[str, Experiment]:
        return {f"compile {place}": CompiledModule(note.module, note.options)
                for place, note in enumerate(self.constructed.compiled) if not note.num_calls and note.module is not None}

    def _note_breaks(self) -> None:
        for reason, stack in break_places()[self._num_earlier_breaks:]:
            users = [frame for frame in stack if places.is_of_user(frame.filename)]
            if users and users[-1].lineno is not None:
                self.breaks[Place(users[-1].filename, users[-1].lineno), reason] += 1


def _foreach_ms(tensors: Sequence[Tensor]) -> float:
    """Return how long one average of parameters takes as one call for all of them, measured on copies."""
    averages, tensors, times = [t.detach().clone() for t in tensors], [t.detach() for t in tensors], []
    for _ in range(_REPEATS + 2):
        synchronize(tensors[0].device)
        start = time.perf_counter()
        foreach_lerp_(averages, tensors, 0.001)
        synchronize(tensors[0].device)
        times.append(1e3 * (time.perf_counter() - start))
    return typical(times[2:])


def _updates_one_by_one(optimizer: Optimizer) -> bool:
    """Whether an optimizer of torch's goes through its parameters in Python, and could do otherwise."""
    groups = optimizer.param_groups
    if not type(optimizer).__module__.startswith("torch.optim") or not all("foreach" in group for group in groups):
        return False
    if any(group.get("fused") or group["foreach"] or group.get("differentiable") for group in groups):
        return False
    parameters = [p for group in groups for p in group["params"]]
    if not all(p.is_floating_point() and type(p) in (Tensor, nn.Parameter) for p in parameters):
        return False
    return any(group["foreach"] is False for group in groups) or parameters[0].device.type == "cpu" and "fused" in groups[0]
