"""Everything that a resumed training needs, saved and loaded: it goes on to the bit, on one process and on several.

    python examples/checkpoint.py
    torchrun --standalone --nproc-per-node 2 examples/checkpoint.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx

rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Training:
    def __init__(self):
        torch.manual_seed(rank)  # dropout differs by rank; ddp=True copies rank 0's parameters
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 2))
        self.model = apexfx.transform(self.model, opt_level="O2", dtype=torch.float16, ddp=num_ranks > 1, inner="eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = torch.amp.GradScaler("cpu")
        self.step = 0

    def train(self, until):
        while self.step < until:
            self.step += 1
            data = torch.Generator().manual_seed(1000 * self.step + rank)  # a batch is a function of step and rank
            inputs = torch.randn(16, 8, generator=data)
            loss = F.cross_entropy(self.model(inputs), (inputs.sum(1) > 0).long())
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()

    def save(self, path):
        """Write a checkpoint; every rank calls this."""
        random_states = [torch.get_rng_state()]  # on CUDA torch.cuda.get_rng_state(), too
        if num_ranks > 1:
            random_states = [None] * num_ranks
            dist.all_gather_object(random_states, torch.get_rng_state())
        if rank == 0:
            state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule", "scaler")}
            torch.save({**state, "step": self.step, "random_states": random_states}, f"{path}.new")
            os.replace(f"{path}.new", path)  # a run that dies while it writes leaves the old one whole
        if num_ranks > 1:
            dist.barrier()

    def load(self, path):
        """Read a checkpoint; every rank calls this."""
        state = torch.load(path, map_location="cpu")
        for name in ("model", "optimizer", "schedule", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.step = state["step"]
        torch.set_rng_state(state["random_states"][rank])


if num_ranks > 1:
    dist.init_process_group("gloo")
whole = Training()
whole.train(until=10)

stopped = Training()
stopped.train(until=5)
stopped.save("checkpoint.pt")
resumed = Training()
resumed.load("checkpoint.pt")
resumed.train(until=10)

for (name, expected), parameter in zip(whole.model.named_parameters(), resumed.model.parameters()):
    assert torch.equal(expected, parameter), f"{name} differs on rank {rank}"
if rank == 0:
    print(f"resumed after step 5; all parameters are the same after step {resumed.step}, on {num_ranks} rank(s)")
if num_ranks > 1:
    dist.destroy_process_group()
