"""The passes, one a file, and the ordered table that turns a config into a schedule."""

from __future__ import annotations
