"""The process groups that the graphs of one model communicate over."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._torch import process_group_timeout
from ..config import BucketConfig, TransformConfig
from ..distributed.agreement import Agreement
from ..ranks import has_group, num_ranks


def averaged_over_none(config: TransformConfig) -> str:
    """Say that other ranks are there whose gradients are not averaged with this one's; "" where there are none, or they are."""
    if config.ddp or num_ranks() == 1 or dist.get_backend() == "fake":
        return ""
    return f"apexfx: a process group of {num_ranks()} ranks is there, and gradients are averaged over none of them"


class Groups:
    """The process groups of one model: the user's, and what graphs communicate over; None where not used.

    Attributes:
        user: whose ranks they are.
        gradients, batch_norm, shards: for buckets, for statistics, for parameters of which each rank has a part.
    """

    def __init__(self, config: TransformConfig, shards: dist.ProcessGroup | None = None) -> None:
        self.shards = shards
        self.user: dist.ProcessGroup | None = shards
        self.gradients: dist.ProcessGroup | None = None
        self.batch_norm: dist.ProcessGroup | None = None
        if not (has_group() and (config.ddp or config.sync_bn)):
            return
        self.user = shards or config.process_group or dist.group.WORLD
        self.gradients = self.user if config.ddp else None
        self.batch_norm = self.user if config.sync_bn else None

    @property
    def num_ranks(self) -> int:
        """How many ranks train the model together."""
        return self.user.size() if self.user is not None else 1

    def separate_batch_norm(self) -> None:
        """Give batch norm a communicator of its own on CUDA, where on a shared one its small sum queues after whole buckets.

        Every rank of the group must call this at once.
        """
        if self.batch_norm is not None and self.batch_norm is self.gradients and torch.cuda.is_available() \
                and dist.get_backend(self.user) != "fake":
            ranks = dist.get_process_group_ranks(self.gradients)
            self.batch_norm = dist.new_group(ranks, process_group_timeout(self.gradients), use_local_synchronization=True)

    def agreement(self, buckets: BucketConfig | None) -> Agreement | None:
        """Return what the ranks compare by; None on one rank, and in the fake group, which has no peers to ask."""
        if self.user is None or dist.get_world_size(self.user) == 1 or dist.get_backend(self.user) == "fake":
            return None
        return Agreement(self.user, (buckets or BucketConfig()).timeout_s)

    def names(self) -> set[str]:
        """Return the names of these groups, which are the same on every rank."""
        return {group.group_name for group in (self.user, self.gradients, self.batch_norm, self.shards) if group is not None}

    def describe(self) -> dict[str, Any]:
        """Return the name and size of each group: part of every cache key."""
        return {
            name: [group.group_name, dist.get_world_size(group)] if group is not None else None
            for name, group in (("gradients", self.gradients), ("batch_norm", self.batch_norm), ("shards", self.shards))
        }
