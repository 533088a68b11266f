"""Whether a program, and a call of its step, are those that an artifact was made of; one of another program is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._torch import changed_inductor_settings, num_hooks, process_state, registries, tensor_check, without_autocast
from ...compiler.cache import package_digest, pass_digest
from ...distributed.agreement import Communication, explained
from ...errors import ArtifactMismatch
from ...graph.inputs import Placeholder
from ...graph.shared_memory import MemoryCheck
from ...observe.bundle import processor_name
from ...report.records import GraphReport
from ..function import run_accumulate, run_step
from ..inputs import StepInputs
from ..leaves import check_leaf
from ..optimizer_state import same_tensors
from ..parts import StepParts
from ..state import StepLists
from .guards import CONTAINERS, Facts, Scope, Values, first_difference
from .stored_code import StoredCode

SINGLE = ("means",)
BATCH = "batch"


def program_facts(parts: StepParts, lists: StepLists) -> dict[str, str]:
    """Return what an artifact was made for, besides the Python that was captured: what -> text."""
    facts = Facts()
    rows = {"torch": f"{torch.__version__} {torch.version.git_version}", "apexfx": package_digest()[:12],
            "Python": f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}", "processor": _processor()}
    rows |= {f"option {name}": json.dumps(value, default=str) for name, value in parts.options.describe().items()}
    rows |= {f"pass {each.name}": str(pass_digest(each)) for each in parts.options.config.passes}
    num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rows |= {"ranks": str(num_ranks), "process groups": json.dumps(parts.groups.describe()), "optimizer": parts.optimizers.name}
    rows |= {f"torch._inductor.config.{name}": text for name, text in changed_inductor_settings().items()}
    for number, root in enumerate(roots_of(parts)):
        place = f" of module {number} of the objective" if number else ""
        for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
            rows |= {f"{kind} {name}{place}": facts.of(tensor) for name, tensor in named}
    rows["trained"] = ", ".join(lists.names[id(p)] for p in lists.params)
    state = {f"{name}": facts.of(tensor) for name, tensor in lists.optimizer.named(lists.names)} if lists.optimizer else {}
    return rows | {f"state {name}": text for name, text in state.items()}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [next((line for line in lines if line.startswith(key)), "") for key in ("flags", "Features")]
    features = hashlib.sha256("".join(found).encode()).hexdigest()[:12]
    return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}, features {features}"


def roots_of(parts: StepParts) -> list[nn.Module]:
    """Return the modules that hold all others."""
    return [parts.model, *parts.objective_modules.given]


def mismatch(path: Path, what: str, before: str, now: str) -> ArtifactMismatch:
    """Return the error of an artifact that is another program's."""
    place = next((i for i, (a, b) in enumerate(zip(before, now)) if a != b), min(len(before), len(now)))
    start = max(0, place - 60) if max(len(before), len(now)) > 160 else 0
    before, now = (f"{'...' * bool(start)}{each[start:start + 160]}" for each in (before, now))
    return ArtifactMismatch(f"apexfx: the artifact {str(path)!r} was made for another program. The first difference: {what}. "
                            f"The file has {before}, and the program has {now}. Delete the file, and the step compiles anew and "
                            "writes it; or give another path")


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return (what, as it was, as it is) of the first row that is not the same, or None."""
    return next(((what, before.get(what, "nothing of that"), now.get(what, "nothing of that")) for what in {**before, **now}
                 if before.get(what) != now.get(what)), None)


@dataclass(frozen=True)
class Batch:
    """The leaves of what a step was called with, and their structure."""

    leaves: Sequence[Any]
    structure: Any

    def key(self) -> tuple[Any, ...]:
        """Return what tells batches of one program apart, in a process."""
        return self.structure, *self.same(), *(
            (type(x), x.dtype, x.shape, x.stride() if x.layout == torch.strided else x.layout, x.device, x.requires_grad,
             x.is_conj(), x.is_neg()) if isinstance(x, Tensor) else Facts().of(x) for x in self.leaves)

    def same(self) -> list[int]:
        """Return for each tensor the number of the first that is the same object."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        first: dict[int, int] = {}
        return [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]


