"""Imported by the server that ranks are forked from: after one compile the next takes a third, as torch's tables are filled."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.hub import tqdm

import apexfx
import tests.quick_compiles  # noqa: F401

tqdm.monitor_interval = 0  # no thread beside the one that forks
torch.set_num_threads(1)
with torch.random.fork_rng(), torch.no_grad():  # nor autograd's, which a backward starts where there is a GPU
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2), nn.Tanh())
    apexfx.transform(model, inner="eager")(torch.ones(2, 1, 4, 4))
del model
torch.compiler.reset()
torch._dynamo.utils.counters.clear()
gc.collect()
gc.freeze()  # or a rank's first collection copies the pages of the server
