"""Train a ResNet with amp, on folders of images or on scikit-learn's digits.

    python main_amp.py --opt-level O1                                    # digits, one process
    torchrun --nproc-per-node 2 main_amp.py --opt-level O2 --sync-bn     # data parallel
    python main_amp.py DATA -a resnet50 -b 224 --opt-level O2            # DATA/train and DATA/val, folders by class
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import Crop, ImageFolder, Prefetcher, digits
from resnet import ARCHITECTURES, build

from apexfx import amp, optimizers
from apexfx.parallel import DistributedDataParallel, convert_syncbn_model


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="folder with train/ and val/; without it, scikit-learn's digits")
    parser.add_argument("-a", "--arch", choices=ARCHITECTURES, help="resnet_small on digits, resnet50 on images")
    parser.add_argument("-j", "--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("-b", "--batch-size", type=int, default=64, help="of one process")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--lr", type=float, default=None,
                        help="for a global batch of 256, scaled in proportion; 0.1, and 0.8 on digits")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--print-freq", type=int, default=10)
    parser.add_argument("--checkpoint", default="", help="file written after every epoch")
    parser.add_argument("--resume", default="", help="checkpoint to go on from")
    parser.add_argument("--evaluate", action="store_true", help="only validate")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--sync-bn", "--sync_bn", action="store_true", help="batch norm over all processes")
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--keep-batchnorm-fp32", default=None)
    parser.add_argument("--loss-scale", default=None)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default=None, help="default: float16 on CUDA, else bfloat16")
    parser.add_argument("--fused", action="store_true", help="apexfx.optimizers.FusedSGD")
    parser.add_argument("--channels-last", action="store_true")
    return parser.parse_args(arguments)


def loaders(args: argparse.Namespace, num_ranks: int) -> tuple[DataLoader, DataLoader, int]:
    if args.data:
        train = ImageFolder(os.path.join(args.data, "train"), Crop(args.image_size, train=True))
        test = ImageFolder(os.path.join(args.data, "val"), Crop(args.image_size, train=False))
        num_classes, workers = len(train.classes), args.workers
    else:
        train, test = digits(channels=3)
        num_classes, workers = 10, 0
    sampler = DistributedSampler(train) if num_ranks > 1 else None
    options = {"batch_size": args.batch_size, "num_workers": workers, "pin_memory": torch.cuda.is_available()}
    train_loader = DataLoader(train, shuffle=sampler is None, sampler=sampler, drop_last=True, **options)
    test_sampler = DistributedSampler(test, shuffle=False) if num_ranks > 1 else None
    return train_loader, DataLoader(test, sampler=test_sampler, **options), num_classes


def average(value: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return the mean of `value` over the processes."""
    if num_ranks > 1:
        dist.all_reduce(value)
        value /= num_ranks
    return value


def train_epoch(args, loader, model, optimizer, epoch, device, num_ranks, say) -> None:
    model.train()
    total_steps, start, seen = args.epochs * len(loader), time.perf_counter(), 0
    for i, (images, labels) in enumerate(Prefetcher(loader, device)):
        adjust(args, optimizer, epoch * len(loader) + i, total_steps, num_ranks)
        if args.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        seen += labels.numel() * num_ranks
        if i % args.print_freq == 0:  # the only wait for the device in the loop
            mean = average(loss.detach().clone(), num_ranks).item()
            rate = seen / (time.perf_counter() - start)
            say(f"epoch {epoch} step {i}/{len(loader)} loss {mean:.4f} {rate:.0f} images/s")


def adjust(args, optimizer, step: int, total_steps: int, num_ranks: int) -> None:
    """Warm up linearly over the first twentieth of the steps, then decay by a cosine."""
    peak = args.lr * args.batch_size * num_ranks / 256
    warm_up = max(1, total_steps // 20)
    decay = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / total_steps)).item())
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / warm_up) * decay


@torch.no_grad()
def validate(loader, model, device, num_ranks) -> float:
    """Return the share of test images classified right, over all processes."""
    model.eval()
    right = torch.zeros((), device=device)
    count = 0
    for images, labels in Prefetcher(loader, device):
        right += (model(images).argmax(1) == labels).sum()
        count += labels.numel()
    return average(right / count, num_ranks).item()


def main(arguments: list[str] | None = None) -> float:
    args = parse(arguments)
    num_ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    args.lr = args.lr or (0.1 if args.data else 0.8)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if num_ranks > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.backends.cudnn.benchmark = not args.deterministic
    if args.deterministic:
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    train_loader, test_loader, num_classes = loaders(args, num_ranks)
    model = build(args.arch or ("resnet50" if args.data else "resnet_small"), num_classes).to(device)
    if args.sync_bn:
        model = convert_syncbn_model(model)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    kind = optimizers.FusedSGD if args.fused else torch.optim.SGD
    optimizer = kind(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, keep_batchnorm_fp32=args.keep_batchnorm_fp32, loss_scale=args.loss_scale,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
    )
    first_epoch, best = 0, 0.0
    if args.resume:
        saved = torch.load(args.resume, map_location=device, weights_only=True)
        first_epoch, best = saved["epoch"], saved["best"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        say(f"resumed after epoch {first_epoch - 1}")
    wrapped = DistributedDataParallel(model) if num_ranks > 1 else model
    if args.evaluate:
        best = validate(test_loader, wrapped, device, num_ranks)
        say(f"accuracy {best:.4f}")
        return best
    for epoch in range(first_epoch, args.epochs):
        if num_ranks > 1:
            train_loader.sampler.set_epoch(epoch)
        train_epoch(args, train_loader, wrapped, optimizer, epoch, device, num_ranks, say)
        accuracy = validate(test_loader, wrapped, device, num_ranks)
        best = max(best, accuracy)
        say(f"epoch {epoch} accuracy {accuracy:.4f} best {best:.4f}")
        if args.checkpoint and rank == 0:
            torch.save({"epoch": epoch + 1, "best": best, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "amp": amp.state_dict()}, args.checkpoint)
    if num_ranks > 1:
        dist.destroy_process_group()
    return best


if __name__ == "__main__":
    main()
