"""The table of docs/refused.md of what a step refuses has the rows, and the words, of tests/train_step/test_cures.py."""

from __future__ import annotations

import re
from pathlib import Path

from tests.train_step.test_cures import CURES

PAGE = (Path(__file__).parents[2] / "docs/refused.md").read_text()


def test_the_table_says_what_the_errors_say():
    [table] = re.findall(r"<!-- refusals -->\n\|.*\n\|.*\n((?:\|.*\n)+)", PAGE)
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
    assert [re.escape(said.replace("\\|", "|")) for _, said, _ in rows] == [row.said for row in CURES.values() if row.in_table]