def call_key(parts: StepParts, inputs: Mapping[str, Any], batch: Batch, accumulates: bool) -> str:
    """Return which kind of call this is, for all processes: a graph is for one."""
    facts, same = Facts(), batch.same()
    modes = "".join("ET"[module.training] for root in roots_of(parts) for module in root.modules())
    held = "" if accumulates else "".join("01"[each] for each in inputs["accumulated"])  # which `run_accumulate` does not read
    return "\n".join(["accumulates" if accumulates else "updates", held,
                      hashlib.sha256(modes.encode()).hexdigest()[:12], " ".join(str(batch.structure).split()),
                      *map(facts.of, batch.leaves), *([f"one tensor twice: {same}"] if len({*same}) < len(same) else [])])


def scope_of(model: nn.Module, parts: StepParts, inputs: Mapping[str, Any], batch: tuple[Any, ...], named: dict[str, Any],
             accumulates: bool) -> Scope:
    """Return where Dynamo's guards of a call find what they are about."""
    return Scope(run_accumulate if accumulates else run_step, {
        "inputs": StepInputs(model, parts.objective, **inputs), "batch": batch, "named_inputs": named})


class Watch:
    """Notices at each call, in a few comparisons, that modules are not as they were: attributes, lists and dictionaries in them.

    What else was read, `Values` compares. What is not noticed: another method in a class, an attribute that is new in an object.
    """

    def __init__(self, parts: StepParts) -> None:
        modules = [module for root in roots_of(parts) for module in root.modules()]
        held = [each for module in modules for each in vars(module).values() if isinstance(each, CONTAINERS)]
        self._live = [*map(vars, modules), *held]
        self._ordered = [each for each in held if isinstance(each, dict) and len(each) > 1]
        self._before, self._order = list(map(copy.copy, self._live)), list(map(list, self._ordered))
        self._hooks = num_hooks()

    def has_changed(self) -> bool:
        return (num_hooks() != self._hooks or not same_tensors(self._live, self._before)
                or list(map(list, self._ordered)) != self._order)  # dictionaries that differ in it alone are equal


