"""The pages about passes: the ordered table for a terminal, and docs/passes.md, both made from the docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from tabulate import tabulate

from .. import passes
from ..config import OPT_LEVELS
from ..precision.rules import RULES

_HEADING = """\
# Passes

Forward passes edit the graph that Dynamo captured, backward passes the one that AOTAutograd made from it, step passes that
of a whole training step, and code passes what Inductor makes code of. They run in this order. `skip=("name",)` leaves one
out, and `passes=(MyPass(),)` adds your own ([how to write one](architecture.md#write-a-pass-in-ten-lines)).

The numeric tier says what a pass may change: nothing (`bitwise`), the order of sums (`reassociates`), or dtypes
(`changes_dtype`). `verify="each"` runs the graph before and after every pass and holds it to that. Below the table is a
graph before and after each; `python -m apexfx passes NAME` prints all about one pass.

Made by `python -m apexfx passes --markdown > docs/passes.md`; do not edit.
"""


def table() -> str:
    """Return the ordered table as text."""
    rows = passes.describe()
    return tabulate(rows, headers="keys", maxcolwidths=[None, None, None, 24, 60])


def one(name: str) -> str:
    """Return everything about one pass: its row and its docstring.

    Raises:
        ValueError: a name that no pass has.
    """
    for row, entry in zip(passes.describe(), passes.TABLE):
        if row["pass"] == name:
            facts = f"{name}: {row['stage']}, {row['numeric']}, asked for by {row['asked for by']}"
            return f"{facts}\n\n{inspect.getdoc(entry.pass_type)}"
    raise ValueError(f"apexfx: there is no pass {name!r}; the passes are {', '.join(row['pass'] for row in passes.describe())}")


def markdown() -> str:
    """Return docs/passes.md."""
    rows = passes.describe()
    parts = [_HEADING, tabulate([{**row, "pass": f"[{row['pass']}](#{row['pass']})"} for row in rows], headers="keys",
                                tablefmt="github"), ""]
    for row, entry in zip(rows, passes.TABLE):
        parts += [f"## {row['pass']}", "", *_before_and_after(inspect.getdoc(entry.pass_type) or "")]
    parts += ["## The opt levels", "", tabulate([(name, level.summary) for name, level in OPT_LEVELS.items()],
                                                headers=("level", "what it means"), tablefmt="github"), ""]
    parts += ["## The rules of O1", "",
              "Ops by what happens to their floating arguments. Those that take whatever dtype comes are left out here.", "",
              *(f"- **{rule}**, {family} ({why}): {ops}" for rule, family, why, ops in _rule_rows()), ""]
    return "\n".join(parts)


def _before_and_after(text: str) -> Iterator[str]:
    """Yield the Before/After block of a docstring as code."""
    for block in text.split("\n\n"):
        if block.startswith("Before:"):
            yield from ("```text", block, "```", "")


def _rule_rows() -> Iterator[tuple[str, str, str, str]]:
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for name, rule in RULES.items():
        if rule.kind == "passthrough":
            continue
        kinds.setdefault((rule.kind, rule.family, rule.reason), []).append(name)
    for (kind, family, reason), ops in kinds.items():
        yield kind, family, reason, " ".join(f"`{op}`" for op in ops)
