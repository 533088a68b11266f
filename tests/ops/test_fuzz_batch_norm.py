"""Thousands of calls of the batch norm ops with one or two wrong arguments: a result, or an exception that names op and argument.

The calls run in a child process, as those of the list ops. A kernel may refuse nothing that the reference takes, and
must refuse all that the reference refuses; results agree.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from apexfx.ops import batch_norm_stages, local_batch_norm, sync_batch_norm
from tests import fresh_process
from tests.ops.test_fuzz_list_ops import NAMED, random_value

REFERENCES: dict[str, Callable[..., object]] = {
    "bn_local_stats": batch_norm_stages.bn_local_stats.reference,
    "bn_global_stats": batch_norm_stages.bn_global_stats.reference,
    "bn_running_stats": batch_norm_stages.bn_running_stats.reference,
    "bn_normalize": batch_norm_stages.bn_normalize.reference,
    "bn_backward_reduce": batch_norm_stages.bn_backward_reduce.reference,
    "bn_backward_elementwise": batch_norm_stages.bn_backward_elementwise.reference,
    "bn_relu_backward": batch_norm_stages.bn_relu_backward.reference,
    "bn_forward": local_batch_norm.bn_forward.reference,
    "bn_backward": local_batch_norm.bn_backward.reference,
    "sync_batch_norm": sync_batch_norm._sync_batch_norm,
}
CHANNELS = 3
FLOATING = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)


def fitting(rng: random.Random) -> dict[str, object]:
    """Return a value for every argument any of the ops has, all of which go together."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shape = rng.choice([(4, CHANNELS), (2, CHANNELS, 5), (2, CHANNELS, 2, 3), (0, CHANNELS, 2), (1, CHANNELS, 1, 2, 3)])
    dtype = rng.choice(FLOATING)

    def draw(*size: int, dtype: torch.dtype) -> Tensor:
        return (torch.rand(*size, generator=generator, dtype=torch.float64) + 0.5).to(dtype)

    def activation() -> Tensor:
        t = draw(*shape, dtype=dtype)
        return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 and rng.random() < 0.5 else t

    def vector(dtype: torch.dtype | None = None) -> Tensor:
        return draw(CHANNELS, dtype=dtype or rng.choice(FLOATING))

    count, total = torch.full((1,), 8.0, dtype=torch.float64), 8 * vector(torch.float64)
    return {
        "x": activation(), "residual": rng.choice([None, activation()]), "grad_output": activation(), "output": activation(),
        "mean": vector(torch.float64), "invstd": vector(torch.float64), "weight": rng.choice([None, vector()]),
        "bias": rng.choice([None, vector()]), "relu": rng.random() < 0.5, "eps": 1e-5, "momentum": rng.choice([None, 0.1]),
        "running_mean": vector(), "running_var": vector(), "num_batches_tracked": torch.tensor(rng.randrange(1, 9)),
        "stats": torch.cat([count, total, total * 2]), "sums": draw(2 * CHANNELS, dtype=torch.float64), "count": count,
        "group_name": "", "needs_x": rng.random() < 0.5,
    }  # fmt: skip


def wrong(kind: str, value: object, rng: random.Random) -> object:
    """Return something else in the place of an argument that fits."""
    if isinstance(value, Tensor) and rng.random() < 0.7:
        return rng.choice([
            value.double(), value.half(), value.int(), value[..., None], value.reshape(-1)[:-1], value.to("meta"),
            value.to_sparse(), value.new_empty(0), value.reshape(-1), value.new_full((), 2),
            torch.stack([value, value], -1)[..., 0],
        ])  # fmt: skip
    if kind == "str":
        return rng.choice(["no such group", None, 3])
    return random_value(kind.replace("Optional[float]", "float").replace("Optional[Tensor]", "Tensor"), rng, None)


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except NAMED as error:
        return error


def copies(arguments: list[object]) -> list[object]:
    """Return the arguments with tensors of their own where an op writes into them; strides stay."""
    return [torch.empty_like(a).copy_(a) if isinstance(a, Tensor) and a.layout == torch.strided and a.device.type == "cpu" else a
            for a in arguments]  # fmt: skip


def campaign(seed: int, calls: int) -> dict[str, int]:
    """Make the calls; return how many gave a result and how many raised. Prints the seed of each before it is made."""
    counts = {"result": 0, "raised": 0}
    names = list(REFERENCES)
    for i in range(calls):
        rng = random.Random(f"{seed}/{i}")
        name = names[i % len(names)]
        op = getattr(torch.ops.apexfx, name).default
        values, schema = fitting(rng), op._schema.arguments
        changed = rng.sample(schema, rng.choice([0, 1, 1, 1, 2])) if len(schema) > 1 else rng.sample(schema, rng.randrange(2))
        for argument in changed:
            values[argument.name] = wrong(str(argument.type), values[argument.name], rng)
        arguments = [values[argument.name] for argument in schema]
        print(f"{name} {seed}/{i}", file=sys.stderr)
        actual = outcome(lambda: op(*copies(arguments)))
        if isinstance(actual, Exception):
            text = str(actual)
            assert f"apexfx::{name}" in text, (arguments, text)
            assert any(argument.name in text for argument in schema), (arguments, text)
            by_schema = "Expected a value of type" in text
            assert by_schema or isinstance(outcome(lambda: REFERENCES[name](*copies(arguments))), Exception), (arguments, text)
        elif name == "sync_batch_norm":  # it has no other implementation
            assert actual.shape == arguments[0].shape
        else:
            expected = outcome(lambda: REFERENCES[name](*copies(arguments)))
            assert not isinstance(expected, Exception), (arguments, expected)
            for value, want in zip(*(r if isinstance(r, tuple) else (r,) for r in (actual, expected))):
                assert value.shape == want.shape and value.dtype == want.dtype and value.stride() == want.stride()
                if value.device.type == "cpu":
                    assert torch.allclose(value, want, rtol=2e-2, atol=2e-2, equal_nan=True), arguments
        counts["raised" if isinstance(actual, Exception) else "result"] += 1
    return counts


@pytest.mark.long
@pytest.mark.parametrize("seed, calls", [(0, 200), pytest.param(1, 30_000, marks=pytest.mark.long)])
def test_calls_give_what_the_reference_gives(seed, calls):
    counts = fresh_process.call(campaign, seed, calls)
    assert counts["result"] > 0.2 * calls and counts["raised"] > 0.2 * calls, counts
