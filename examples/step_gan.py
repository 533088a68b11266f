"""Train a generator of handwritten digits against a discriminator: two whole-step graphs over one module that holds both.

    python examples/step_gan.py
    torchrun --standalone --nproc-per-node 2 examples/step_gan.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import apexfx

EPOCHS, NOISE = 6, 32

# One process, or as many as torchrun has started.
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if num_ranks > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

# Data: 1797 images of 8 x 8 pixels in [-1, 1]. Every rank sees its share of each batch.
images = torch.tensor(load_digits().images).float()[:, None] / 8 - 1
sampler = DistributedSampler(TensorDataset(images), num_ranks, rank)
loader = DataLoader(TensorDataset(images), batch_size=64 // num_ranks, sampler=sampler, drop_last=True)


class GAN(nn.Module):
    """(N, NOISE, 1, 1) -> images (N, 1, 8, 8) -> logits (N, 1, 1, 1)."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 64, 4, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 1, 4, 2, 1), nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
            nn.Conv2d(64, 1, 2),
        )


def discriminator_objective(gan, images, noise):
    """Return the loss that falls as real images get high logits and made ones low logits."""
    made = gan.generator(noise).detach()
    return F.softplus(-gan.discriminator(images)).mean() + F.softplus(gan.discriminator(made)).mean()


def generator_objective(gan, noise):
    """Return the loss that falls as made images get high logits."""
    return F.softplus(-gan.discriminator(gan.generator(noise))).mean()


torch.manual_seed(0)
gan = GAN().to(device)
torch.manual_seed(rank)  # noise differs by rank
discriminator_optimizer, generator_optimizer = (torch.optim.Adam(part.parameters(), 1e-3, betas=(0.5, 0.999))
                                                for part in (gan.discriminator, gan.generator))

# A step trains what its optimizer holds, and refuses what its loss depends on besides, unless that is frozen.
# Leave out inner="eager" to have the graphs compiled by Inductor.
options = {"opt_level": "O1", "dtype": torch.bfloat16, "sync_bn": True, "ddp": num_ranks > 1, "inner": "eager"}
discriminator_step = apexfx.train_step(gan, optimizer=discriminator_optimizer, objective=discriminator_objective, **options)
generator_step = apexfx.train_step(gan, optimizer=generator_optimizer, objective=generator_objective, **options)

for epoch in range(EPOCHS):
    gan.train()
    sampler.set_epoch(epoch)
    for (real,) in loader:
        noise = torch.randn(len(real), NOISE, 1, 1, device=device)
        discriminator_loss = discriminator_step(real.to(device), noise)
        gan.discriminator.requires_grad_(False)  # the generator's gradients pass through it, and its own are for nobody
        generator_loss = generator_step(noise)
        gan.discriminator.requires_grad_(True)

    if rank == 0:
        gan.eval()
        with torch.no_grad():
            made = gan.generator(torch.randn(512, NOISE, 1, 1, generator=torch.Generator().manual_seed(0)).to(device)).cpu()
        difference = (made.mean(0) - images.mean(0)).abs().mean()
        print(f"epoch {epoch + 1}: discriminator {discriminator_loss:.3f}, generator {generator_loss:.3f}, "
              f"mean images differ by {difference:.3f}")

if num_ranks > 1:
    dist.destroy_process_group()
