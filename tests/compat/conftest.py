from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

import apexfx.compat
from apexfx.compat.names import MODULES


@pytest.fixture
def python(monkeypatch, capsys):
    """Run code with Apex's names untaken, in this interpreter; return its output."""

    def forget():
        apexfx.compat.uninstall()
        tops = {name.partition(".")[0] for name in MODULES}
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def run(code, *, path=()):
        forget()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*map(str, path), *sys.path])
            try:
                exec(compile(textwrap.dedent(code), "<script>", "exec"), {"__name__": "script"})
            finally:
                forget()
        return capsys.readouterr().out

    return run
