"""Train a compiled network: one graph, one shape, and the loss is read once in fifteen steps.

    python compiled.py
"""

import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self, tokens=16, width=64, classes=10):
        super().__init__()
        self.embed, self.norm = nn.Linear(48, width), nn.LayerNorm(width)
        self.tokens, self.channels = nn.Linear(tokens, tokens), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + F.gelu(self.channels(x))
        return self.head(x.mean(1))


def train(steps=30):
    torch.manual_seed(0)
    model = Mixer()
    forward = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    inputs, labels = torch.randn(6, 32, 16, 48), torch.randint(10, (6, 32))
    mean = torch.zeros(())
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(inputs[step % 6]), labels[step % 6])
        loss.backward()
        optimizer.step()
        mean.add_(loss.detach())
        if step % 15 == 0:
            print(f"step {step}: loss {mean.item() / 15:.3f}")
            mean.zero_()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
