"""Models in every style, data parallel in every way: gradients are the mean of the ranks' own, or all ranks say why not.

One seed by hand: `python -m tests.distributed.test_model_styles SEED [EXECUTOR [LEVEL]]`.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import logging
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

import apexfx
from apexfx import amp
from apexfx.parallel import DistributedDataParallel
from apexfx.testing import tolerance
from tests.distributed.launch import run_ranks
from tests.model_styles import BREAKS, Style, make

STEPS = 3
PATIENCE_S = 30  # of the package and its process groups; a case that takes longer than WATCHDOG_S has hung
WATCHDOG_S = 120
LEVELS = ("O0", "O2")
EQUAL, ERROR, FAILED = "equal", "clear error", "failed"
# What may leave a parameter to eager, where no graph averages it. An error about any other model refuses it without a reason.
LEFT_TO_EAGER = {*BREAKS, "batch norm without momentum", "l2 in the loss", "logits in the loss"}


@dataclass(frozen=True)
class Case:
    seed: int
    executor: str
    level: str


# ---- executors: a model, a level, and a group to average over or None for the same arithmetic on this process alone ---------


def transformed(inner: str) -> Callable[..., nn.Module]:
    def wrap(model: nn.Module, level: str, group: Any) -> nn.Module:
        return apexfx.transform(model, opt_level=level, inner=inner, **_data_parallel(group))

    return wrap


def backend(model: nn.Module, level: str, group: Any) -> nn.Module:
    return torch.compile(model, backend="apex", options={"opt_level": level, "inner": "eager", **_data_parallel(group)})


def parallel(model: nn.Module, level: str, group: Any) -> nn.Module:
    return _wrapped(apexfx.transform(model, opt_level=level, inner="eager"), group)


def eager(model: nn.Module, level: str, group: Any) -> nn.Module:
    return _wrapped(amp.initialize(model, opt_level=level, verbosity=0) if level != "O0" else model, group)


def _data_parallel(group: Any) -> dict[str, Any]:
    return {"ddp": apexfx.BucketConfig(timeout_s=PATIENCE_S), "process_group": group} if group is not None else {}


def _wrapped(model: nn.Module, group: Any) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, timeout_s=PATIENCE_S) if group is not None else model


EXECUTORS: dict[str, Callable[[nn.Module, str, Any], nn.Module]] = {
    "transform eager": transformed("eager"),
    "backend": backend,
    "eager ddp": eager,
    "parallel around transform": parallel,
    "transform inductor": transformed("inductor"),
}


# ---- one case, on every rank -----------------------------------------------------------------------------------------------


def one_case(case: Case, rank: int) -> tuple[str, str]:
    """Return the outcome of a case and what is to be said of it, the same on every rank."""
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))
    style = make(case.seed)
    source, twin = style.model(), style.model()
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(1 + rank)  # rank 0's values are what counts
    models: list[nn.Module] = []
    wrap = EXECUTORS[case.executor]
    reasons = LEFT_TO_EAGER & style.traits if wrap is not eager else ()

    def build() -> None:
        models.extend((wrap(source, case.level, group), wrap(twin, case.level, None) if case.level != "O0" else twin))

    outcome = _agreed(build, reasons)
    if outcome is None:
        optimizer = torch.optim.SGD(source.parameters(), lr=0.05)
        for step in range(STEPS):
            x = style.batch(rank, step)
            outcome = (_agreed(lambda: _backward(style, models[0], source, x), reasons)
                       or _agreed(lambda: _reference(style, models[1], twin, source, x), reasons, "alone, without ddp: ")
                       or _compared(source, twin, case.level))
            if outcome is not None:
                outcome = outcome[0], f"step {step}: {outcome[1]}"
                break
            optimizer.step()
    if outcome is None:
        dist.destroy_process_group(group)
    return outcome or (EQUAL, "")


def one_sync_bn(case: Case, rank: int) -> tuple[str, str]:
    """Compare the statistics that batch norms have taken from a batch: all ranks' are the same, or a note names the module."""
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE_S))
    style = make(case.seed)
    source = style.model()
    notes: list[str] = []

    def run() -> None:
        made = apexfx.transform(source, opt_level=case.level, inner="eager", sync_bn=True, process_group=group)
        made(style.batch(rank, 0)).sum().backward()
        notes.extend(made.report.notes)

    outcome = _agreed(run, LEFT_TO_EAGER & style.traits)
    if outcome is None:
        ran = {name: m for name, m in source.named_modules() if isinstance(m, nn.BatchNorm1d) and m.num_batches_tracked}
        words = {word for note in notes if "batch norm" in note for word in re.split("[ ,']+", note)}
        every = _gathered({name: (m.running_mean.tolist(), name in words) for name, m in ran.items()})
        local = [name for name in ran if any(means[name][0] != every[0][name][0] for means in every)]
        unsaid = [name for name in local if not all(means[name][1] for means in every)]
        dist.destroy_process_group(group)
        if unsaid:
            outcome = FAILED, f"not synchronized, and no note says so: {', '.join(unsaid)}; notes: {notes}"
        elif local:
            outcome = ERROR, f"a note names {', '.join(local)}"
    return outcome or (EQUAL, "")


