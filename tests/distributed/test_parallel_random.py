"""Random models through random wrappers, against a plain all_reduce of every gradient."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apexfx.parallel import DistributedDataParallel
from apexfx.testing import assert_close
from tests.distributed.launch import run_ranks

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)


class RandomModel(nn.Module):
    """A sum of random terms in random parameters: used never, once, several times, shared, frozen, of mixed dtypes."""

    def __init__(self, choose: random.Random):
        super().__init__()
        generator = torch.Generator().manual_seed(choose.randrange(2**31))
        for i in range(choose.randint(1, 12)):
            shape = [choose.randint(1, 7) for _ in range(choose.randint(0, 4))]
            value = torch.randn(shape, generator=generator)
            if len(shape) == 4 and choose.random() < 0.5:
                value = value.to(memory_format=torch.channels_last)
            setattr(self, f"p{i}", nn.Parameter(value.to(choose.choice(DTYPES)), requires_grad=choose.random() < 0.85))
        self.p0.requires_grad_(True)
        self.shared = self.p0  # a second name for it
        self.always = nn.Parameter(torch.ones(3))

    def terms(self):
        return [p for name, p in self.named_parameters() if name != "always"]

    def forward(self, scale, uses):
        total = (self.always * scale).sum().double()
        for p, count in zip(self.terms(), uses):
            for k in range(count):
                total = total + (p.double() * (scale + k)).sin().sum()
        return total + self.shared.double().mean() * scale if uses[0] else total


def arguments(choose, model):
    """Random arguments of the wrapper, and whether ranks may use different parameters."""
    given = {"message_size": choose.choice([1, 7, 40, 10**6]), "gradient_predivide_factor": choose.choice([1.0, 2.0]),
             "retain_allreduce_buffers": choose.random() < 0.3, "gradient_average": choose.random() < 0.8}
    kind = choose.choice(["plain", "plain", "delay", "trigger", "ddp", "fp32", "streams"])
    live = [p for p in model.parameters() if p.requires_grad]
    if kind == "delay":
        given["delay_allreduce"] = True
    elif kind == "trigger":
        given["allreduce_trigger_params"] = choose.sample(live, min(2, len(live)))
    elif kind == "ddp":
        given |= {"layout": "ddp", "bucket_cap_mb": choose.choice([0.0001, 0.001, 25.0]), "message_size": None}
    elif kind == "fp32":
        given["allreduce_always_fp32"] = True
    elif kind == "streams":
        given["num_allreduce_streams"] = 2
    uneven = kind == "delay" or choose.random() < 0.5
    given["find_unused_parameters"] = (uneven or kind == "ddp") and kind != "delay"  # as torch's, it is not told what is unused
    return given, uneven


def one_case(seed, rank, world_size):
    choose = random.Random(seed)
    model = RandomModel(choose)
    twin = copy.deepcopy(model)
    given, uneven = arguments(choose, model)
    wrapped = DistributedDataParallel(model, timeout_s=30, **given)
    plan = [choose.choice([0, 1, 1, 2]) for _ in model.terms()]
    factor = (1 / world_size if given["gradient_average"] else 1.0 / given["gradient_predivide_factor"])
    for step in range(3):
        if choose.random() < 0.3:
            frozen = choose.choice(model.terms()[1:] or [model.p0])
            frozen.requires_grad_(not frozen.requires_grad)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            a.grad = b.grad = None
            b.requires_grad_(a.requires_grad)
        num_local = choose.choice([0, 0, 1, 2])
        every = [[choose.choice([0, 1, 2]) for _ in plan] if uneven else plan for _ in range(world_size * (num_local + 1))]
        for micro in range(num_local + 1):
            uses, scale = every[micro * world_size + rank], torch.tensor(1.0 + rank + micro)
            if micro < num_local:
                with wrapped.no_sync():
                    wrapped(scale, uses).backward()
            else:
                wrapped(scale, uses).backward()
            twin(scale, uses).backward()
        compare(seed, model, twin, factor, world_size)


def compare(seed, model, twin, factor, world_size):
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters() and twin.parameters(), strict=True):
        used = torch.tensor([float(q.grad is not None)])
        total = q.grad.double() if q.grad is not None else torch.zeros_like(q).double()
        dist.all_reduce(used)
        dist.all_reduce(total)
        if not p.requires_grad:
            continue
        assert (p.grad is not None) == bool(used), f"seed {seed}: {name}"
        if p.grad is not None:
            assert p.grad.dtype == p.dtype and p.grad.shape == p.shape
            dtype = torch.bfloat16 if p.dtype == torch.bfloat16 else torch.float32
            try:
                assert_close(p.grad, total * factor, dtype=dtype, scale=8)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {name}: {error}") from None


def campaign(rank, world_size, first, num):
    for seed in range(first, first + num):
        one_case(seed, rank, world_size)


def test_random_models():
    run_ranks(campaign, 2, 0, 15, timeout=180)


@pytest.mark.long
@pytest.mark.parametrize("world_size, first", [(2, 1000), (3, 2000), (4, 3000)])
def test_many_random_models(world_size, first):
    run_ranks(campaign, world_size, first, 300, timeout=900)
