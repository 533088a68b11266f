"""FP16_Optimizer by hand: a model in half, masters in the optimizer. `amp.initialize(opt_level="O2")` does the same and more.

    python fp16_optimizer.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import digits

from apexfx.fp16_utils import FP16_Optimizer, network_to_half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--static-loss-scale", type=float, default=None, help="without it the scale is dynamic")
    args = parser.parse_args()
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device, half = torch.device("cuda" if cuda else "cpu"), torch.float16 if cuda else torch.bfloat16
    (images, labels), (test_images, test_labels) = (tuple(t.to(device) for t in part.tensors) for part in digits())
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = network_to_half(net, half)
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        static_loss_scale=args.static_loss_scale or 1.0, dynamic_loss_scale=args.static_loss_scale is None,
    )
    for epoch in range(args.epochs):
        model.train()
        for chosen in torch.randperm(len(labels), device=device).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[chosen]).float(), labels[chosen])
            optimizer.backward(loss)
            optimizer.clip_master_grads(5.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f} loss scale {optimizer.loss_scale:g}")


if __name__ == "__main__":
    main()
