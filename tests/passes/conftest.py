"""A process group for graphs that communicate."""

from __future__ import annotations

import pytest

from apexfx._torch import fake_process_group


@pytest.fixture(scope="module")
def fake_group():
    """A world of two, of which this process is one and the other is not there: collectives leave their buffers alone."""
    with fake_process_group(2):
        yield
