"""Whole training steps on a device: transform() under each inner compiler, and train_step, near eager and without a host sync."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.optimizers import FusedAdam

INNER = pytest.mark.parametrize("inner", ["inductor", "cudagraphs"])


def build(device):
    """Return a model with a convolution, a batch norm and a layer norm, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
                          nn.Linear(16 * 64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))  # fmt: skip
    return model.to(device), torch.randn(32, 3, 8, 8, device=device), torch.randint(10, (32,), device=device)


def skip_where_it_cannot_run(inner, device):
    if inner == "cudagraphs" and device != "cuda":
        pytest.skip("CUDA graphs need a CUDA device")


def losses(model, optimizer, x, y, steps=6):
    """Train with float32 losses; return them."""
    found = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())  # a CUDA graph's next replay writes over its outputs
    return torch.stack(found)


@INNER
@pytest.mark.parametrize("options,tolerance", [({"opt_level": "O0"}, 1e-3), ({"opt_level": "O2", "dtype": torch.bfloat16}, 5e-2)])
def test_transform_trains_as_eager_does(options, tolerance, inner, device):
    skip_where_it_cannot_run(inner, device)
    model, x, y = build(device)
    twin = copy.deepcopy(model)
    compiled = apexfx.transform(model, inner=inner, **options)
    got = losses(compiled, FusedAdam(compiled.parameters(), lr=1e-3), x, y)
    expected = losses(twin, FusedAdam(twin.parameters(), lr=1e-3), x, y)
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    assert got[-1] < got[0]


def without_syncs(step, device):
    """Run a step that was run before; a wait for the device is an error."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@INNER
def test_a_step_of_transform_waits_for_nothing(inner, device):
    skip_where_it_cannot_run(inner, device)
    model, x, y = build(device)
    compiled = apexfx.transform(model, opt_level="O2", dtype=torch.bfloat16, inner=inner)
    optimizer = FusedAdam(compiled.parameters(), lr=1e-3, capturable=True, max_grad_norm=1.0)
    losses(compiled, optimizer, x, y, steps=4)
    without_syncs(lambda: losses(compiled, optimizer, x, y, steps=1), device)


def test_a_step_is_one_cuda_graph(device):
    skip_where_it_cannot_run("cudagraphs", device)
    model, x, y = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O1", max_grad_norm=1.0, inner="cudagraphs")
    kept = [step(x, y) for _ in range(8)]  # which the next call does not write over
    assert len({float(loss) for loss in kept}) > 4 and kept[-1] < kept[0]
    with torch.profiler.profile() as profiler:
        step(x, y)
        torch.cuda.synchronize()
    launches = [event.name for event in profiler.events() if "Launch" in event.name]
    assert launches.count("cudaGraphLaunch") == 1 and len(launches) < 10, launches


@INNER
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_train_step_trains_and_waits_for_nothing(dtype, inner, device):
    skip_where_it_cannot_run(inner, device)
    model, x, y = build(device)
    twin = copy.deepcopy(model)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O2", dtype=dtype, inner=inner)
    got = torch.stack([step(x, y).detach().float().clone() for _ in range(6)])
    assert got.isfinite().all() and got[-1] < got[0]
    if dtype is torch.bfloat16:  # float16 may skip steps until its loss scale fits
        expected = losses(twin, FusedAdam(twin.parameters(), lr=1e-3), x, y)
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-2)
    without_syncs(lambda: step(x, y), device)
