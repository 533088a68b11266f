"""What tests expect of one version of torch and not of another."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import pytest
import torch

T = TypeVar("T")


def since(version: str, now: T, before: T) -> T:
    """Return what is expected of a version of torch and of the later ones, or of those before it."""
    return now if torch.__version__ >= version else before


def refused_before(version: str, error: type[Exception], match: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context of what is refused by that error under torch before a version, and runs from there on."""
    return since(version, contextlib.nullcontext(), pytest.raises(error, match=match))
