"""amp keeps process-wide state, as Apex did: every test starts without it."""

from __future__ import annotations

import pytest

from apexfx.amp import host_mirror
from apexfx.amp.executor import CastExecutor
from tests.amp.amp_cases import fresh_state


@pytest.fixture(autouse=True)
def _fresh_amp():
    fresh_state()
    yield
    fresh_state()


@pytest.fixture
def calls(monkeypatch):
    """The functions that came to an executor."""
    seen, general = [], CastExecutor.__torch_function__

    def noted(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return general(self, func, types, args, kwargs)

    monkeypatch.setattr(CastExecutor, "__torch_function__", noted)
    return seen


@pytest.fixture(params=["host", "device"])
def flag(request, monkeypatch):
    """Whether the flag is at hand, as on the CPU, or known to the device only, as on a GPU."""
    if request.param == "device":
        monkeypatch.setattr(host_mirror, "HOST_DEVICES", frozenset())
