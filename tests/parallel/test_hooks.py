"""A module wrapped a second time: the later wrapper takes the parameters' hooks over."""

from __future__ import annotations

import torch
from torch import nn

from apexfx.config import BucketConfig
from apexfx.gradient_sync import GradientSync


def test_a_later_synchronizer_takes_over():
    p = nn.Parameter(torch.ones(3))
    first, second = GradientSync(None, BucketConfig()), GradientSync(None, BucketConfig())
    for sync in (first, second, second):
        sync.watch("p", p)
    with first.no_sync(), second.no_sync():
        p.sum().backward()
    assert first._pending == set() and second._pending == {"p"}
