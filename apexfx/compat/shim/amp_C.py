"""Found by processes that a script under `python -m apexfx.compat` starts: turns into the real names."""

from __future__ import annotations

import importlib
import sys

from apexfx.compat import install

sys.modules.pop(__name__)
install()
sys.modules[__name__] = importlib.import_module(__name__)
