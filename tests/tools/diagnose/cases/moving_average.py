"""Train an image classifier, and keep a moving average of its weights to evaluate with.

    python moving_average.py
"""

import copy
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS, BATCH, CLASSES, WIDTH, BLOCKS = 30, 4, 10, 16, 40


class MovingAverage:
    def __init__(self, model, decay=0.9999, ramp=2000):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.updates, self.decay = 0, lambda updates: decay * (1 - math.exp(-updates / ramp))

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = self.decay(self.updates)
        new = model.state_dict()
        for name, average in self.model.state_dict().items():  # expected: EMA loop
            if average.dtype.is_floating_point:
                average *= decay  # expected: EMA loop
                average += (1 - decay) * new[name].detach()  # expected: EMA loop


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, WIDTH), nn.GroupNorm(4, WIDTH)

    def forward(self, x):
        return x + F.silu(self.norm2(self.pointwise(self.norm1(self.depthwise(x)))))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 4, stride=4), *(Block() for _ in range(BLOCKS)),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))
    average = MovingAverage(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images, labels = torch.randn(4, BATCH, 3, 32, 32), torch.randint(CLASSES, (4, BATCH))
    start, losses = time.perf_counter(), []
    for step in range(STEPS):
        loss = F.cross_entropy(model(images[step % 4]), labels[step % 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        losses.append(loss.detach())
    print(f"loss {torch.stack(losses).mean():.3f}, {1000 * (time.perf_counter() - start) / STEPS:.1f} ms a step")


if __name__ == "__main__":
    main()
