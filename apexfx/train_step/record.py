"""Bundles of steps that were skipped, or raised: when one is written, which folder it goes to, and what is in it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.agreement import Agreement
from ..errors import RankMismatchError
from ..observe import bundle
from .graphs import StepGraphs
from .last_call import LastCall
from .non_finite import graph_of
from .options import StepOptions
from .safeguard import STATE, SafeguardState
from .skipped_steps import SkippedSteps
from .state import TrainingState

log = logging.getLogger(__name__)


class Recorder:
    """Writes bundles of a step's last call, which `python -m apexfx replay` runs again.

    Over ranks, all run the graph at once, so that each bundle has what the others sent; where one of them cannot take part, each
    is recorded as if all held what it holds.

    Args:
        graphs, state, skipped, safeguard: the step's.
        options: of the step.
        agreement, group: of the ranks that record at once, or None.
        described: the options, by name.
        device: of what is trained.
    """

    def __init__(self, graphs: StepGraphs, state: TrainingState, skipped: SkippedSteps, safeguard: SafeguardState | None,
                 options: StepOptions, agreement: Agreement | None, group: dist.ProcessGroup | None,
                 described: Mapping[str, Any], device: torch.device) -> None:
        self._graphs, self._state, self._skipped, self._safeguard, self._device = graphs, state, skipped, safeguard, device
        self._agreement, self._group = (agreement, group) if group is not None else (None, None)
        self._lowered = options.config.inner != "eager"
        self._folder = options.safeguard.record_dir if options.safeguard is not None else None
        self._max_records = options.safeguard.max_records if options.safeguard is not None else 0
        self._described = described

    def record(self, path: Path) -> None:
        """Write a bundle of the last call; errors as of `TrainStep.record`."""
        if self._agreement is not None:
            self._agreement.compare("call that record() writes a bundle of", [self._state.num_calls])
        try:
            bundle.check_new(path)
            run = self._run_of_last_call()
        except Exception:
            self._all_are(ready=False)
            raise
        self._compute(run, communicates=self._all_are(ready=True))
        run.write(path)

    def record_where_skipped(self) -> None:
        """Write a bundle of the last call, if it was skipped, where the safeguard says so; waits for the device."""
        call = self._skipped.call
        if self._folder is None or call is None or call.recorded:
            return
        call.recorded = True  # at most once
        if not self._skipped.skip > 0:
            return
        run = path = None
        try:
            path = self._free_path(int(self._safeguard.tensors[STATE][0]))
            run = self._run_of_last_call() if path is not None else None
        except Exception as error:
            self._warn(error)
        communicates = self._all_are(ready=run is not None)
        if run is None:
            return
        try:
            self._compute(run, communicates=communicates)
            run.write(path)
            log.warning("apexfx: %s; python -m apexfx replay %s runs it again", run.event, path)
        except Exception as error:
            self._warn(error)

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        """Write a bundle of the call that runs in this context, if it raises, where the safeguard says so."""
        try:
            yield
        except Exception as error:
            if self._folder is not None and self._skipped.begun is not None and not isinstance(error, RankMismatchError):
                self._record_error(error)
            raise

    def _record_error(self, error: Exception) -> None:
        what = f"call {int(self._safeguard.tensors[STATE][0]) + 1} raised {bundle.error_text(error)}"
        call = self._skipped.begun
        if self._state.changed or self._state.communicated or call.batch_has_changed():
            log.warning("apexfx: %s; there is no bundle, since it had begun to communicate, or to change parameters, buffers "
                        "or its batch", what)
            return
        try:
            path = self._free_path(int(self._safeguard.tensors[STATE][0]) + 1)
            if path is not None:
                run = self._run(call, what, scale_factor=1.0, lowered=False)
                run.compute(communicates=False, may_raise=True)
                run.write(path)
                log.warning("apexfx: %s; python -m apexfx replay %s runs it again", what, path)
        except Exception as own:
            self._warn(own)

    def _run_of_last_call(self) -> bundle.Run:
        call, event = self._skipped.call, None
        if call is None or call.batch_has_changed():
            why = "the batch of the last call was written since" if call is not None else \
                "there is no last call that updates and may be skipped; a step keeps its batch with safeguard= or a loss scale"
            raise RuntimeError(f"apexfx: record() has nothing to record: {why}")
        if self._safeguard is not None and self._skipped.skip > 0 and (events := self._skipped.events()):
            event = str(events[-1])
        return self._run(call, event, scale_factor=self._skipped.scale_factor(), lowered=self._lowered)

    def _run(self, call: LastCall, event: str | None, *, scale_factor: float, lowered: bool) -> bundle.Run:
        traced, inputs = graph_of(self._graphs, call, scale_factor=scale_factor)
        compiled = None
        if lowered:
            of_inductor = self._graphs.trace(call.batch, call.named, lowered=True)
            if list(map(id, of_inductor.inputs)) != list(map(id, traced.inputs)):
                raise RuntimeError("apexfx: Inductor's graph of the step runs on other inputs than that of its ops")
            compiled = bundle.Compiled(of_inductor.gm, of_inductor.run)
        return bundle.Run(traced.gm, inputs, compiled=compiled, random=call.random, random_of_device=call.random_of_device,
                          device=self._device, about={"rank": _rank(), "event": event, "options": {
                              name: str(value) for name, value in self._described.items()}})

    def _compute(self, run: bundle.Run, *, communicates: bool) -> None:
        """Compute what is recorded; a rank that fails while others wait for it tells them."""
        running = contextlib.nullcontext() if not communicates else self._agreement.running(
            "recorded", "graph that is recorded", [self._state.num_calls])
        with running:
            run.compute(communicates=communicates, may_raise=False)
        if run.event is not None and self._skipped.norm.isfinite():  # of what is not, the event says where it began
            run.check_norm(self._skipped.norm)

    def _all_are(self, *, ready: bool) -> bool:
        """Return whether there are other ranks, and all are ready to run the graph at once; each has to ask."""
        if self._agreement is None:
            return False
        num_ready = torch.tensor([int(ready)], device=self._device)
        self._group.allreduce([num_ready]).wait()
        return int(num_ready) == self._group.size()

    def _warn(self, error: Exception) -> None:
        """Say why there is no bundle: a full disk, no permission, an op that none holds. Training goes on."""
        log.warning("apexfx: a step could not be recorded in %s: %s", self._folder, str(error).removeprefix("apexfx: "))

    def _free_path(self, call: int) -> Path | None:
        """Return where the bundle of a call goes; None where this rank has enough of them."""
        own, folder = f"rank-{_rank()}", Path(self._folder)
        present = len(list(folder.glob(f"call-*-{own}")))
        return folder / f"call-{call}-{own}" if present < self._max_records else None


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
