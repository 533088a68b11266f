"""Mixed precision, synchronized batch norm, data parallel and fused optimizers as passes over readable graphs."""

from __future__ import annotations

__version__ = "0.1.0"
