"""The optimizer classes on a device: against the same training on the CPU, GradScaler, checkpoints."""

from __future__ import annotations

import io

import pytest
import torch

from apexfx.testing import assert_close
from tests.optimizers.optimizer_models import OPTIMIZERS, build, same_parameters, train


def on(device, name, dtype=torch.float32):
    """Build on the CPU with the same seed, and move; the optimizer is made after the move."""
    model, _ = build(name, dtype)
    model = model.to(device)
    cls, keywords = OPTIMIZERS[name]
    return model, cls(model.parameters(), **keywords)


def step(model, optimizer, seed, device, scaler=None):
    """One seeded step."""
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)).to(device, next(model.parameters()).dtype)
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_agrees_with_the_cpu(name, device):
    model, optimizer = on(device, name)
    cpu_model, cpu_optimizer = build(name)
    train(cpu_model, cpu_optimizer, 5)
    for seed in range(5):
        step(model, optimizer, seed, device)
    for p, q in zip(model.parameters(), cpu_model.parameters()):
        assert_close(p.detach().cpu(), q.detach(), scale=32.0)  # five steps through matrix products of another library


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_grad_scaler_skips_on_the_device(name, device):
    model, optimizer = on(device, name)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    step(model, optimizer, 0, device, scaler)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    scaler.scale(model(torch.full((4, 7), 1e30, device=device)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    assert scaler.get_scale() == 2.0**9
    assert float(optimizer.param_groups[0]["step"]) == 1.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoint_moves_to_the_device(name, device):
    cpu_model, cpu_optimizer = build(name, torch.bfloat16)
    train(cpu_model, cpu_optimizer, 2)
    buffer = io.BytesIO()
    torch.save(cpu_optimizer.state_dict(), buffer)
    buffer.seek(0)
    model, optimizer = on(device, name, torch.bfloat16)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True, map_location="cpu"))
    for state in optimizer.state.values():
        assert all(v.device.type == device and v.dtype == torch.float32 for v in state.values())
    assert optimizer.param_groups[0]["step"].device.type == device
    step(model, optimizer, 2, device)
    assert float(optimizer.param_groups[0]["step"]) == 3.0


def test_a_capturable_step_in_a_cuda_graph(device):
    if device != "cuda":
        pytest.skip("about CUDA itself")
    model, optimizer = on(device, "adam_capturable", torch.bfloat16)
    twin, eager = on(device, "adam_capturable", torch.bfloat16)
    for m in (model, twin):
        m.to(device)
        for p in m.parameters():
            p.grad = torch.ones_like(p)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    graph.replay()
    optimizer.param_groups[0]["lr"].fill_(0.5)
    graph.replay()
    for i in range(4):
        eager.param_groups[0]["lr"].fill_(0.5 if i == 3 else 1e-2)
        eager.step()
    assert same_parameters(model, twin)
