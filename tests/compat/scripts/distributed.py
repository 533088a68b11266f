"""Two processes with Apex's data parallel, synchronized batch norm and amp."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def worker(rank, world_size, path):
    from apex import amp
    from apex.parallel import DistributedDataParallel, convert_syncbn_model

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))
    model = convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    model = DistributedDataParallel(model, delay_allreduce=True)
    for step in range(4):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(gathered, weights)
    assert all(torch.equal(weights, other) for other in gathered)
    if rank == 0:
        print("ranks agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args.world_size, os.path.join(folder, "store")), nprocs=args.world_size)