def _backward(style: Style, model: nn.Module, source: nn.Module, x: Tensor) -> None:
    source.zero_grad()
    style.loss(source, model(x)).backward()


def _reference(style: Style, model: nn.Module, twin: nn.Module, source: nn.Module, x: Tensor) -> None:
    """Compute this rank's own gradients, at the values that the step under test has used."""
    with torch.no_grad():
        for p, q in zip(source.parameters(), twin.parameters(), strict=True):
            q.copy_(p)
    _backward(style, model, twin, x)


def _agreed(action: Callable[[], None], reasons: Collection[str], words: str = "") -> tuple[str, str] | None:
    """Run `action`; return the outcome if a rank raised, which it may for `reasons`."""
    said, clear = "", True
    try:
        action()
    except Exception as error:
        inner = getattr(error, "inner_exception", error)  # what torch.compile wraps
        said = f"{words}{type(inner).__name__}: {inner}"
        clear = type(inner).__module__.startswith("apexfx") or str(inner).startswith("apexfx: ")
    every = _gathered((said, clear))
    if not any(text for text, _ in every):
        return None
    if all(text and clear for text, clear in every):
        return ERROR if reasons else FAILED, every[0][0]
    return FAILED, "\n".join(f"rank {rank}: {text or 'went on'}" for rank, (text, _) in enumerate(every))


def _compared(source: nn.Module, twin: nn.Module, level: str) -> tuple[str, str] | None:
    """Compare every gradient with the mean of the ranks' own, and the parameters that have one among ranks."""
    every = _gathered([p.grad for p in twin.parameters()])
    found = []
    expected = [_mean(grads) for grads in zip(*every)]
    # The level decides about the roundings, which are of the size of the gradients that flow through the model; a sum of
    # a few terms, each rounded, is in another order than in the reference.
    largest = max([float(e.abs().max()) for e in expected if e is not None] or [0.0])
    limits = tolerance(torch.float32 if level == "O0" else torch.bfloat16, scale=8 if level == "O0" else 1)
    limits["atol"] *= largest
    for (name, p), e in zip(source.named_parameters(), expected, strict=True):
        if (p.grad is None) != (e is None):
            found.append(f"{name} has {'no' if p.grad is None else 'a'} gradient, expected {'none' if e is None else 'one'}")
        elif e is not None and not torch.allclose(p.grad.double(), e, **limits):
            found.append(f"{name} differs by {float((p.grad.double() - e).abs().max()):.2e} of {float(e.abs().max()):.2e}")
    values = _gathered([p.detach() if p.grad is not None else None for p in source.parameters()])
    for (name, _), first, *others in zip(source.named_parameters(), *values):
        if first is not None and not all(torch.equal(first, other) for other in others):
            found.append(f"{name} has other values on other ranks")
    every_finding = list(dict.fromkeys(text for texts in _gathered(found) for text in texts))
    words = "; ".join(every_finding[:4]) + ("; ..." if len(every_finding) > 4 else "")
    return (FAILED, f"silently wrong: {words}") if every_finding else None


def _mean(grads: Sequence[Tensor | None]) -> Tensor | None:
    present = [g.double() for g in grads if g is not None]
    return sum(present) / len(grads) if present else None


def _gathered(given: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, given)
    return every


# ---- a campaign ------------------------------------------------------------------------------------------------------------


