"""The list of planted faults keeps up with the package."""

from __future__ import annotations

from tests.planted_faults import FAULTS, ROOT


def test_each_line_stands_once_and_something_else_can_stand_there():
    for fault in FAULTS:
        compile(fault.planted(), fault.file, "exec")
        assert all((ROOT / tests.partition("::")[0]).exists() for tests in fault.tests)
