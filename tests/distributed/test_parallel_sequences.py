"""Random sequences of what a training loop does with gradients, against a model of what `p.grad` is to hold after each.

The model knows two parts of a gradient: what the ranks have reduced together, and what each has of its own since. Gradients are
small whole numbers, so that every sum and every mean of them is exact in every dtype, and nothing is compared with a tolerance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apexfx.parallel import DistributedDataParallel
from tests.distributed.launch import run_ranks

WORLD_SIZE = 2


class Products(nn.Module):
    """The gradient of a parameter is its coefficient; without one it is not used."""

    def __init__(self):
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=dtype)) for n, dtype in (
            (2, torch.float32), (3, torch.float32), (1, torch.bfloat16), (2, torch.bfloat16), (4, torch.float32)))

    def forward(self, coefficients):
        return sum((p.float() * c).sum() for p, c in zip(self.p, coefficients, strict=True) if c)


@dataclass
class Parts:
    """Of one parameter's gradient, what `reduced` together and what is `own` by rank; None where there is none."""

    reduced: float | None = None
    own: tuple[float | None, ...] = (None,) * WORLD_SIZE

    def accumulate(self, values):
        self.own = tuple(_plus(a, b) for a, b in zip(self.own, values))

    def reduce(self, factor):
        if any(value is not None for value in self.own):
            self.reduced = _plus(self.reduced, sum(value or 0 for value in self.own) * factor)
            self.own = (None,) * WORLD_SIZE

    def scale(self, factor):
        self.reduced, *own = (None if value is None else value * factor for value in (self.reduced, *self.own))
        self.own = tuple(own)

    def value(self, rank):
        return _plus(self.reduced, self.own[rank])


def _plus(a, b):
    return b if a is None else a if b is None else a + b


def random_options(choose, communicators, model):
    """Options of a wrapper, and whether the ranks may use different parameters."""
    options = {"gradient_predivide_factor": choose.choice([1.0, 2.0]), "retain_allreduce_buffers": choose.random() < 0.3,
               "gradient_average": choose.random() < 0.5, "timeout_s": 30}
    options |= choose.choice([{}, {}, {"comm_dtype": torch.bfloat16}, {"comm_dtype": torch.float64},
                              {"allreduce_always_fp32": True}])
    kind = choose.choice(["size", "size", "delay", "delay", "ddp", "trigger", "streams", "static", "plan"])
    if kind == "delay":
        options["delay_allreduce"] = True
    elif kind == "ddp":
        options |= {"layout": "ddp", "bucket_cap_mb": choose.choice([1e-5, 25.0])}
    elif kind == "trigger":
        options["allreduce_trigger_params"] = choose.sample(list(model.p), 2)
    elif kind == "streams":
        options |= {"num_allreduce_streams": 2, "allreduce_communicators": (communicators, [None, None])}
    elif kind == "static":
        options["static_graph"] = True
    if kind in ("size", "streams", "static"):
        options["message_size"] = choose.choice([1, 4, 100])
    uneven = kind != "static" and (kind == "delay" or choose.random() < 0.7)
    options["find_unused_parameters"] = uneven and (kind != "delay" or choose.random() < 0.5)
    return options, uneven, kind == "plan"


