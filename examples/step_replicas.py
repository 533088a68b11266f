"""Three ranks train one model; a bit of rank 1's copy flips, and every rank is told.

    torchrun --standalone --nproc-per-node 3 examples/step_replicas.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = apexfx.train_step(model, F.cross_entropy, optimizer, ddp=True, opt_level="O0", inner="eager",
                             safeguard=apexfx.Safeguard(replica_check_interval=10))
    try:
        for number in range(1, 101):
            if number == 33 and rank == 1:
                model[2].weight.detach().view(torch.int32)[3, 7] ^= 1 << 12
            step(torch.randn(16, 20), torch.randint(4, (16,)))
    except apexfx.ReplicaMismatchError as error:
        if rank == 0:
            print(f"in call {number}, ranks {error.ranks}, parameters {error.parameters}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
