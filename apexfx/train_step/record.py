"""Bundles of steps that were skipped: when one is written, which folder it goes to, and what is in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..observe import bundle
from .graphs import StepGraphs
from .non_finite import graph_of
from .safeguard import STATE, Safeguard, SafeguardState
from .skipped_steps import SkippedSteps

log = logging.getLogger(__name__)


class Recorder:
    """Writes bundles of a step's last call, `python -m apexfx replay` runs them.

    Args:
        graphs, skipped, safeguard: the step's.
        safeguard_options: what the user asked for.
        options: of the step, by name.
        device: of what is trained.
    """

    def __init__(self, graphs: StepGraphs, skipped: SkippedSteps, safeguard: SafeguardState | None,
                 safeguard_options: Safeguard | None, options: Mapping[str, Any], device: torch.device) -> None:
        self._graphs, self._skipped, self._safeguard, self._device = graphs, skipped, safeguard, device
        self._folder = safeguard_options.record_dir if safeguard_options is not None else None
        self._max_records = safeguard_options.max_records if safeguard_options is not None else 0
        self._options = options

    def record(self, path: Path) -> None:
        """Write a bundle of the last call; errors as of `TrainStep.record`."""
        call, event = self._skipped.call, None
        if call is None or call.batch_has_changed():
            why = "the batch of the last call was written since" if call is not None else \
                "there is no last call that updates and may be skipped; a step keeps its batch with safeguard= or a loss scale"
            raise RuntimeError(f"apexfx: record() has nothing to record: {why}")
        if self._safeguard is not None and self._skipped.skip > 0 and (events := self._skipped.events()):
            event = str(events[-1])
        gm, inputs = graph_of(self._graphs, call, scale_factor=self._skipped.scale_factor())
        bundle.write(path, gm, inputs, random=call.random, random_of_device=call.random_of_device, device=self._device,
                     about={"rank": _rank(), "event": event,
                            "options": {name: str(value) for name, value in self._options.items()}})

    def record_where_skipped(self) -> None:
        """Write a bundle of the last call, if it was skipped, where the safeguard says so; waits for the device."""
        call = self._skipped.call
        if self._folder is None or call is None or call.recorded:
            return
        call.recorded = True  # at most once
        if not self._skipped.skip > 0:
            return
        try:
            path = self._free_path()
            if path is not None:
                self.record(path)
                log.warning("apexfx: %s; python -m apexfx replay %s runs it again", self._skipped.events()[-1], path)
        except Exception as error:  # a full disk, no permission, an op that no bundle holds: training goes on
            log.warning("apexfx: a skipped step could not be recorded in %s: %s", self._folder, error)

    def _free_path(self) -> Path | None:
        """Return where the bundle of the last call goes; None where this rank has enough of them."""
        own, folder = f"rank-{_rank()}", Path(self._folder)
        present = len(list(folder.glob(f"call-*-{own}")))
        return folder / f"call-{int(self._safeguard.tensors[STATE][0])}-{own}" if present < self._max_records else None


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
