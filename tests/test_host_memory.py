"""What a training step frees on the CPU stays with the process."""

from __future__ import annotations

import platform
import resource

import pytest
import torch
from torch import nn

import apexfx
from tests import fresh_process

NUM_LAYERS, WIDTH = 16, 1024  # 64 MiB of gradients


def page_faults():
    """Return the fewest of five steps after the first: where a hole in the heap does not fit, a step takes a block more."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = apexfx.train_step(model, nn.functional.mse_loss, optimizer, opt_level="O0", inner="eager")
    x = torch.randn(8, WIDTH)
    counts = []
    for _ in range(6):
        step(x, x)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return min(after - before for before, after in zip(counts, counts[1:]))


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_a_step_takes_no_memory_anew():
    pages = NUM_LAYERS * WIDTH * WIDTH * 4 // resource.getpagesize()
    assert fresh_process.call(page_faults) < pages // 10
