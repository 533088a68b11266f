"""amp keeps process-wide state, as Apex did: every test starts without it."""

from __future__ import annotations

import pytest

from tests.amp.amp_cases import fresh_state


@pytest.fixture(autouse=True)
def _fresh_amp():
    fresh_state()
    yield
    fresh_state()
