"""Apex's multi_tensor_apply frame over the ops of this package."""

from __future__ import annotations

from .multi_tensor_apply import MultiTensorApply as MultiTensorApply
from .multi_tensor_apply import multi_tensor_applier as multi_tensor_applier
