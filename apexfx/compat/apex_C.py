"""apex_C: flatten and unflatten lists of tensors of one dtype."""

from __future__ import annotations

from ..parallel.flat import flatten as flatten
from ..parallel.flat import unflatten as unflatten
