"""What a run has shown, as data and as text."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from .places import Place


@dataclass(frozen=True)
class Saving:
    """What a change was measured to save.

    Attributes:
        ms: a step.
        error_ms: one standard error of it, by resampling.
        num_steps: that were timed with the change, and without, at least.
    """

    ms: float
    error_ms: float
    num_steps: int

    @property
    def is_clear(self) -> bool:
        """Whether it is more than chance."""
        return self.ms > 2 * self.error_ms


@dataclass(frozen=True)
class Finding:
    """Something that costs, or is wrong.

    Attributes:
        kind: one word for it, as `host_sync`.
        place: the line that does it.
        what: what it is.
        change: what to do about it.
        ms: what it takes of a step now; None where that is not measured.
        saving_ms: what the change saves of a step; None where that is not measured.
        basis: how these were measured.
    """

    kind: str
    place: Place | None
    what: str
    change: str
    ms: float | None = None
    saving_ms: float | None = None
    basis: str = "counted"

    def as_data(self) -> dict[str, Any]:
        """Return it as what JSON holds."""
        data = dataclasses.asdict(self) | {"file": self.place and self.place.file, "line": self.place and self.place.line}
        del data["place"]
        return data


@dataclass(frozen=True)
class Diagnosis:
    """The result of a run.

    Attributes:
        script: as it was given.
        device: of the parameters.
        num_ranks: in the process group.
        num_steps: that were run.
        ms_per_step: of undisturbed steps, the lower quartile, as of all times.
        data_ms, optimizer_ms: of it, waiting for the data loader, and in `optimizer.step()`.
        findings: those that save most first.
        notes: what was measured or failed and is no finding.
    """

    script: str
    device: str
    num_ranks: int
    num_steps: int
    ms_per_step: float
    data_ms: float
    optimizer_ms: float
    findings: Sequence[Finding]
    notes: Sequence[str]

    def as_data(self) -> dict[str, Any]:
        """Return it as what JSON holds."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return data | {"findings": [each.as_data() for each in self.findings], "notes": list(self.notes)}

    def __str__(self) -> str:
        ranks = f", {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        lines = [f"apexfx diagnose {self.script}: {self.ms_per_step:.2f} ms a step, {self.data_ms:.2f} of them for data and "
                 f"{self.optimizer_ms:.2f} in optimizer.step() ({self.num_steps} steps, {self.device}{ranks})"]
        for place, each in enumerate(self.findings, 1):
            lines += ["", f"{place}. {each.kind}{self._share(each)}", *self._source(each), f"   {each.what}",
                      f"   -> {each.change}"]
        if not self.findings:
            lines += ["", "nothing found"]
        return "\n".join([*lines, *([""] if self.notes else []), *(f"note: {note}" for note in self.notes)])

    def _share(self, each: Finding) -> str:
        if each.saving_ms is None:
            return f": {each.ms:.2f} ms a step ({each.basis})" if each.ms is not None else f" ({each.basis})"
        share = 100 * each.saving_ms / self.ms_per_step if self.ms_per_step else 0.0
        return f": {each.saving_ms:.2f} ms a step, {share:.0f} % ({each.basis})"

    def _source(self, each: Finding) -> list[str]:
        return [f"   {each.place}: {each.place.code}"] if each.place is not None else []


def typical(seconds: Sequence[float]) -> float:
    """Return the lower quartile: what else a machine does only ever adds time."""
    return sorted(seconds)[len(seconds) // 4] if seconds else 0.0


def saving(changed: Sequence[float], plain: Sequence[float]) -> Saving:
    """Return what a change saves, of the seconds of steps with and without it."""
    random = Random(0)
    resampled = [typical(random.choices(plain, k=len(plain))) - typical(random.choices(changed, k=len(changed)))
                 for _ in range(200)]
    return Saving(1e3 * (typical(plain) - typical(changed)), 1e3 * statistics.stdev(resampled), min(len(changed), len(plain)))
