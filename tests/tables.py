"""Tables of cases: `make test` takes some rows of a long one, `make test-long` all."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import pytest


def table(quick: int, names: str | tuple[str, ...], rows: Iterable[Any], *, by_turns: bool = False,
          **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test: `quick` of the rows, spread over the table, are for every day, and the others are marked long.

    Args:
        by_turns: other rows each day, until all had their turn; for a table whose rows are dear, such as those of Inductor.
    """
    several = len(names.split(",") if isinstance(names, str) else names) > 1
    rows = [row if isinstance(row, type(pytest.param())) else pytest.param(*(row if several else (row,))) for row in rows]
    free = [place for place, row in enumerate(rows) if not row.marks]
    chosen = {free[(place * len(free) // quick + by_turns * day()) % len(free)] for place in range(quick)}
    rows = [row if place in chosen else pytest.param(*row.values, marks=[*row.marks, pytest.mark.long], id=row.id)
            for place, row in enumerate(rows)]
    return pytest.mark.parametrize(names, rows, **options)


def day() -> int:
    """Return the number of today, by which what takes turns does."""
    return datetime.date.today().toordinal()
