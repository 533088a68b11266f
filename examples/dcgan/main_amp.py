"""Train a DCGAN (Radford et al. 2015) with amp: two models, two optimizers, three losses with a scaler each.

    python main_amp.py --opt-level O1                        # scikit-learn's digits, 8 x 8
    python main_amp.py --data FOLDER --image-size 64         # FOLDER/class/image.jpg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import Crop, ImageFolder, Prefetcher, digits

from apexfx import amp


def initialize_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator(size: int, latent: int, width: int, channels: int) -> nn.Sequential:
    """(N, latent, 1, 1) -> images (N, channels, size, size); `size` is 4 times a power of 2."""
    features = width * size // 8
    layers: list[nn.Module] = [nn.ConvTranspose2d(latent, features, 4, bias=False), nn.BatchNorm2d(features), nn.ReLU()]
    while features > width:
        layers += [nn.ConvTranspose2d(features, features // 2, 4, 2, 1, bias=False), nn.BatchNorm2d(features // 2), nn.ReLU()]
        features //= 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(features, channels, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(size: int, width: int, channels: int) -> nn.Sequential:
    """Images -> (N, 1, 1, 1) logits; no sigmoid, so that the loss can be computed from logits."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    features = width
    while features < width * size // 8:
        layers += [nn.Conv2d(features, features * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(features * 2), nn.LeakyReLU(0.2)]
        features *= 2
    return nn.Sequential(*layers, nn.Conv2d(features, 1, 4, bias=False))


def loss_of(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of images by class; without it, scikit-learn's digits")
    parser.add_argument("--image-size", type=int, default=None, help="4 times a power of 2; 8 for digits, 64 for images")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--beta1", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--out", default="", help="file for the last samples and the state of everything")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = args.image_size or (64 if args.data else 8)
    if size < 8 or size & (size - 1):
        raise ValueError(f"--image-size {size} was given, expected a power of 2, 8 or more")
    channels = 3 if args.data else 1
    dataset = ImageFolder(args.data, Crop(size, train=False)) if args.data else digits()[0]
    loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers if args.data else 0)
    g = generator(size, args.latent, args.width, channels).to(device).apply(initialize_weights)
    d = discriminator(size, args.width, channels).to(device).apply(initialize_weights)
    g_optimizer, d_optimizer = (torch.optim.Adam(m.parameters(), lr=args.lr, betas=(args.beta1, 0.999)) for m in (g, d))
    [d, g], [d_optimizer, g_optimizer] = amp.initialize([d, g], [d_optimizer, g_optimizer], opt_level=args.opt_level,
                                                        num_losses=3)
    fixed = torch.randn(64, args.latent, 1, 1, device=device)
    for epoch in range(args.epochs):
        for i, (images, _) in enumerate(Prefetcher(loader, device)):
            # The discriminator: real images up, made ones down; a loss and a scaler for each.
            d_optimizer.zero_grad()
            real = loss_of(d(images), True)
            with amp.scale_loss(real, d_optimizer, loss_id=0) as scaled:
                scaled.backward()
            made = g(torch.randn(len(images), args.latent, 1, 1, device=device))
            fake = loss_of(d(made.detach()), False)
            with amp.scale_loss(fake, d_optimizer, loss_id=1) as scaled:
                scaled.backward()
            d_optimizer.step()
            # The generator: made images up. Its backward runs through the discriminator, whose gradients are dropped.
            g_optimizer.zero_grad()
            fooled = loss_of(d(made), True)
            with amp.scale_loss(fooled, g_optimizer, loss_id=2) as scaled:
                scaled.backward()
            g_optimizer.step()
            if i % 10 == 0:
                print(f"epoch {epoch} step {i}/{len(loader)} discriminator {(real + fake).item():.4f} "
                      f"generator {fooled.item():.4f}", flush=True)
    if args.out:
        with torch.no_grad():
            samples = g.eval()(fixed)
        torch.save({"samples": samples, "g": g.state_dict(), "d": d.state_dict(), "g_optimizer": g_optimizer.state_dict(),
                    "d_optimizer": d_optimizer.state_dict(), "amp": amp.state_dict()}, args.out)
        print(f"{len(samples)} samples and the state of everything are in {args.out}")


if __name__ == "__main__":
    main()
