"""Programs made by chance train under Inductor as in float64, and the judge of them notices what is wrong."""

from __future__ import annotations

import functools

import pytest

from tests.tables import table
from tests.world.generated import Program, Results, execute, judge, minimize, program, step_results

in_eager = functools.partial(step_results, inner="eager")
# Quickly compiled: short reductions and a mask; a product, windows and topk; scatter, gates and a buffer.
QUICK = (6, 8, 11)


@table(1, "seed", QUICK)
def test_a_program_trains_as_in_float64(seed):
    verdict = judge(program(seed))
    assert verdict.category == "right", verdict


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10_000, 10_040))
def test_programs_train_as_in_float64(seed):
    verdict = judge(program(seed))
    assert verdict.category in ("right", "ill"), verdict


def test_a_seed_has_one_program():
    texts = [program(seed).text for seed in range(8)]
    assert texts == [program(seed).text for seed in range(8)] and len(set(texts)) == 8


def planted(made: Program, name: str, factor: float, calls: tuple[int, ...] = (0, 1)) -> Results:
    """Return what a step gives, but for the largest number of one result."""
    found = in_eager(made)
    for call in calls:
        numbers = found[call][name].view(-1)
        numbers[numbers.abs().argmax()] *= factor
    return found


@pytest.mark.long
def test_a_wrong_program_is_minimized():
    made = minimize(22, lambda made: planted(made, "loss", 2.0 if ".sort(" in made.text else 1.0))
    assert [piece.name for piece in made.pieces] == ["start", "reduced_over", "loss"]


SMALL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.register_buffer("largest", torch.zeros(16))

    def forward(self, x):
        h = self.layer(x).tanh()
        self.largest.copy_(torch.maximum(self.largest, h.detach().amax(0)))
        return h * {factor}


def batch(seed):
    torch.manual_seed(seed)
    return (torch.randn(33, 8),)


def objective(model, x):
    return model(x).square().mean()
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["loss", "gradient of layer.weight", "gradient of layer.bias", "largest"])
def test_the_judge_notices_one_wrong_number(name):
    made = execute(SMALL.format(factor=1))
    assert judge(made, in_eager).category == "right"
    verdict = judge(made, lambda made: planted(made, name, 1.1))
    assert verdict.category == "wrong" and list(verdict.faults) == [name]
    assert judge(made, lambda made: planted(made, name, 1.1, calls=(1,))).category == "once"
    assert judge(made, lambda made: planted(made, name, float("nan"))).category == "wrong"
    assert judge(made, lambda made: planted(made, name, 1 + 1e-7)).category == "right"


def test_the_judge_says_of_an_error_that_it_is_one():
    def raise_error(made):
        raise RuntimeError("no code for it\nmore")

    assert judge(execute(SMALL.format(factor=1)), raise_error).text.startswith("RuntimeError: no code for it")


def test_the_judge_leaves_out_what_float32_cannot_compute():
    assert judge(execute(SMALL.format(factor="((1e6 + h) - 1e6)")), in_eager).category == "ill"
