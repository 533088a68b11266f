"""Thousands of random calls of the list ops: wrong dtypes, lists, layouts, numbers. An exception or a result, no crash.

The calls run in a child process: a crash there is a failed test here, with the seed of the call that did it.
"""

from __future__ import annotations

import random
import sys

import pytest
import torch

from tests import fresh_process

OPS = (
    "adam_", "lamb_", "sgd_", "adagrad_", "novograd_", "multi_tensor_scale", "multi_tensor_axpby", "multi_tensor_l2norm",
    "flatten_bucket", "checksum",
)  # fmt: skip
NAMED = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)


def random_tensor(rng: random.Random) -> torch.Tensor:
    """Return a small tensor of any dtype, layout or device kind that fits on a CPU."""
    shape = rng.choice([(), (1,), (0,), (3,), (2, 3), (3, 2), (2, 2, 2, 2), (0, 3)])
    rare = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
    dtype = rng.choice([torch.float32] * 6 + rare)
    tensor = torch.ones(shape, dtype=dtype)
    kind = rng.randrange(12)
    if kind == 0 and tensor.dim() >= 2:
        return tensor.transpose(0, 1)
    if kind == 1 and tensor.dim() >= 1:
        return tensor[..., None].expand(*shape, 3)[..., 0]
    if kind == 2:
        return tensor[:1].expand(4, *shape[1:]) if tensor.dim() and shape[0] else tensor
    if kind == 3:
        return tensor.to("meta")
    if kind == 4 and dtype == torch.float32 and tensor.dim():
        return tensor.to_sparse()
    return tensor


def random_value(kind: str, rng: random.Random, default: object) -> object:
    """Return a value for an argument of a schema type; now and then one of another type."""
    if rng.random() < 0.02:
        return rng.choice([None, "text", [], {}, object()])
    if kind == "Tensor":
        return random_tensor(rng)
    if kind == "Optional[Tensor]":
        return rng.choice([None, None, torch.ones(()), torch.zeros(1), random_tensor(rng)])
    if kind == "List[Tensor]":
        return [random_tensor(rng) for _ in range(rng.randrange(4))]
    if kind == "List[int]":
        return [rng.choice([0, 1, 2, 3, 8, -1, 2**40, 2**62, -(2**63)]) for _ in range(rng.randrange(4))]
    if kind == "float":
        return rng.choice([0.0, 0.1, 0.9, 1.0, -1.0, 1e300, float("nan"), float("inf")])
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "int":
        return rng.choice([0, 1, 2, 5, 64, -1, 2**40, 2**63 - 1] if default is None else [0, 1, 2, -1])
    raise AssertionError(kind)


def arguments_for(schema, rng: random.Random) -> list[object]:
    """Return arguments; half the calls start from lists that match each other, so that deeper checks are reached."""
    shapes = [rng.choice([(), (3,), (2, 3), (0,)]) for _ in range(rng.randrange(1, 4))]
    matching = rng.random() < 0.6
    values: list[object] = []
    for argument in schema.arguments:
        kind = str(argument.type)
        if argument.name == "dtype":
            values.append(rng.choice([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]))
        elif matching and kind == "List[Tensor]" and rng.random() < 0.93:
            values.append([torch.ones(shape) for shape in shapes])
        elif matching and argument.name == "step":
            values.append(torch.zeros(()))
        elif matching and kind == "float" and rng.random() < 0.9:
            values.append(0.5)
        elif matching and kind == "Optional[Tensor]" and rng.random() < 0.9:
            values.append(rng.choice([None, torch.ones(())]))
        else:
            values.append(random_value(kind, rng, argument.default_value))
        # Numbers that ask for more memory than there is are not what is tested.
        if argument.name == "numel" and isinstance(values[-1], int) and values[-1] > 1000 and rng.random() < 0.9:
            values[-1] = 100
    return values


def campaign(seed: int, calls: int) -> dict[str, int]:
    """Make the calls; return how many gave a result and how many raised. Prints the seed of each before it is made."""
    counts = {"result": 0, "raised": 0}
    for i in range(calls):
        rng = random.Random(f"{seed}/{i}")
        name = OPS[i % len(OPS)]
        op = getattr(torch.ops.apexfx, name).default
        arguments = arguments_for(op._schema, rng)
        print(f"{name} {seed}/{i}", file=sys.stderr)
        try:
            op(*arguments)
            counts["result"] += 1
        except NAMED as error:
            assert str(error), "an exception without words"
            counts["raised"] += 1
    return counts


@pytest.mark.long
@pytest.mark.parametrize("seed, calls", [(0, 1000), pytest.param(1, 30_000, marks=pytest.mark.long)])
def test_calls_give_a_result_or_an_exception(seed, calls):
    counts = fresh_process.call(campaign, seed, calls)
    assert counts["result"] > 0.1 * calls and counts["raised"] > 0.33 * calls, counts
