"""Graph breaks: what is said of what Dynamo leaves to eager between graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..report.data import Report


def shown_breaks(breaks: Sequence[str]) -> str:
    """Return the first three reasons of breaks, each with its place and how often it came."""
    counts = Counter(breaks)
    return "; ".join(each + (f" ({count} times)" if count > 1 else "") for each, count in list(counts.items())[:3]) \
        + (f"; and {len(counts) - 3} others" if len(counts) > 3 else "")


def note_breaks(report: Report, how: str, advice: str = "", *, loses: bool) -> None:
    """Note that Dynamo broke a graph; `loses` says whether something that was asked for is lost by that, which is a warning."""
    message = f"apexfx: Dynamo broke the graph{how}. What runs between the graphs is out of reach of the passes{advice}"
    report.warn(message) if loses else report.note(message)
