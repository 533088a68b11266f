"""What every pass is, and the contract that a schedule of them is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ..graph.nodes import module_path, source_line
from ..report.records import Artifacts, Match

STAGES = ("forward", "backward", "step", "code")
NUMERIC_TIERS = ("bitwise", "reassociates", "changes_dtype")


class Pass(PassBase):
    """A graph rewrite: `call` edits `gm` in place, records its matches, and says whether it changed anything.

    Subclasses give a docstring (a summary, then Before/After), keyword-only options in `__init__`, and:

    Attributes:
        name: the pass's name in reports, `skip=` and errors; also its file's name.
        stage: "forward" (the Dynamo graph), "backward" (AOTAutograd's), "step" (the whole training step as AOTAutograd has
            it, where those of the stage "backward" run, too) or "code" (what Inductor makes code of, forward, backward or step,
            behind all others: the code is proved against the graph in front of these).
        numeric: "bitwise", "reassociates" or "changes_dtype"; enforced by `verify="each"`.
        needs: names of passes that have to run earlier, checked before anything runs.

    Running a pass twice must change nothing the second time. A pass never prints and reads neither globals nor the
    environment.
    """

    name: ClassVar[str] = ""
    stage: ClassVar[str] = "forward"
    numeric: ClassVar[str] = "bitwise"
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.matches: list[Match] = []

    def begin(self) -> None:
        """Forget what was recorded for an earlier graph."""
        self.matches = []

    def call(self, gm: fx.GraphModule) -> PassResult:
        raise NotImplementedError

    def record(self, node: fx.Node, detail: str) -> None:
        """Note that `node` was rewritten."""
        self.matches.append(Match(node.name, module_path(node), source_line(node), detail))

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        """Say why nothing matched although the user asked for this rewrite, or None where that is no surprise."""
        return None

    def artifacts(self) -> Artifacts | dict[str, Any]:
        """Return what the report keeps beside the matches; a pass of your own may return a dictionary of JSON-able values."""
        return Artifacts()

    def collectives(self) -> list[Any]:
        """Return, in order, what a backward pass will have the ranks communicate, as JSON-able rows.

        Ranks compare the rows before the graph first runs, when its backward is not compiled yet: they follow from the options
        alone, never from a graph of this rank. What a forward pass inserts is in the graph by then and is not declared.
        """
        return []

    def options(self) -> dict[str, Any]:
        """Return everything that changes what the pass does, as JSON-able values: part of every cache key."""
        return {}


def validate(passes: Sequence[Pass], before: Sequence[type[Pass]] = ()) -> None:
    """Refuse a schedule that cannot work, before anything runs: forward passes run before backward ones, whatever their places.

    Args:
        before: passes that may run before the others of their stage.

    Raises:
        TypeError: an entry that is no `Pass`, or one without `call`.
        ValueError: a pass without a name, an unknown stage or tier, a requirement that is not met.
    """
    for pass_ in passes:
        if not isinstance(pass_, Pass):
            raise TypeError(f"apexfx: passes= holds {pass_!r} ({type(pass_).__name__}), expected instances of apexfx.Pass")
        if not pass_.name:
            raise ValueError(f"apexfx: {type(pass_).__name__} has no name; set the class attribute `name`")
        if type(pass_).call is Pass.call:
            raise TypeError(f"apexfx: pass {pass_.name!r} has nothing to run; define call(self, gm) -> PassResult in "
                            f"{type(pass_).__name__}")
        if pass_.stage not in STAGES:
            raise ValueError(f"apexfx: pass {pass_.name!r} has stage={pass_.stage!r}, expected one of {', '.join(STAGES)}")
        if pass_.numeric not in NUMERIC_TIERS:
            raise ValueError(f"apexfx: pass {pass_.name!r} has numeric={pass_.numeric!r}, "
                             f"expected one of {', '.join(NUMERIC_TIERS)}")
    earlier: set[str] = set()
    for stage in STAGES:
        earlier.update(pass_type.name for pass_type in before if pass_type.stage == stage)
        for pass_ in (p for p in passes if p.stage == stage):
            if missing := set(pass_.needs) - earlier:
                raise ValueError(f"apexfx: pass {pass_.name!r} needs {sorted(missing)}, and no such pass runs earlier")
            earlier.add(pass_.name)