class StoredCall:
    """Runs one kind of call by code from a file.

    Args:
        row: what an `ArtifactRecorder` has made of it.
        libraries: of the kernels, by name.
        parts: of the step.

    Attributes:
        row: as given.
        was_compared: whether the program was found to be the row's before.
    """

    def __init__(self, row: Mapping[str, Any], libraries: Mapping[str, bytes], parts: StepParts) -> None:
        self.row, self._parts, self.was_compared = row, parts, False
        self._args: list[Any] = []  # the inputs, None for those of the batch
        self._bound: list[Tensor] = []  # those but of the batch
        self._of_batch: list[tuple[int, int]] = []  # the places of those, as an input and as a leaf
        self._ids: set[int] = set()  # of what is bound
        self._holds: Callable[..., bool] | None = None  # whether what is bound are tensors of the same kinds
        self._plan, self._process = "", {}  # when they were found
        self._values: Values | None = None
        kernels = {name: libraries[library] for name, library in row["kernels"].items()}
        self._call = StoredCode(row["source"], kernels, tuple(row["functions"])).load()
        self._outputs = _folded(row["outputs"])
        placeholders = [Placeholder(i, name, kind, tuple(shape)) for i, (name, kind, shape) in enumerate(row["placeholders"])]
        shared = {(one, other): tuple(how) for one, other, *how in row["shared"]}
        self._check_memory = MemoryCheck(placeholders, row["updated"], row["written"], shared)
        self._communication = Communication(row["what"], row["collectives"], parts.index.mode)
        self._agreement = parts.agreement if row["collectives"] else None
        for note in row["notes"]:
            parts.report.note(note)
        parts.report.add(GraphReport.from_json({**row["report"], "index": len(parts.report.graphs)}))

    def difference(self, scope: Scope, plan: str) -> tuple[str, str, str] | None:
        """Return what of the program is not as it was when the graph was captured (what, as it was, as it is), or None."""
        return differing({"the update": self.row["plan"], **self.row["process"]},
                         {"the update": plan, **texts(process_state())}) or first_difference(self.row["facts"], scope)

    def agrees(self, plan: str) -> bool:
        """Return whether update and process are as they were when the inputs were found."""
        return plan == self._plan and process_state() == self._process

    def has_read_others(self) -> bool:
        """Return whether a global, or what else is in no module, is not what it was when the inputs were found."""
        return self._values.have_changed()

    def bind(self, inputs: Mapping[str, Any], scope: Scope) -> None:
        """Find the inputs, in modules as they are now: the program is the one that the graph was captured from."""
        self.was_compared, self._plan, self._process = True, inputs["plan"], process_state()
        self._values = Values(self.row["facts"], scope)
        held = {**inputs, **{name: {None: inputs[name]} for name in SINGLE}}
        self._of_batch = [(place, where[0]) for place, (source, *where) in enumerate(self.row["inputs"]) if source == BATCH]
        self._args = [None if source[0] == BATCH else _found(source, self._parts, held) for source in self.row["inputs"]]
        self._bound = [arg for arg in self._args if arg is not None]
        self._ids, self._holds = set(map(id, self._bound)), tensor_check(self._bound)

    def run(self, leaves: Sequence[Any], on_change: Callable[[], None],
            on_communication: Callable[[], None]) -> tuple[Any, ...] | None:
        """Run it for a batch, and return what the step's function does; None where it was not made for these inputs: two are one
        tensor, or one of the model or the optimizer is of another kind (`tensor.data = ...`).
        """
        if not self._holds(*self._bound) or len(self._ids) < len(self._bound):
            return None
        args = self._args.copy()
        for place, leaf in self._of_batch:
            args[place] = leaves[leaf]
        of_batch = {id(args[place]) for place, _ in self._of_batch}
        if len(of_batch) < len(self._of_batch) or not of_batch.isdisjoint(self._ids):
            return None
        for place, name in self.row["leaves"]:
            check_leaf(name, args[place])
        self._check_memory(args)
        with explained(self._agreement and self._agreement.group, f"the {self._communication.what}"):
            if self._agreement is not None:
                self._agreement.before_run(self._communication)
            on_communication()
            on_change()
            torch.autograd.graph.increment_version([args[place] for place in self.row["noted_writes"]])
            with without_autocast():
                outputs = self._call(list(args))
            on_change()
        return _built(self._outputs, outputs, args)


def texts(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the state of a process as a row has it."""
    return {name: str(value) for name, value in state.items()}


def _found(place: Sequence[Any], parts: StepParts, inputs: Mapping[str, Any]) -> Any:
    kind, *where = place
    if kind not in ("parameter", "buffer"):
        return inputs[kind][where[0] if where else None]
    root, path, name = where
    held = registries(roots_of(parts)[root].get_submodule(path))
    return (held.parameters if kind == "parameter" else held.buffers)[name]


def _folded(template: Sequence[Any]) -> Sequence[Any]:
    """Return a template with one constant for each tuple of constants, as which parameters have a gradient."""
    kind, value = template
    if kind == "dict":
        return kind, [(key, _folded(each)) for key, each in value]
    if kind not in ("tuple", "list"):
        return kind, value
    parts = list(map(_folded, value))
    return ("constant", tuple(each for _, each in parts)) if kind == "tuple" and all(each == "constant" for each, _ in parts) \
        else (kind, parts)


def _built(template: Sequence[Any], outputs: Sequence[Any], args: Sequence[Any]) -> Any:
    kind, value = template
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_built(each, outputs, args) for each in value)
    if kind == "dict":
        return {key: _built(each, outputs, args) for key, each in value}
    return value if kind == "constant" else (outputs if kind == "output" else args)[value]
