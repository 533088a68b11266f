"""A module wrapped a second time: the parameters' hooks belong to the wrapper that ran forward last."""

from __future__ import annotations

import torch
from torch import nn

from apexfx.config import BucketConfig
from apexfx.distributed.gradient_sync import GradientSync


def test_a_later_synchronizer_takes_over():
    p = nn.Parameter(torch.ones(3))
    first, second = GradientSync(None, BucketConfig()), GradientSync(None, BucketConfig())
    for sync in (first, second, second):
        sync.watch("p", p)
    with first.no_sync(), second.no_sync():
        p.sum().backward()
    assert first.in_graph and not second.in_graph  # which has local gradients to average as a whole
    first.watch("p", p)  # what its next forward does
    with first.no_sync(), second.no_sync():
        p.sum().backward()
    assert not first.in_graph


def test_a_parameter_unfrozen_later_is_hooked():
    p = nn.Parameter(torch.ones(3), requires_grad=False)
    sync = GradientSync(None, BucketConfig())
    sync.watch("p", p)
    p.requires_grad_(True)
    sync.watch("p", p)
    with sync.no_sync():
        p.sum().backward()
    assert not sync.in_graph
