"""Train a small detector; `--compile` (the default) is meant to make it faster.

    python detector_compile.py [--no-compile]
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS, BATCH, QUERIES, CLASSES, WIDTH = 30, 8, 20, 5, 64


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.GELU(), nn.Conv2d(32, WIDTH, 2, stride=2))
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH) * 0.02)
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
                                    for _ in range(2))
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    def forward(self, images):
        memory = self.stem(images).flatten(2).transpose(1, 2)
        tokens = self.queries.expand(len(images), -1, -1)
        for layer in self.layers:
            tokens = layer(tokens, memory)
        return self.classes(tokens), self.boxes(tokens).sigmoid()


class Trainer:
    def __init__(self, model, use_compile):
        self.model = model
        self.compiled = torch.compile(model) if use_compile else model  # expected: compile never entered
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def training_step(self, images, classes, boxes):
        logits, predicted = self.model(images)
        loss = F.cross_entropy(logits.flatten(0, 1), classes.flatten()) + 5 * F.l1_loss(predicted, boxes)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Trainer(Detector(), options.compile)
    images = torch.randn(4, BATCH, 3, 64, 64)
    classes, boxes = torch.randint(CLASSES, (4, BATCH, QUERIES)), torch.rand(4, BATCH, QUERIES, 4)
    start, losses = time.perf_counter(), []
    for step in range(STEPS):
        losses.append(trainer.training_step(images[step % 4], classes[step % 4], boxes[step % 4]))
        if step % 10 == 9:
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.3f}, {time.perf_counter() - start:.1f} s")
            losses.clear()


if __name__ == "__main__":
    main()
