"""Data parallel training that survives the death of a rank, and ends with the bits an undisturbed run ends with.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic/train.py --folder out/elastic
    # the same, with rank 1 killed in the middle of the backward of step 12:
    torchrun ... examples/elastic/train.py --folder out/killed --kill-rank 1 --kill-step 12

A dead rank makes the others raise within seconds, and say who is gone; torchrun restarts all of them; they load the last
intact checkpoint (parameters, optimizer, random state, step) and go on. Data is a function of seed, step and rank, so
nothing else has a state.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.rendezvous import rendezvous

from apexfx.parallel import DistributedDataParallel, RankFailureError


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--kill-rank", type=int, default=-1, help="a rank that kills itself, once")
    parser.add_argument("--kill-step", type=int, default=-1)
    return parser.parse_args()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(16, 20, generator=generator)
    return x, (x[:, :4].sum(1) > 0).long()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore everything from `path`; return the step to go on with."""
    state = state_of(model, optimizer, step=0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state[f"random of rank {dist.get_rank()}"])
    return int(state["step"])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "step": torch.tensor(step),
            f"random of rank {dist.get_rank()}": torch.get_rng_state()}


def kill_in_backward(model: nn.Module) -> None:
    def die(_: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    next(model.parameters()).register_hook(die)


def defer_termination() -> threading.Event:
    """Have SIGTERM set the event that is returned, so that a step under way ends, or raises what it waits for.

    torchrun terminates all ranks as soon as one has died, and kills those that are still there 30 seconds later.
    """
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    return asked


def join(attempt: int) -> None:
    """Join the process group under keys of this attempt's own.

    torchrun keeps its store over a restart (torch 2.13), where the addresses of the dead ranks would still be found.
    """
    store, rank, world_size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def main() -> None:
    given = parse()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    termination = defer_termination()
    join(attempt)
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    wrapped = DistributedDataParallel(model, timeout_s=30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    begin, path = 0, checkpoint.newest(given.folder)
    if path is not None:
        begin = load(path, model, optimizer)
    print(f"rank {rank}, attempt {attempt}: begins at step {begin}" + (f" of {path.name}" if path else ""), flush=True)
    for step in range(begin, given.steps):
        if attempt == 0 and (rank, step) == (given.kill_rank, given.kill_step):
            kill_in_backward(model)
        optimizer.zero_grad()
        x, y = batch(step, rank)
        loss = nn.functional.cross_entropy(wrapped(x), y)
        started = time.monotonic()
        try:
            loss.backward()
        except RankFailureError as error:
            print(f"rank {rank}: after {time.monotonic() - started:.1f} s: {error}", flush=True)
            raise
        optimizer.step()
        if termination.is_set():
            raise SystemExit(f"rank {rank}: asked to terminate after step {step}")
        if (step + 1) % given.checkpoint_every == 0:
            checkpoint.save(given.folder, step + 1, state_of(model, optimizer, step + 1))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"rank {rank}: loss {loss.item():.4f}, parameters {digest[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
