"""`import apex` means this package, where NVIDIA's Apex is absent or has lost amp.

    import apexfx.compat; apexfx.compat.install()        # before the script's own imports
    python -m apexfx.compat script.py args...            # the same for a script that is not to be touched
"""

from __future__ import annotations

from .install import install as install
from .install import uninstall as uninstall
