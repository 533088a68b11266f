"""What a pass hands to the report: the places that it rewrote, and what it keeps beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..buckets.plan import BucketPlan
from ..buckets.windows import Window
from ..precision.casts import CastRow, RemovedCast


@dataclass(frozen=True)
class Match:
    """One place a pass rewrote: the node's name, the module and source line it came from, and what was done."""

    node: str
    module: str
    source: str
    detail: str


@dataclass(kw_only=True)
class Artifacts:
    """What a pass keeps beside its matches; None for what it does not keep.

    Attributes:
        casts: the rows of the cast ledger.
        uncovered: key of `precision=` -> what is to be said of it, of those that cover nothing in the graph.
        remarks: warnings about the graph.
        removed_casts: the casts that the pass took out.
        plan: the bucket plan of the graph.
        schedule: what lies between the start and the wait of each collective.
        own: what a user's pass keeps, as JSON-able values.
    """

    casts: list[CastRow] | None = None
    uncovered: dict[str, str] | None = None
    remarks: list[str] | None = None
    removed_casts: list[RemovedCast] | None = None
    plan: BucketPlan | None = None
    schedule: list[Window] | None = None
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes_saved(self) -> int:
        """Bytes a step that removed casts no longer write."""
        return sum(row.bytes for row in self.removed_casts or ())

    def to_json(self) -> dict[str, Any]:
        """Return what is kept as JSON-able values; `from_json` is its inverse."""
        kept = {name: given for name, given in vars(self).items() if given is not None and name != "own"}
        for name in {"casts", "removed_casts", "schedule"} & kept.keys():
            kept[name] = [asdict(row) for row in kept[name]]
        if self.plan is not None:
            kept["plan"] = self.plan.to_json()
        if self.removed_casts is not None:
            kept["bytes_saved"] = self.bytes_saved
        return kept | self.own

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Artifacts:
        """Read what `to_json` wrote, or the dictionary that a user's pass returns."""
        own, kept = dict(data), {}
        for name in (f.name for f in fields(cls) if f.name in data):
            kept[name] = own.pop(name)
        for name, row_type in (("casts", CastRow), ("removed_casts", RemovedCast), ("schedule", Window)):
            if name in kept:
                kept[name] = [row_type(**row) for row in kept[name]]
        if "plan" in kept:
            kept["plan"] = BucketPlan.from_json(kept["plan"])
        if "removed_casts" in kept:
            own.pop("bytes_saved", None)
        return cls(**kept, own=own)
