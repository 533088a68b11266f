"""A small GPT under fully_shard: trained by a step, evaluated and saved as FSDP2 does, resumed on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/step_sharded.py [--losses losses.json]
    torchrun --standalone --nproc-per-node 3 examples/step_sharded.py --resume

--losses trains another model by FSDP2's own loop, and writes the losses of both for benchmarks/loss_curves.py.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import apexfx

WORDS, LENGTH, FOLDER, STEPS = 32, 12, "sharded_checkpoint", 30


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole_model():
    torch.manual_seed(0)
    return GPT()


def sharded_model():
    model = whole_model()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(number):
    """Return this rank's part of a batch: words that follow each other by a rule."""
    generator = torch.Generator().manual_seed(number)
    words = [torch.randint(WORDS, (24,), generator=generator)]
    for _ in range(LENGTH):
        words.append((5 * words[-1] + 3) % WORDS)
    part = torch.stack(words, 1).tensor_split(dist.get_world_size())[dist.get_rank()]
    return part[:, :-1], part[:, 1:]


def mean(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def loop_losses(numbers):
    """Train by FSDP2's own loop."""
    model, losses = sharded_model(), []
    optimizer = adamw(model)
    for number in numbers:
        inputs, targets = batch(number)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


def show(what, step):
    alive = step.capture(*batch(0)).memory().alive
    print(f"{what:<20}" + ", ".join(f"{kind} {alive[kind][-1] / 2**10:.0f} KiB" for kind in ("parameters", "optimizer state")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--losses", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    options = {"opt_level": "O0", "inner": "eager", "max_grad_norm": 1.0}  # leave inner= out: Inductor

    model = sharded_model()
    optimizer, first = adamw(model), 0
    step = apexfx.train_step(model, loss_fn, optimizer, **options)
    if given.resume:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))) | {"first": 0}
        checkpoint.load(states, checkpoint_id=FOLDER)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        first = states["first"]
    losses = [mean(step(*batch(number))) for number in range(first, first + STEPS)]

    model.eval()
    with torch.no_grad():  # by FSDP2
        inputs, targets = batch(-1)
        accuracy = mean((model(inputs).argmax(-1) == targets).float().mean())
    model.train()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))) | {"first": first + STEPS}
    checkpoint.save(states, checkpoint_id=FOLDER)

    rows = [{"model": "a small GPT", "variant": "train_step", "losses": losses}]
    if given.losses is not None:
        rows.append({"model": "a small GPT", "variant": "FSDP2's loop", "losses": loop_losses(range(first, first + STEPS))})
    reference = whole_model()
    replicated = apexfx.train_step(reference, loss_fn, adamw(reference), ddp=True, **options)
    if dist.get_rank() == 0:
        print(f"steps {first + 1} to {first + STEPS}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, accuracy of other words "
              f"{accuracy:.2f}, {len(step.report.graphs)} graph")
        for what, each in (("ddp=True", replicated), ("under fully_shard", step)):
            show(what, each)
        if given.losses is not None:
            given.losses.write_text(json.dumps({"rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
