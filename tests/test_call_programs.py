"""Random programs that write into their arguments and return what shares memory, under every executor, against eager torch."""

from __future__ import annotations

import collections
import logging
import sys

import pytest
import torch

import apexfx
from apexfx import amp
from tests.call_programs import HALF, differences, outcome, program

TRANSFORM = [("transform", level) for level in ("O0", "O1", "O2", "O3")]
BACKEND = [("backend", level) for level in ("O0", "O1", "O2", "O3")]
AMP = [("amp", level) for level in ("O1", "O2", "O3")]
EXECUTORS = TRANSFORM + BACKEND + AMP


def compare(seed, executor, level, inner="eager"):
    """Return what differs from eager, an error as "error: ..."; None where the program is refused, or its buffers are cast."""
    made = program(seed)
    if executor == "amp" and level != "O1" and "buffer" in made.traits:
        return None
    sizes = (4, 6) if seed % 3 == 0 else (4, 4)
    dynamic = True if seed % 3 == 0 else None
    source = made.model()
    casts = executor == "amp" or executor == "transform" and (
        level == "O3" or any("half" in trait for trait in made.traits))
    sizes = sizes[:1] if casts else sizes  # a second call goes on with arguments that results hold no longer
    try:
        eager = outcome(made, source, dict(source.named_parameters()), source, sizes, not casts)
    except Exception:
        return None
    model = made.model()
    options = {"opt_level": level, "inner": inner}  # bfloat16, on a CPU
    if executor == "transform":
        run = apexfx.transform(model, dynamic=dynamic, **options)
    elif executor == "backend":
        run = torch.compile(model, backend="apex", dynamic=dynamic, options=options)
    elif executor == "torch":  # to tell what torch.compile does by itself
        run = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    else:
        run = model = amp.initialize(model, opt_level=level, dtype=HALF, verbosity=0)
    try:
        other = outcome(made, model, dict(model.named_parameters()), run, sizes, not casts)
    except Exception as error:
        if casts and "the forward writes into" in str(error) and "given a copy" in str(error):
            return None
        return [f"error: {type(error).__name__}: {str(error).splitlines()[0]}"]
    halved = level == "O3" and executor == "transform" or executor == "amp"
    return differences(eager, other, halves=halved, casts=casts,
                       tolerance=0.1 if level != "O0" or "half" in made.description else 1e-5)


def judged(seed, executor, level):
    """Return a word for how the program ran, and what differs."""
    texts = compare(seed, executor, level)
    torch.compiler.reset()
    if not texts:
        return "equal" if texts == [] else "refused", []
    if executor in ("transform", "backend") and compare(seed, "torch", level):
        return "torch.compile differs itself", []
    return "error" if texts[0].startswith("error") else "differs", texts


def check(executor, level, numbers, max_errors=0):
    """Run programs under one executor: none differs without a word, and at most `max_errors` are refused; None: only show."""
    counts, shown = collections.Counter(), []
    for number in numbers:
        seed = number * len(EXECUTORS) + EXECUTORS.index((executor, level))
        kind, texts = judged(seed, executor, level)
        counts[kind] += 1
        if texts:
            shown.append(f"seed {seed}, {executor} {level}: {program(seed).description}\n    " + "\n    ".join(texts[:4]))
    print(f"{executor} {level}: {dict(counts)}", *shown, sep="\n", flush=True)
    assert max_errors is None or not counts["differs"] and counts["error"] <= max_errors, "\n".join(shown)


@pytest.mark.parametrize("executor", EXECUTORS, ids="-".join)
def test_programs(executor):
    check(*executor, range(2))


@pytest.mark.long
@pytest.mark.parametrize("executor", EXECUTORS, ids="-".join)
def test_many_programs(executor):
    check(*executor, range(2, 32), max_errors=1)


if __name__ == "__main__":  # python tests/test_call_programs.py 0 30
    logging.disable(logging.WARNING)
    for executor in EXECUTORS:
        check(*executor, range(int(sys.argv[1]), int(sys.argv[2])), max_errors=None)
