"""Waiting for a collective that ends, fails, or is reported to fail by another rank."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from apexfx._torch import process_group_store
from apexfx.distributed.watchdog import Watchdog, uses_gloo
from apexfx.errors import RankFailureError


@pytest.fixture
def watchdog(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield Watchdog(dist.group.WORLD, "test", timeout_s=2)
    dist.destroy_process_group()


class EndsInBetween(dist.Work):
    """A work whose wait runs out, and that has ended when it is asked again."""

    error = ""

    def __init__(self):
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout=None):
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("the wait ran out")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self):
        return self.num_waits > 0


class FailsInBetween(EndsInBetween):
    error = "the connection is gone"


class NeverEnds(EndsInBetween):
    def wait(self, timeout=None):
        raise RuntimeError("the wait ran out")

    def is_completed(self):
        return False


def test_a_work_that_ends_just_after_a_wait_ran_out_is_done(watchdog):
    work = EndsInBetween()
    watchdog.wait(work, torch.ones(1), "a sum")
    assert work.num_waits == 2 and not watchdog.failure


def test_a_work_that_failed_says_why(watchdog):
    with pytest.raises(RankFailureError, match="lost a connection after .* in a sum.*the connection is gone"):
        watchdog.wait(FailsInBetween(), torch.ones(1), "a sum")


def test_what_another_rank_reports_ends_the_wait(watchdog):
    watchdog.report("what both find")
    store = process_group_store(dist.group.WORLD)
    with pytest.raises(RankFailureError, match="waited 2.. s for a sum"):
        watchdog.wait(NeverEnds(), torch.ones(1), "a sum")
    other = Watchdog(dist.group.WORLD, "other", timeout_s=60)
    store.set("apexfx/other/watch/report", json.dumps([1, "the gradient of 'a' is local"]))
    with pytest.raises(RankFailureError, match="^apexfx: the gradient of 'a' is local$"):
        other.wait(NeverEnds(), torch.ones(1), "a sum")


def test_a_group_made_without_the_name_of_a_backend_is_watched(tmp_path):
    dist.init_process_group(store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert uses_gloo(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
