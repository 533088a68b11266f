"""amp keeps process-wide state, as Apex did: every test starts without it."""

from __future__ import annotations

import pytest

from apexfx.amp import optimizers
from tests.amp.amp_cases import fresh_state


@pytest.fixture(autouse=True)
def _fresh_amp():
    fresh_state()
    yield
    fresh_state()


@pytest.fixture(params=["host", "device"])
def flag(request, monkeypatch):
    """Whether the flag is at hand, as on the CPU, or known to the device only, as on a GPU."""
    if request.param == "device":
        monkeypatch.setattr(optimizers, "is_clear", lambda flag: False)
