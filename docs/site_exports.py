"""Extension of griffe: of a package the reference shows what its `__init__.py` imports from the package's own modules."""

from __future__ import annotations

from typing import Any

import griffe


class Exports(griffe.Extension):
    """Says of each package without `__all__` what it exports."""

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Take the names that are imported from a module below the package, unless one of both is private."""
        if mod.is_init_module and mod.exports is None:
            mod.exports = [name for name, path in mod.imports.items() if path.startswith(f"{mod.path}.") and "._" not in path]
