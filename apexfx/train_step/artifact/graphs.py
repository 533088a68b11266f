"""How a call of a step with `artifact=` runs: by the file's code, or as any other, and the file has it from then on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..._torch import tree_flatten
from ...compiler.cache import pass_digest
from ..model import check_contexts, warn_of_eval_mode
from ..parts import StepParts
from ..state import StepLists, TrainingState
from . import archive
from .guards import NotComparable
from .match import Batch, StoredCall, Watch, call_key, differing, mismatch, program_facts, scope_of
from .recorder import ArtifactRecorder

if TYPE_CHECKING:
    from ...compiler.traced import Traced
    from ..step_graphs import StepGraphs


class ArtifactGraphs:
    """Runs the function of a step, as `StepGraphs` does, by code of a file where that has any.

    Args:
        parts: of the step.
        state: what the step reads and writes besides its batch.
        path: of the file, which need not be there.

    Raises:
        ArtifactMismatch: it is damaged.
        ValueError: a pass whose source cannot be read.
        RankMismatchError: ranks have different files, or some of them none.
    """

    def __init__(self, parts: StepParts, state: TrainingState, path: Path) -> None:
        self._parts, self._state, self._path = parts, state, path
        self._program: dict[str, str] | None = None  # what the file was made for, or is to be
        self._rows: dict[str, dict[str, Any]] = {}  # by the kind of call
        self._libraries: dict[str, bytes] = {}
        self._calls: dict[str, StoredCall] = {}
        self._current: dict[tuple[Any, ...], StoredCall] = {}  # by kind: compared with modules and lists as they are
        self._outdated: set[tuple[Any, ...]] = set()  # kinds of which something else has changed since
        self._lists: StepLists | None = None  # with which the program was compared
        self._fits = self._was_compared = False
        self._watch: Watch | None = None
        self._recorder = ArtifactRecorder(parts)
        self._compiling: StepGraphs | None = None
        digest = ""
        if (unread := [each.name for each in parts.options.config.passes if pass_digest(each) is None]):
            raise ValueError(f"apexfx: artifact= compares the source of passes, and that of {unread[0]!r} cannot be read; define "
                             "it in a file, or leave one of the two out")
        with contextlib.suppress(FileNotFoundError):
            content, self._libraries, digest = archive.read(path)
            self._program, self._rows = content["program"], {row["key"]: row for row in content["calls"]}
        if parts.agreement is not None:
            parts.agreement.ensure("artifact of the step", [digest])

    def run(self, batch: tuple[Any, ...], named: dict[str, Any], *, accumulates: bool) -> tuple[Any, ...]:
        """Run a call, as `StepGraphs.run` does.

        Raises:
            ArtifactMismatch: the file is another program's.
            Others: as there.
        """
        check_contexts()
        inputs, flat = self._state.inputs(), Batch(*tree_flatten((batch, named)))
        with torch.no_grad():
            if (call := self._find(inputs, flat, batch, named, accumulates)) is not None:
                self._state.keep_buffers(cached=True)
                returned = call.run(flat.leaves, self._state.note_change, self._state.note_communication)
                if returned is not None:
                    return returned
        returned = self._step_graphs().run(batch, named, accumulates=accumulates)
        if self._fits:
            self._keep(returned)
        return returned

    def capture(self, batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compile the one graph that ends an accumulation, and run nothing."""
        self._step_graphs().capture(batch, named)

    def trace(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Traced:
        """Return the graph of a call, as `StepGraphs.trace` does."""
        return self._step_graphs().trace(batch, named)

    def save(self, path: Path) -> None:
        """Write what there is by now to a file.

        Raises:
            RuntimeError: there is nothing.
            OSError: it cannot be written.
        """
        if not self._rows:
            raise RuntimeError("apexfx: there is no compiled graph for an artifact yet: call the step once; the report says "
                               "what stands in the way")
        archive.write(path, {"program": self._program, "calls": list(self._rows.values())}, self._libraries)

    def _step_graphs(self) -> StepGraphs:
        if self._compiling is None:
            from ..step_graphs import StepGraphs  # and with it torch's compilers

            self._compiling = StepGraphs(self._parts, self._state, self._recorder)
        return self._compiling

    def _find(self, inputs: dict[str, Any], flat: Batch, batch: tuple[Any, ...], named: dict[str, Any],
              accumulates: bool) -> StoredCall | None:
        """Return what runs a call; None where there is nothing that does.

        All that a call looks at once one of its kind has run stands here and in `StoredCall.run`, and in the optimizer's
        `Structure`.
        """
        if self._lists is not self._state.lists or self._watch is None or self._watch.has_changed():
            if self._lists is not self._state.lists:
                self._compare_program()
            self._watch = Watch(self._parts)
            self._current.clear()
            self._outdated.clear()
        kind, plan = (accumulates, *inputs["accumulated"], *flat.key()), inputs["plan"]
        if (call := self._current.get(kind)) is not None:
            if not call.agrees(plan):
                return None
            if not call.has_read_others():
                return call
        if kind in self._outdated:
            return None
        key = call_key(self._parts, inputs, flat, accumulates)
        if not self._fits or key not in self._rows:
            return None
        if key not in self._calls:
            if self._compiling is not None:  # this process has compiled it
                return None
            warn_of_eval_mode(self._parts.model, self._parts.report)
            self._calls[key] = StoredCall(self._rows[key], self._libraries, self._parts)
        call = self._calls[key]
        with self._parts.step_model.traceable() as model:
            scope = scope_of(model, self._parts, inputs, batch, named, accumulates)
            difference = call.difference(scope, plan)
        if difference is not None:
            if not call.was_compared:
                raise mismatch(self._path, *difference)
            self._outdated.add(kind)
            self._parts.report.warn(f"apexfx: {difference[0]} is not as it was when the step began, so what the artifact "
                                    f"{str(self._path)!r} has of such a call is no longer used, and a call compiles as always")
            return None
        call.bind(inputs, scope)
        self._current[kind] = call
        return call

    def _compare_program(self) -> None:
        now = program_facts(self._parts, self._state.lists)
        difference = differing(self._program, now) if self._program is not None else None
        if difference is not None and not self._was_compared:
            raise mismatch(self._path, *difference)
        self._program = self._program or now
        self._lists, self._fits, self._was_compared = self._state.lists, difference is None, True

    def _keep(self, returned: tuple[Any, ...]) -> None:
        """Put what was captured and compiled for a new kind of call into the file."""
        try:
            finished = self._recorder.finish(returned)
        except NotComparable as error:
            self._parts.report.warn(f"apexfx: the artifact {str(self._path)!r} does not get this step, which compiles at each "
                                    "start. Another program could not be told from it, or the graph not run by itself, because "
                                    f"of {error}")
            return
        if finished is None or finished[0]["key"] in self._rows:  # the program has changed since: the next begins as this one
            return
        row, libraries = finished
        self._rows[row["key"]] = row
        self._libraries |= libraries
        if self._parts.groups.user is not None and dist.get_rank(self._parts.groups.user) != 0:
            return
        try:
            self.save(self._path)
        except OSError as error:
            self._parts.report.warn(f"apexfx: the artifact {str(self._path)!r} cannot be written ({error.strerror}), and the "
                                    "step compiles at each start")
