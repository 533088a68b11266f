"""Data parallel training that survives the death of a rank, and ends with the bits an undisturbed run ends with.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic/train.py --folder out/elastic
    # the same, with rank 1 killed in step 12, while the others wait for its gradients:
    torchrun ... examples/elastic/train.py --folder out/killed --kill-rank 1 --kill-step 12
    # four ranks, of which one dies, and two that go on, to the bits of any number of ranks:
    torchrun --standalone --nproc-per-node 4 ... --folder out/fewer --slices 4 --kill-rank 3 --kill-step 12
    torchrun --standalone --nproc-per-node 2 ... --folder out/fewer --slices 4

A dead rank makes the others raise within seconds, and say who is gone; torchrun restarts all of them; they load the last
intact checkpoint (parameters, optimizer, safeguard, random state, step) and go on. Data is a function of step and slice, so
nothing else has a state. A slice is what a rank computes in a call: one a rank, or `--slices` by whatever ranks there are.
One slice is ruined: every rank skips its step, writes a bundle of it where each has one slice, and says so in the end.
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

import apexfx
from apexfx.parallel import RankFailureError


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--kill-rank", type=int, default=-1, help="a rank that kills itself, once")
    parser.add_argument("--kill-step", type=int, default=-1)
    parser.add_argument("--ruined-step", type=int, default=7, help="a step whose first slice is not finite")
    parser.add_argument("--slices", type=int, help="of a step, whatever the number of ranks; by default one a rank")
    return parser.parse_args()


def batch(step: int, number: int, ruined_step: int) -> tuple[Tensor, Tensor]:
    """Return a slice of a step's data."""
    generator = torch.Generator().manual_seed(step * 1000 + number)
    x = torch.randn(16, 20, generator=generator)
    labels = (x[:, :4].sum(1) > 0).long()
    if (step, number) == (ruined_step, 0):
        x[3, 5] = float("nan")
    return x, labels


def load(path: Path, train: apexfx.TrainStep) -> int:
    """Restore everything from `path`; return the step to go on with."""
    state = state_of(train, step=0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(train.model, train.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train.load_state_dict({**train.state_dict(), **state["own"]})
    if (drawn := state.get(f"random of rank {dist.get_rank()}")) is not None:
        torch.set_rng_state(drawn)
    return int(state["step"])


def state_of(train: apexfx.TrainStep, step: int) -> dict[str, Any]:
    parameters, moments = get_state_dict(train.model, train.optimizer)
    own = {name: held for name, held in train.state_dict().items() if name in ("safeguard", "slices")}
    state = {"model": parameters, "optimizer": moments, "own": own, "step": torch.tensor(step)}
    if "slices" not in own:  # with slices, random numbers follow from the seed
        state[f"random of rank {dist.get_rank()}"] = torch.get_rng_state()
    return state


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
    rank, share = dist.get_rank(), given.slices // dist.get_world_size() if given.slices else 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    train = apexfx.train_step(model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O0",
                              inner="eager", ddp=apexfx.BucketConfig(timeout_s=30),
                              slices=given.slices,
                              safeguard=apexfx.Safeguard(record_dir=given.folder / "failures" if given.slices is None else None))
    if given.slices is None:
        torch.manual_seed(rank)  # of dropout
    begin, path = 0, checkpoint.newest(given.folder)
    if path is not None:
        begin = load(path, train)
    print(f"rank {rank}, attempt {attempt}: begins at step {begin}" + (f" of {path.name}" if path else ""), flush=True)
    for step in range(begin, given.steps):
        if attempt == 0 and (rank, step) == (given.kill_rank, given.kill_step):
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            for number in range(rank * share, (rank + 1) * share):
                loss = train(*batch(step, number, given.ruined_step))
        except RankFailureError as error:
            print(f"rank {rank}: after {time.monotonic() - started:.1f} s: {error}", flush=True)
            raise
        if termination.is_set():
            raise SystemExit(f"rank {rank}: asked to terminate after step {step}")
        if (step + 1) % given.checkpoint_every == 0:
            checkpoint.save(given.folder, step + 1, state_of(train, step + 1))
    for event in train.events:
        print(f"rank {rank}: skipped {event}", flush=True)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"rank {rank}: loss {loss.item():.4f}, parameters {digest[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