def run_cases(rank: int, world_size: int, cases: Sequence[Case], journal: str) -> None:
    """Run the cases one after the other; rank 0 notes in `journal` each one that begins and what came of it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dynamo_config.recompile_limit = 64  # counted per code object: the modules of both models share their forward's
    with open(journal, "a") as file:
        def note(row: dict[str, Any]) -> None:
            if rank == 0:
                file.write(json.dumps(row) + "\n")
                file.flush()

        for case in cases:
            note({"begins": asdict(case)})
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            torch.compiler.reset()
            gc.collect()  # models, and the threads of the groups that they communicated over
            outcome, words = (one_sync_bn if case.executor == "sync_bn" else one_case)(case, rank)
            note({"outcome": outcome, "words": words})
            if rank == 0 and outcome == FAILED:
                print(described(case, words), flush=True)
        faulthandler.cancel_dump_traceback_later()


def outcomes(cases: Iterable[Case], journal: Path, method: str = "forkserver") -> dict[Case, tuple[str, str]]:
    """Return the outcome of every case; after one that hangs or kills its processes, new ones go on."""
    found: dict[Case, tuple[str, str]] = {}
    todo = list(cases)
    while todo:
        died, known = "", len(_rows(journal))
        try:
            run_ranks(run_cases, 2, todo, str(journal), timeout=WATCHDOG_S * len(todo), method=method)
        except AssertionError as error:
            died = str(error)
        rows = _rows(journal)[known:]
        if died and not rows:
            raise AssertionError(died)
        for row in rows:
            if "begins" in row:
                case = Case(**row["begins"])
                found[case] = FAILED, f"hung, or killed the process: {died}"
            else:
                found[case] = row["outcome"], row["words"]
        todo = [case for case in todo if case not in found]
    return found


def _rows(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def described(case: Case, words: str) -> str:
    return f"{case}\n  {make(case.seed).description}\n  {words}"


def check(found: dict[Case, tuple[str, str]], *, equal_at_least: float = 0.85) -> None:
    """Assert that no case failed, and that errors are few: a package that refuses everything is never wrong."""
    failed = [described(case, words) for case, (outcome, words) in found.items() if outcome == FAILED]
    assert not failed, f"{len(failed)} of {len(found)} cases failed\n" + "\n".join(failed)
    share = sum(outcome == EQUAL for outcome, _ in found.values()) / len(found)
    assert share >= equal_at_least, f"{share:.0%} equal\n{table(found)}"


def table(found: dict[Case, tuple[str, str]]) -> str:
    """Return how the cases ended, by executor and level, and by what the models hold."""
    counts: dict[str, Counter[str]] = {}
    for case, (outcome, _) in found.items():
        for key in (f"{case.executor}, {case.level}", *(f"  {trait}" for trait in sorted(make(case.seed).traits))):
            counts.setdefault(key, Counter())[outcome] += 1
    columns = (EQUAL, ERROR, FAILED)
    keys = sorted(counts, key=lambda key: (key.startswith("  "), key))
    return tabulate([[key, *(counts[key][column] for column in columns)] for key in keys], ["", *columns])


def of_every_trait(seeds: Iterable[int]) -> list[int]:
    """Return those that hold a trait which no smaller model holds: small models compile sooner."""
    seen: set[str] = set()
    chosen = []
    for seed in sorted(seeds, key=lambda seed: len(make(seed).description)):
        if make(seed).traits - seen:
            chosen.append(seed)
            seen |= make(seed).traits
    return chosen


EVERY_DAY = [name for name in EXECUTORS if name != "transform inductor"]  # which compiles for seconds


@pytest.mark.parametrize("executor", [
    executor if executor in EVERY_DAY else pytest.param(executor, marks=pytest.mark.long) for executor in EXECUTORS])
def test_model_styles(executor, tmp_path):
    small = of_every_trait(range(100))
    seeds = small[EVERY_DAY.index(executor)::len(EVERY_DAY)] if executor in EVERY_DAY else small[:2]
    levels = itertools.repeat("O0")  # O2 compiles its reference too
    cases = [Case(seed, executor, level) for seed, level in zip(seeds, levels)]
    check(outcomes(cases, tmp_path / "journal"), equal_at_least=0.7)


@pytest.mark.long
def test_many_model_styles(tmp_path):
    found: dict[Case, tuple[str, str]] = {}
    for first in range(1000, 1140, 10):  # each with processes of its own: groups that have failed keep their threads
        seeds = range(first, first + 10)
        cases = [Case(*row) for row in itertools.product(seeds, EVERY_DAY, LEVELS)]
        cases += [Case(seed, "transform inductor", level) for seed, level in zip(seeds, itertools.cycle(("O0", "O0", "O2")))]
        found |= outcomes(cases, tmp_path / "journal", "spawn")
        print(f"\nafter seed {seeds[-1]}\n{table(found)}", flush=True)
    check(found)


def with_batch_norm(seeds: Iterable[int]) -> list[Case]:
    chosen = [seed for seed in seeds if {"batch norm", "batch norm without momentum"} & make(seed).traits]
    return [Case(seed, "sync_bn", level) for seed, level in zip(chosen, itertools.cycle(LEVELS))]


def test_batch_norms_are_synchronized(tmp_path):
    found = outcomes(with_batch_norm(range(40)), tmp_path / "journal")
    check(found, equal_at_least=0.4)  # momentum=None leaves what no attribute holds to eager


@pytest.mark.long
def test_many_batch_norms_are_synchronized(tmp_path):
    found = outcomes(with_batch_norm(range(1000, 1500)), tmp_path / "journal")
    print(f"\n{table(found)}")
    check(found, equal_at_least=0.4)


if __name__ == "__main__":
    chosen = sys.argv[2:]
    all_cases = [Case(int(sys.argv[1]), executor, level) for executor in (chosen[:1] or EXECUTORS)
                 for level in (chosen[1:] or LEVELS)]
    with tempfile.TemporaryDirectory() as folder:
        for case, (outcome, words) in outcomes(all_cases, Path(folder, "journal")).items():
            print(described(case, f"{outcome} {words}"))
