"""amp and data parallel in the fewest lines.

    torchrun --nproc-per-node 2 distributed_data_parallel.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from apexfx import amp
from apexfx.parallel import DistributedDataParallel


def main() -> None:
    cuda = torch.cuda.is_available()
    local_rank, distributed = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) > 1
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if distributed:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(local_rank)
    x, y = torch.randn(64, 1024, device=device), torch.randn(64, 16, device=device)
    model = nn.Linear(1024, 16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=local_rank == 0)
    if distributed:
        model = DistributedDataParallel(model)  # after amp.initialize
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    if local_rank == 0:
        print(f"final loss {loss.item():.4f}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
