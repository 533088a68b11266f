"""Train a small convolutional network in several processes that this script starts itself.

    python main.py --processes 2                # scikit-learn's digits
    python main.py --data FOLDER --processes 2  # MNIST's four files
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import digits, mnist

from apexfx import amp
from apexfx.parallel import DistributedDataParallel


class Net(nn.Module):
    """Images (N, 1, S, S) -> (N, 10), for S of 8 and 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(32)
        self.fc1, self.fc2 = nn.Linear(32 * 16, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.adaptive_max_pool2d(F.relu(self.norm2(self.conv2(x))), 4)
        return self.fc2(F.dropout(F.relu(self.fc1(x.flatten(1))), 0.2, training=self.training))


def train(rank: int, args: argparse.Namespace, store: str) -> None:
    """What one process does."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=args.processes)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train_set, test_set = mnist(args.data) if args.data else digits()
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * args.processes, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale, verbosity=rank == 0)
    parallel = DistributedDataParallel(model)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        parallel.train()
        for images, labels in loader:
            loss = F.cross_entropy(parallel(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        accuracy = test(model, test_set, device, rank, args.processes)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


@torch.no_grad()
def test(model: nn.Module, dataset: torch.utils.data.Dataset, device: torch.device, rank: int, num_ranks: int) -> float:
    """Return the accuracy over the whole test set, each process having looked at its share."""
    model.eval()
    totals = torch.zeros(2, device=device)
    for images, labels in DataLoader(torch.utils.data.Subset(dataset, range(rank, len(dataset), num_ranks)), 512):
        right = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        totals += torch.stack((right, torch.tensor(len(labels), device=device)))
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST's files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one process")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--loss-scale", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (args, str(Path(folder) / "store")), nprocs=args.processes)


if __name__ == "__main__":
    main()
