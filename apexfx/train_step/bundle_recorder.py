"""Bundles of a step's last call, which another process runs again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..observe import bundle
from ..ops.apply_gradients import is_fault
from ..ranks import rank
from .components import Components
from .last_update import LastUpdate, graph_of
from .state import TrainingState

if TYPE_CHECKING:
    from .step_graphs import StepGraphs

log = logging.getLogger(__name__)


class BundleRecorder:
    """Writes bundles of a step's last call, which `python -m apexfx replay` runs again.

    Over ranks, all run the graph at once, so that each bundle has what the others sent; where one of them cannot take part, each
    is recorded as if all held what it holds.

    Args:
        components, graphs, state, last: of the step.
    """

    def __init__(self, components: Components, graphs: StepGraphs, state: TrainingState, last: LastUpdate) -> None:
        self._graphs, self._state, self._last, self._safeguard = graphs, state, last, components.safeguard
        self._device, self._described, self._group = components.device, components.report.config, components.groups.gradients
        self._agreement = components.agreement if self._group is not None else None
        self._has_slices = components.slices is not None
        self._fuses = components.options.config.inner != "eager"
        safeguard = components.options.safeguard
        self._folder, self._max_records = (safeguard.record_dir, safeguard.max_records) if safeguard is not None else (None, 0)

    def record(self, path: Path) -> None:
        """Write a bundle of the last call; errors as of `TrainStep.record`."""
        if self._agreement is not None:
            self._agreement.ensure("call that record() writes a bundle of", [self._state.call_number])
        self._write(lambda: path)

    def record_where_skipped(self) -> None:
        """Write a bundle of the last call, if it was skipped, where the safeguard says so; waits for the device."""
        if self._folder is None or self._last.call is None or self._last.recorded:
            return
        self._last.recorded = True  # at most once
        if not is_fault(self._last.verdict):
            return
        try:
            self._write(self._announced_path)
        except Exception as error:  # a full disk, no permission, an op that no bundle holds: training goes on
            log.warning("apexfx: a step could not be recorded in %s: %s", self._folder, str(error).removeprefix("apexfx: "))

    def _write(self, path_of: Callable[[], Path | None]) -> None:
        """Write a bundle of the last call, for which all ranks run its graph at once; every rank has to call this.

        Args:
            path_of: returns where; None where this rank writes none.
        """
        run = None
        try:
            if (path := path_of()) is not None:
                bundle.check_new(path)
                run = self._run_of_last_call()
        finally:
            communicates = self._all_are(ready=run is not None)
        if run is None:
            return
        run.compute(communicates=communicates)
        # Of what is not finite, the event says where it began; Inductor's kernels round otherwise, and have other random numbers.
        if run.event is not None and self._last.norm.isfinite() and not (self._fuses or self._has_slices):
            run.check_norm(self._last.norm)
        run.write(path)
        if run.event is not None:
            log.warning("apexfx: %s; python -m apexfx replay %s runs it again", run.event, path)

    def _run_of_last_call(self) -> bundle.Run:
        event = None
        if self._last.call is not None and is_fault(self._last.verdict):
            if self._safeguard is not None and (events := self._last.events()):
                event = str(events[-1])
            elif self._has_slices:
                self._last.where()  # in which slice
        call = self._last.call
        if call is None or call.batch_has_changed():
            why = "the batch of the last call was written since" if call is not None else \
                "there is no last call that updates and may be skipped; a step keeps its batch with safeguard= or a loss scale"
            raise RuntimeError(f"apexfx: record() has nothing to record: {why}")
        traced, inputs = graph_of(self._graphs, call, scale_factor=self._last.scale_factor())
        return bundle.Run(traced.gm, inputs, random=call.random, random_of_device=call.random_of_device, device=self._device,
                          about={"rank": rank(), "event": event, "options": {
                              name: str(value) for name, value in self._described.items()}})

    def _all_are(self, *, ready: bool) -> bool:
        """Return whether there are other ranks, and all are ready to run the graph at once; each has to ask."""
        if self._agreement is None:
            return False
        num_ready = torch.tensor([int(ready)], device=self._device)
        self._group.allreduce([num_ready]).wait()
        return int(num_ready) == self._group.size()

    def _announced_path(self) -> Path | None:
        """Return where the bundle of a skipped call goes, and say that it is written; None where this rank has enough of them."""
        own, folder = f"rank-{rank()}", Path(self._folder)
        if len(list(folder.glob(f"call-*-{own}"))) >= self._max_records:
            return None
        path = folder / f"call-{self._safeguard.num_judged}-{own}"
        log.warning("apexfx: the last step was skipped; its graph is traced once more and written to %s, which may take as "
                    "long as its capture", path)
        return path
