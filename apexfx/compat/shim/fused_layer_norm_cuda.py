"""Found by processes that a script under `python -m apexfx.compat` starts: turns into the real module."""

from __future__ import annotations

from apexfx.compat.install import replace_shim

replace_shim(__name__)
