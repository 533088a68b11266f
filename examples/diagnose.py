"""Loses time in five places. `python -m apexfx diagnose examples/diagnose.py` names them."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())), nn.Linear(64, 1))
average = copy.deepcopy(model)
compiled = torch.compile(model, backend="aot_eager")
groups = [{"params": [p], "lr": 1e-3, "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in model.parameters()]
optimizer = torch.optim.AdamW(groups, foreach=False)

running_loss = 0.0
for step in range(10_000):
    loss = model(torch.randn(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running_loss += loss.item()
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters()):
            a.mul_(0.999).add_(p, alpha=0.001)
