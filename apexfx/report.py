"""What every pass did, as data first and text second.

`Report` -> one `GraphReport` a captured graph -> one `StageReport` a stage -> one `PassReport` a pass.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate


@dataclass
class PassReport:
    """One pass over one graph.

    Attributes:
        matches: what was rewritten, one `Match` a place.
        added, removed: how many of each op the pass put in and took out.
        ms: milliseconds spent in the pass itself.
        code: the graph after the pass, as runnable Python.
        artifacts: what the pass keeps beside its matches: "casts", "plan", ...
        warning: why nothing matched, where that is a surprise.
    """

    name: str
    stage: str
    numeric: str
    ms: float
    nodes_before: int
    nodes_after: int
    matches: list[Any] = field(default_factory=list)
    added: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)
    artifacts: dict[str, Any] = field(default_factory=dict)
    warning: str | None = None
    code: str = ""


@dataclass
class StageReport:
    """The passes of one stage over one graph, and the graph they started from."""

    stage: str
    captured: str = ""
    passes: list[PassReport] = field(default_factory=list)


@dataclass
class GraphReport:
    """One captured graph: its forward stage, and its backward stage once that was compiled."""

    index: int
    training: bool
    forward: StageReport
    backward: StageReport | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def stages(self) -> list[StageReport]:
        return [self.forward] + ([self.backward] if self.backward else [])
