"""Train a policy that predicts the next actions of a robot from its camera image and joints.

    torchrun --standalone --nproc-per-node 2 robot_policy.py
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, ACTIONS, WIDTH = 40, 8, 10, 256


class FrozenBatchNorm(nn.Module):
    """The batch norm of a pretrained backbone: its statistics never change."""

    def __init__(self, channels):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("mean", 0.0), ("variance", 1.0)):
            self.register_buffer(name, torch.full((channels, 1, 1), value))

    def forward(self, x):
        scale = self.weight * (self.variance + 1e-5).rsqrt()
        return x * scale + (self.bias - self.mean * scale)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        layers, channels = [], [3, 16, 32, 64, 64, 128, 128, 256]
        for index, (before, after) in enumerate(zip(channels, channels[1:])):
            convolution = nn.Conv2d(before, after, 3, stride=1 + index % 2, padding=1, bias=False)
            layers += [convolution, FrozenBatchNorm(after), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.joints = nn.Linear(14, WIDTH)
        self.latent = nn.Linear(WIDTH, 2 * 32)
        self.from_latent = nn.Linear(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 512, dropout=0.0, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.queries = nn.Parameter(torch.randn(ACTIONS, WIDTH) * 0.02)
        self.head = nn.Linear(WIDTH, 14)

    def forward(self, batch):
        image = self.backbone(batch["image"]).mean((2, 3))
        joints = self.joints(batch["joints"])
        mean, log_variance = self.latent(joints).chunk(2, -1)
        latent = self.from_latent(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        queries = self.queries.expand(len(image), -1, -1)
        tokens = self.transformer(torch.cat([torch.stack([image, joints, latent], 1), queries], 1))
        l1 = F.l1_loss(self.head(tokens[:, 3:]), batch["actions"])
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        losses = {}
        losses["l1"] = l1.item()  # expected: host sync in the model
        losses["kl"] = kl.item()  # expected: host sync in the model (the second)
        return l1 + 10 * kl, losses


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    pool = [{"image": torch.randn(BATCH, 3, 48, 48, generator=generator), "joints": torch.randn(BATCH, 14, generator=generator),
             "actions": torch.randn(BATCH, ACTIONS, 14, generator=generator)} for _ in range(4)]
    for step in range(STEPS):
        yield pool[step % len(pool)]


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = Policy()
    model = DistributedDataParallel(policy, bucket_cap_mb=1)  # expected: buffer broadcast
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    start, total = time.perf_counter(), 0.0
    for step, batch in enumerate(batches(rank), 1):
        loss, losses = model(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()  # expected: host sync in the loop
        if step % 10 == 0 and rank == 0:
            seconds = time.perf_counter() - start
            print(f"step {step}: loss {total / step:.3f}, l1 {losses['l1']:.3f}, norm {norm:.2f}, {1000 * seconds / step:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
