"""Tables of cases: `make test` takes some rows of a long one, `make test-long` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def table(quick: int, names: str | tuple[str, ...], rows: Iterable[Any], **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test: `quick` of the rows, spread over the table, run in `make test`, and the others are marked long."""
    several = len(names.split(",") if isinstance(names, str) else names) > 1
    rows = [row if isinstance(row, type(pytest.param())) else pytest.param(*(row if several else (row,))) for row in rows]
    free = [place for place, row in enumerate(rows) if not row.marks]
    chosen = {free[place * len(free) // quick] for place in range(quick)}
    rows = [row if place in chosen else pytest.param(*row.values, marks=[*row.marks, pytest.mark.long], id=row.id)
            for place, row in enumerate(rows)]
    return pytest.mark.parametrize(names, rows, **options)
