"""Fine-tune a deep detector with a learning rate that decays from layer to layer.

    python detector_groups.py
"""

import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS, BATCH, TOKENS, WIDTH, BLOCKS, CLASSES = 20, 2, 16, 32, 38, 6
BASE_RATE, LAYER_DECAY, WEIGHT_DECAY = 1e-4, 0.8, 0.05


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, WIDTH)
        self.positions = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale, self.offset = nn.Parameter(torch.ones(CLASSES)), nn.Parameter(torch.zeros(CLASSES))

    def forward(self, patches):
        x = self.embed(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale + self.offset


def depth(name):
    """Return 0 to 12 for a parameter of a block, and 13 for all others."""
    return int(name.split(".")[1]) // 3 if name.startswith("blocks.") else 13


def parameter_groups(model):
    groups = []
    for name, parameter in model.named_parameters():
        rate = BASE_RATE * LAYER_DECAY ** (13 - depth(name))
        decay = WEIGHT_DECAY if parameter.ndim > 1 else 0.0
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return groups


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.AdamW(parameter_groups(model), fused=True)  # expected: optimizer groups
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    patches, labels = torch.randn(4, BATCH, TOKENS, 48), torch.randint(CLASSES, (4, BATCH, TOKENS))
    start, losses = time.perf_counter(), []
    for step in range(STEPS):
        loss = F.cross_entropy(model(patches[step % 4]).flatten(0, 1), labels[step % 4].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    print(f"{len(optimizer.param_groups)} groups: loss {torch.stack(losses).mean():.3f}, "
          f"{1000 * (time.perf_counter() - start) / STEPS:.1f} ms a step")


if __name__ == "__main__":
    main()
