"""A whole training step as one graph: three steps, and what was done to them.

    python examples/first_step.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import apexfx

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = [(torch.randn(32, 20), torch.randint(4, (32,))) for _ in range(3)]

step = apexfx.train_step(model, F.cross_entropy, optimizer, dtype=torch.bfloat16, max_grad_norm=1.0,
                         inner="eager")  # leave inner= out: Inductor compiles the graph, for twenty seconds at first
for inputs, labels in loader:
    loss = step(inputs, labels)
    print(f"loss {loss:.3f}")

print(step.report)
