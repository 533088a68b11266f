"""A training step of a model under fully_shard: what the loop was, and what a rank holds.

    torchrun --standalone --nproc-per-node 2 examples/step_sharded.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import apexfx


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model(width=64, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 10))


def show(what, step, batch):
    alive = step.capture(*batch).memory().alive
    print(f"{what:<20}" + ", ".join(f"{kind} {alive[kind][-1] / 2**10:.0f} KiB" for kind in ("parameters", "optimizer state")))


def main():
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(32, 16, generator=generator), torch.randint(10, (32,), generator=generator)
    batch = [x.chunk(num_ranks)[rank] for x in whole]

    model = make_model()
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O1", inner="eager", max_grad_norm=1.0)
    losses = [float(step(*batch).detach()) for _ in range(20)]
    model.eval()
    with torch.no_grad():  # by FSDP2
        accuracy = (model(batch[0]).argmax(1) == batch[1]).float().mean()

    if rank == 0:
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, accuracy of what it was trained on {accuracy:.2f}, "
              f"{len(step.report.graphs)} graph")
    model.train()
    whole_model = make_model()
    whole_step = apexfx.train_step(whole_model, F.cross_entropy, torch.optim.AdamW(whole_model.parameters(), lr=1e-3),
                                   opt_level="O1", inner="eager", max_grad_norm=1.0, ddp=True)
    steps = (("ddp=True", whole_step), ("under fully_shard", step))
    for what, each in steps if rank == 0 else ():
        show(what, each, batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