class Loop:
    """One wrapped model on this rank, beside the model of its gradients on all ranks."""

    def __init__(self, choose, rank, communicators):
        self.choose, self.rank = choose, rank
        self.module = Products()
        options, self.uneven, replays = random_options(choose, communicators, self.module)
        self.wrapper = DistributedDataParallel(self.module, **options)
        if replays:
            replay = {name: options[name] for name in ("retain_allreduce_buffers", "find_unused_parameters")}
            self.wrapper = DistributedDataParallel(self.module, plan=self.wrapper.bucket_plan, **replay)
        self.options, self.freezes = options, self.uneven and not replays
        self.factor = 1 / WORLD_SIZE if options["gradient_average"] else 1 / options["gradient_predivide_factor"]
        self.separate = not options["gradient_average"] or options.get("comm_dtype") is not None or replays
        self.parts = [Parts() for _ in self.module.p]
        self.used = [not i or replays or choose.random() < 0.8 for i in range(len(self.parts))]
        self.done = []

    # Each of these draws what it needs for all ranks, so that they stay in step.

    def coefficients(self):
        """By rank, a coefficient for each parameter, 0 where it is not used; the first always is."""
        used = [[not i or self.choose.random() < 0.5 for i in range(len(self.parts))] if self.uneven else self.used
                for _ in range(WORLD_SIZE)]
        return [[self.choose.choice([1, 2]) * use for use in rank] for rank in used]

    def backward(self, times=1, synchronizes=True):
        every = self.coefficients()
        loss = self.wrapper(every[self.rank])
        for i in range(times):
            loss.backward(retain_graph=i + 1 < times)
            trained = [(n, part) for n, part in enumerate(self.parts) if self.module.p[n].requires_grad]
            for n, part in trained:
                part.accumulate([rank[n] or None for rank in every])
                if synchronizes:
                    part.reduce(self.factor)

    def backward_twice(self):
        self.backward(2)

    def local_backward(self):
        with self.wrapper.no_sync():
            self.backward(self.choose.choice([1, 2]), synchronizes=False)

    def look(self):
        every = self.coefficients()
        parameters = [p for p in self.module.p if p.requires_grad]
        torch.autograd.grad(self.wrapper(every[self.rank]), parameters, allow_unused=True)
        self.wrapper.eval()  # a forward that no backward follows
        self.wrapper(every[self.rank])
        self.wrapper.train()

    def skip(self):
        self.wrapper(self.coefficients()[self.rank])

    def drop_grad(self):
        self.wrapper.zero_grad(set_to_none=True)
        self.parts = [Parts() for _ in self.parts]

    def zero_grad(self):
        self.wrapper.zero_grad(set_to_none=False)
        for part in self.parts:
            part.scale(0.0)

    def scale_grad(self):
        if self.separate and any(value is not None for part in self.parts for value in part.own):
            return  # is refused
        for p, part in zip(self.module.p, self.parts):
            part.scale(0.5)
            if p.grad is not None:
                p.grad.mul_(0.5)

    def optimizer_step(self):
        torch.optim.SGD(self.module.parameters(), 0.5).step()

    def freeze(self):
        if self.freezes:
            p = self.choose.choice(list(self.module.p)[1:])
            p.requires_grad_(not p.requires_grad)

    def run(self, length):
        operations = [self.backward] * 4 + [self.local_backward] * 2 + [
            self.backward_twice, self.look, self.skip, self.drop_grad, self.zero_grad, self.scale_grad, self.optimizer_step,
            self.freeze]
        for _ in range(length):
            operation = self.choose.choice(operations)
            self.done.append(operation.__name__)
            operation()
            self.check()

    def check(self):
        for n, (p, part) in enumerate(zip(self.module.p, self.parts)):
            expected = part.value(self.rank)
            shown = None if p.grad is None else p.grad.tolist()
            if (expected is None) != (p.grad is None) or (shown is not None and set(shown) != {expected}):
                raise AssertionError(f"parameter {n} has the gradient {shown}, expected {expected}, after {self.done} with "
                                     f"{self.options}")


def campaign(rank, world_size, first, num, sequences=8):
    communicators = [dist.new_group(), dist.new_group()]
    for seed in range(first, first + num):
        loop = Loop(random.Random(seed), rank, communicators)
        for _ in range(sequences):
            loop.run(8)
            loop.drop_grad()
            loop.done.clear()


def test_random_sequences():
    run_ranks(campaign, WORLD_SIZE, 0, 30)


@pytest.mark.long
def test_ten_thousand_random_sequences():
    run_ranks(campaign, WORLD_SIZE, 1000, 1250, timeout=1500)
