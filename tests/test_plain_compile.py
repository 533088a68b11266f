"""Plain `torch.compile` is the same in a process that has made and run a step of ours, and in one that has not."""

from __future__ import annotations

import collections
import contextlib
import enum
import hashlib
import json
import math
import operator
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.quick_compiles  # noqa: F401


class Mode(enum.Enum):
    TRAIN, EVAL = 1, 2


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.last = nn.Linear(4, 4), {}, collections.deque(maxlen=2)
        self.tags = {"a": 1.0}

    def forward(self, x):
        self.last.append(x.sum())
        self.seen["n"] = self.seen.get("n", 0) + 1
        return self.linear(x) * len(self.last) + self.seen["n"] + sum(vars(self)["tags"].values())


def _closure():
    held = []

    def keep(x):
        held.append(x.mean())
        return x * len(held)

    return keep


class Caller:
    def __init__(self, function):
        self.function = function

    def run(self, x):
        return self.function(x)


_bound = _closure()


def by_closure(x):
    return Caller(_bound).run(x)


def by_default(x, kept=[]):  # noqa: B006
    kept.append(1)
    return x + len(kept)


def index_by_tensor(x):
    return x[torch.tensor(1)] + x[:, torch.tensor(2)].sum()


def write_by_tensor(x):
    y = x.clone()
    y[torch.tensor(1)] = 0.5
    return y


def index_by_item(x):
    return x[int(x.argmax()) % 3]


def write_by_item(x):
    y = x.clone()
    y[x.argmax().item() % 3] = 1.0
    return y


def mask_rows(x):
    return x[x[:, 0] > 0]


def write_mask(x):
    y = x.clone()
    y[x > 0.3] = 0.0
    return y


def is_of_sizes(x):
    return x + 1 if x.shape[0] is x.shape[1] else x - 1


def is_of_constants(x):
    return x * 2 if Mode.TRAIN is Mode(1) else x


def gradient_of_list(x):
    w = x.clone().requires_grad_()
    return torch.autograd.grad((w ** 2).sum(), [w])[0]


def gradient_of_generator(x):
    w = x.clone().requires_grad_()
    return torch.autograd.grad((w ** 2).sum(), (each for each in (w,)))[0]


def func_grad(x):
    return torch.func.grad(lambda y: (y ** 3).sum())(x)


def func_vmap(x):
    return torch.vmap(lambda row: row.dot(row))(x)


def dictionary(x):
    held = {"b": x, "a": x + 1}
    held.update(c=held.pop("b"))
    return sum(held.values())


def dict_of_module(x):
    return x * sum(1 for name in kept.__dict__ if "tag" in name)


def classes(x):
    return super(Kept, kept).training * x + isinstance(kept, nn.Module)


def with_context(x):
    with contextlib.suppress(ValueError):
        int("no")
    return x


def by_math(x):
    return x * math.sqrt(x.shape[0]) + max(x.shape) - min(3, x.shape[1]) + math.pow(2.0, 3.0)


def by_python_random(x):
    return x * random.random()


def by_dropout(x):
    return F.dropout(x, 0.5)


def chained(x):
    return operator.itemgetter(0)(x.split(2)) @ x[:2].T


@torch.compiler.nested_compile_region
def region(x):
    return x.sin() + 1


def by_region(x):
    return region(region(x))


def in_place(x):
    return x.clone().unfold(0, 2, 1).mul_(2)


def branch(x):
    return x + 1 if x.sum() > 0 else x - 1


def by_string(x):
    return x * len(f"{x.shape}")


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda y: (y * 2).sin(), x.requires_grad_(), use_reentrant=False)


def sorted_sets(x):
    return x * sum(sorted({3, 1, 2})) + len(frozenset((1, 1)))


def by_id(x):
    return x * (id(x) == id(x))


torch.manual_seed(0)
kept = Kept()
PROGRAMS = [kept, by_closure, by_default, index_by_tensor, write_by_tensor, index_by_item, write_by_item, mask_rows, write_mask,
            is_of_sizes, is_of_constants, gradient_of_list, gradient_of_generator, func_grad, func_vmap, dictionary,
            dict_of_module, classes, with_context, by_math, by_python_random, by_dropout, chained, by_region, in_place, branch,
            by_string, checkpointed, sorted_sets, by_id, nn.GRU(4, 4), nn.BatchNorm1d(4)]


def what_torch_does() -> dict[str, list[str]]:
    """Return what becomes of each program: its graphs, and its results or errors, in one graph and in several, twice each."""
    found = {}
    for program in PROGRAMS:
        lines = found.setdefault(getattr(program, "__name__", type(program).__name__), [])
        for fullgraph in (True, False):
            torch.compiler.reset()

            def backend(gm, inputs):
                lines.append(gm.print_readable(print_output=False))
                return gm.forward

            compiled = torch.compile(program, backend=backend, fullgraph=fullgraph)
            for rows in (4, 6):
                torch.manual_seed(0)
                random.seed(0)
                try:
                    result = compiled(torch.randn(rows, 4))
                except Exception as error:
                    lines.append(f"{type(error).__name__}: {error}")
                else:
                    result = result[0] if isinstance(result, tuple) else result
                    lines.append(f"{result.shape} {hashlib.sha256(result.detach().numpy().tobytes()).hexdigest()}")
    return found


def use_a_step() -> None:
    """Make and run a step whose optimizer is traced, and a transformed model."""
    import apexfx

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch = torch.randn(8, 4), torch.randint(4, (8,))
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.NAdam(model.parameters()), opt_level="O1", inner="eager")
    for _ in range(2):
        step(*batch)
    apexfx.transform(nn.Linear(4, 4), inner="eager")(batch[0]).sum().backward()


@pytest.mark.long
def test_thirty_programs_have_the_graphs_errors_and_results_that_they_have_without_us():
    processes = [subprocess.Popen([sys.executable, "-m", "tests.test_plain_compile", *used], stdout=subprocess.PIPE, text=True,
                                  cwd=Path(__file__).parents[1]) for used in ([], ["used"])]
    of_each = [json.loads(process.communicate()[0]) for process in processes]
    assert len(PROGRAMS) >= 30 and of_each[0].keys() == of_each[1].keys()
    assert {name: lines for name, lines in of_each[1].items() if lines != of_each[0][name]} == {}


if __name__ == "__main__":
    if sys.argv[1:]:
        use_a_step()
    print(json.dumps(what_torch_does()))
