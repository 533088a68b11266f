"""The optimizers under test, with settings that exercise every branch, and a small model to train."""

from __future__ import annotations

import torch

from apexfx.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD

BF16 = torch.bfloat16
OPTIMIZERS = {
    "adamw": (FusedAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (FusedAdam, {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}),
    "adam_capturable": (FusedAdam, {"lr": 1e-2, "capturable": True, "master_weights": True}),
    "sgd": (FusedSGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd_plain": (FusedSGD, {"lr": 1e-2}),
    "lamb": (FusedLAMB, {"lr": 1e-2}),
    "novograd": (FusedNovoGrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": (FusedAdagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "mixed_lamb": (FusedMixedPrecisionLamb, {"lr": 1e-2, "reduced_precision_dtype": BF16}),
}


def build(name, dtype=torch.float32, seed=0, **extra):
    """Return (model, optimizer) with seeded parameters."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).to(dtype)
    cls, keywords = OPTIMIZERS[name]
    return model, cls(model.parameters(), **{**keywords, **extra})


def backward(model, seed):
    """Accumulate seeded gradients."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(x).float().square().mean().backward()


def train(model, optimizer, steps, start=0):
    """Take seeded steps."""
    for seed in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def same_parameters(a, b):
    """Tell whether two models are bitwise equal."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
