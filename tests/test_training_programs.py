"""Training programs at the edges of a model: a step, whole and in pieces, transform() and the backend train as eager torch.

What is compared after every update: loss, parameters, `.grad` (None included) of every leaf, buffers, averages kept beside,
and at the end the state of the optimizers. Over ranks the reference is the mean of the ranks' own gradients.

By hand: `python -m tests.test_training_programs SEED [EXECUTOR [LEVEL [INNER [RANKS]]]]`, or FIRST-LAST for the cases of these
seeds, up to the first that fails.
"""

from __future__ import annotations

import copy
import faulthandler
import itertools
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

import apexfx
from tests.distributed.launch import run_ranks
from tests.training_programs import Parts, Program, make

UPDATES = 3
PATIENCE_S = 30
EQUAL, ERROR, FAILED = "equal", "clear error", "failed"
LEVELS = ("O0", "O2")


@dataclass(frozen=True)
class Case:
    seed: int
    executor: str
    level: str
    inner: str = "eager"
    ranks: int = 1


# ---- executors: yield what there is to be seen after every update ------------------------------------------------------------


def in_a_loop(case: Case, program: Program, parts: Parts, rank: int, wrap: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Train by backward() and step(); `wrap` makes what is called in place of the model."""
    model = wrap(case, parts.model)
    own_average = getattr(model, "no_sync", None) is not None and case.ranks > 1
    averages, calls = _averages(parts), itertools.count()
    for update in range(UPDATES):
        parts.optimizer.zero_grad()
        losses, inputs = [], []
        for micro in range(program.accumulate):
            batch = program.batch(rank, next(calls))
            last = micro == program.accumulate - 1
            if own_average and not last:
                with model.no_sync():
                    losses.append(_backward(program, parts, model, batch))
            else:
                losses.append(_backward(program, parts, model, batch))
            inputs.append(batch[0].grad)
        _average_over_ranks(case, parts, [] if wrap is itself else list(parts.model.parameters()))
        if program.max_grad_norm is not None:
            params = [p for group in parts.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(params, program.max_grad_norm)
        parts.optimizer.step()
        yield _seen(program, parts, averages, losses, inputs, update)


def _backward(program: Program, parts: Parts, model: Any, batch: Sequence[Any]) -> Tensor:
    result = parts.objective(model, *batch)
    loss = result[0] if isinstance(result, tuple) else result
    (loss / program.accumulate).backward()
    return loss.detach()


def itself(case: Case, model: Any) -> Any:
    return model


def transformed(case: Case, model: Any) -> Any:
    return apexfx.transform(model, opt_level=case.level, inner=case.inner, ddp=_data_parallel(case))


def by_backend(case: Case, model: Any) -> Any:
    options = {"opt_level": case.level, "inner": case.inner, "ddp": _data_parallel(case)}
    return torch.compile(model, backend="apex", options=options)


def by_step(case: Case, program: Program, parts: Parts, rank: int, *, pieces: bool = False) -> Iterator[dict[str, Any]]:
    """Train by a step, which keeps its gradients with every other seed."""
    loss_fn, objective = getattr(parts.objective, "loss_fn", None), parts.objective
    if pieces:
        inner_fn, inner_objective = loss_fn, objective
        loss_fn = loss_fn and (lambda *args: inner_fn(_broken(args[0]), *args[1:]))
        objective = lambda model, *batch: inner_objective(model, _broken(batch[0]), *batch[1:])  # noqa: E731
    what = {"loss_fn": loss_fn} if loss_fn is not None else {"objective": objective}
    modules = [parts.loss] if isinstance(parts.loss, torch.nn.Module) and list(parts.loss.parameters()) else []
    keeps = bool(case.seed % 2)
    step = apexfx.train_step(parts.model, optimizer=parts.optimizer, opt_level=case.level, inner=case.inner,
                             ddp=_data_parallel(case), accumulate=program.accumulate, max_grad_norm=program.max_grad_norm,
                             loss_scale=program.loss_scale, keep_grads=keeps, modules=modules,
                             fallback="transform" if pieces else None, **what)
    averages, calls = _averages(parts), itertools.count()
    mine = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
    for update in range(UPDATES):
        losses = []
        for _ in range(program.accumulate):
            batch = program.batch(rank, next(calls))
            result = step(*batch)
            losses.append(result[0] if isinstance(result, tuple) else result)
        if not keeps:
            left = [name for name, p in parts.leaves.items() if id(p) in mine and p.grad is not None]
            assert not left, f"keep_grads=False left gradients in {left}"
        yield _seen(program, parts, averages, losses, [], update, without=() if keeps else mine)


def _broken(x: Any) -> Any:
    torch._dynamo.graph_break()
    return x


def _data_parallel(case: Case) -> Any:
    return apexfx.BucketConfig(timeout_s=PATIENCE_S) if case.ranks > 1 else False


def _averages(parts: Parts) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parts.leaves.items()}


def _average_over_ranks(case: Case, parts: Parts, done: Sequence[Tensor]) -> None:
    """Average what nothing else does: a leaf that any rank has a gradient for gets one on all."""
    if case.ranks == 1:
        return
    todo = {name: p for name, p in parts.leaves.items() if not any(p is q for q in done)}
    every = _gathered({name: p.grad for name, p in todo.items()})
    for name, p in todo.items():
        grads = [grads[name] for grads in every if grads[name] is not None]
        p.grad = sum(grads) / len(every) if grads else None


def _seen(program: Program, parts: Parts, averages: dict[str, Tensor], losses: list[Tensor], inputs: list[Tensor | None],
          update: int, without: Iterable[int] = ()) -> dict[str, Any]:
    """Return a copy of what there is to be seen, then let the second optimizer and the averages follow.

    Args:
        without: ids of the leaves whose gradient is nobody's to see.
    """
    without = set(without)
    seen = {"grad": {name: p.grad for name, p in parts.leaves.items() if id(p) not in without},
            "input grad": dict(enumerate(inputs)), "loss": dict(enumerate(losses)),
            "value": {name: p.detach() for name, p in parts.leaves.items()}, "buffer": parts.buffers}
    seen = copy.deepcopy(seen)
    if parts.second is not None and (update + 1) % program.every == 0:
        parts.second.step()
        parts.second.zero_grad()
    if program.averages:
        with torch.no_grad():
            for name, average in averages.items():
                average.lerp_(parts.leaves[name].detach(), 0.1)
        seen["average"] = copy.deepcopy(averages)
    if update == UPDATES - 1:
        for kind, optimizer in (("state", parts.optimizer), ("second state", parts.second)):
            if optimizer is not None:
                seen[kind] = {f"{name}.{key}": copy.deepcopy(value) for name, p in parts.leaves.items()
                              for key, value in optimizer.state.get(p, {}).items()}
    return seen


EXECUTORS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "step": by_step,
    "pieces": lambda *args: by_step(*args, pieces=True),
    "transform": lambda *args: in_a_loop(*args, transformed),
    "backend": lambda *args: in_a_loop(*args, by_backend),
}


# ---- one case, on every rank -------------------------------------------------------------------------------------------------


def one_case(case: Case, rank: int) -> tuple[str, str]:
    """Return the outcome of a case and what is to be said of it, the same on every rank."""
    program = make(case.seed, take_turns=case.executor != "step")  # which is one graph, the same on all ranks
    theirs, parts = program.build(), program.build()
    if case.executor in ("step", "pieces"):  # which train all that requires a gradient
        for each in (theirs, parts):
            _freeze_others(each)
    reference = list(in_a_loop(case, program, theirs, rank, itself))
    if rank and case.executor != "backend":  # which broadcasts what its graphs read alone
        with torch.no_grad():
            inside = parts.model.parameters() if case.executor == "transform" else \
                [p for group in parts.optimizer.param_groups for p in group["params"]]
            for p in inside:
                p.mul_(1.5)  # rank 0's values are what counts
    found: list[str] = []
    error, clear, updates = "", True, 0
    try:
        for update, (seen, expected) in enumerate(zip(EXECUTORS[case.executor](case, program, parts, rank), reference)):
            updates += 1
            found += [f"update {update}: {text}" for text in _differences(seen, expected, case.level)]
    except AssertionError as failure:
        found.append(str(failure))
    except Exception as failure:
        inner = getattr(failure, "inner_exception", failure)  # what torch.compile wraps
        error = f"{type(inner).__name__}: {inner}"
        clear = type(inner).__module__.startswith("apexfx") or str(inner).startswith("apexfx: ")
    if not found and not error and updates != UPDATES:
        found.append(f"{updates} updates ran")
    every = _gathered((found, error, clear)) if case.ranks > 1 else [(found, error, clear)]
    if words := [text for texts, _, _ in every for text in texts]:
        return FAILED, f"silently wrong: {'; '.join(list(dict.fromkeys(words))[:5])}" + (f"; and {error}" if error else "")
    if not any(said for _, said, _ in every):
        return EQUAL, ""
    if all(said and clear for _, said, clear in every):
        return ERROR, every[0][1]
    return FAILED, "\n".join(f"rank {rank}: {said or 'went on'}" for rank, (_, said, _) in enumerate(every))


def _freeze_others(parts: Parts) -> None:
    mine = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
    for p in parts.leaves.values():
        p.requires_grad_(id(p) in mine)


def _differences(seen: dict[str, Any], expected: dict[str, Any], level: str) -> list[str]:
    found = []
    for kind, rows in seen.items():
        wanted = expected[kind]
        if kind in ("grad", "input grad"):
            wanted = {name: wanted[name] for name in rows}
        if "state" in kind:  # a step makes it before the first update: zeros, which is what no state means
            rows, wanted = ({**{name: 0 * value for name, value in other.items()}, **row}
                            for row, other in ((rows, wanted), (wanted, rows)))
        if rows.keys() != wanted.keys():
            found.append(f"{kind} of {sorted(rows.keys() ^ wanted.keys())} on one side only")
        for name in rows.keys() & wanted.keys():
            a, e = rows[name], wanted[name]
            if (a is None) != (e is None):
                found.append(f"{kind} of {name} is {'None' if a is None else 'there'}, expected otherwise")
            elif isinstance(e, Tensor) and not _near(a, e, level):
                found.append(f"{kind} of {name} differs by {float((a.double() - e.double()).abs().max()):.2e} of "
                             f"{float(e.double().abs().max()):.2e}")
    return found


def _near(a: Tensor, e: Tensor, level: str) -> bool:
    a, e = a.double(), e.double()
    if a.shape != e.shape:
        return False
    if level == "O0":
        return torch.allclose(a, e, rtol=2e-4, atol=2e-5)  # some hundred roundings, and three updates
    return bool((a - e).norm() <= 0.2 * e.norm() + 0.03 * max(e.numel(), 1) ** 0.5)  # bfloat16 in a few layers of eight


def _gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


# ---- a campaign --------------------------------------------------------------------------------------------------------------


def run_cases(rank: int, world_size: int, cases: Sequence[Case], journal: str) -> None:
    """Run the cases one after the other; rank 0 notes in `journal` each one that begins and what came of it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with open(journal, "a") as file:
        def note(row: dict[str, Any]) -> None:
            if rank == 0:
                file.write(json.dumps(row) + "\n")
                file.flush()

        for case in cases:
            note({"begins": asdict(case)})
            faulthandler.dump_traceback_later(120, exit=True)
            torch.compiler.reset()
            outcome, words = one_case(case, rank)
            note({"outcome": outcome, "words": words})
        faulthandler.cancel_dump_traceback_later()
    logging.disable(logging.NOTSET)


def outcomes(cases: Iterable[Case], journal: Path) -> dict[Case, tuple[str, str]]:
    """Return the outcome of every case; a process that died is followed by a new one."""
    done: dict[Case, tuple[str, str]] = {}
    todo = list(cases)
    while todo:
        ranks, died = todo[0].ranks, ""
        part = [case for case in todo if case.ranks == ranks]
        known = len(_rows(journal))
        try:
            run_ranks(run_cases, ranks, part, str(journal), timeout=120.0 * len(part))
        except AssertionError as error:
            died = str(error)
        rows = _rows(journal)[known:]
        if died and not rows:
            raise AssertionError(died)
        for row in rows:
            if "begins" in row:
                case = Case(**row["begins"])
                done[case] = FAILED, f"hung, or killed the process: {died}"
            else:
                done[case] = row["outcome"], row["words"]
        todo = [case for case in todo if case not in done]
    return done


def _rows(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def described(case: Case, words: str) -> str:
    return f"{case}\n  {make(case.seed).description}\n  {words}"


def check(done: dict[Case, tuple[str, str]], *, errors_at_most: float) -> None:
    """Assert that no case failed, and that few raised where eager trains."""
    failed = [described(case, words) for case, (outcome, words) in done.items() if outcome == FAILED]
    assert not failed, f"{len(failed)} of {len(done)} cases failed\n" + "\n".join(failed)
    raised = [described(case, words) for case, (outcome, words) in done.items() if outcome == ERROR]
    assert len(raised) <= errors_at_most * len(done), f"{len(raised)} of {len(done)} raised\n" + "\n".join(raised)


def table(done: dict[Case, tuple[str, str]]) -> str:
    """Return how the cases ended, by executor, level, inner compiler and ranks, and by what the programs hold."""
    counts: dict[str, Counter[str]] = {}
    for case, (outcome, _) in done.items():
        where = f"{case.executor}, {case.level}, {case.inner}, {case.ranks} ranks"
        for key in (where, *(f"  {trait}" for trait in make(case.seed).traits)):
            counts.setdefault(key, Counter())[outcome] += 1
    keys = sorted(counts, key=lambda key: (key.startswith("  "), key))
    columns = EQUAL, ERROR, FAILED
    return tabulate([[key, *(counts[key][column] for column in columns)] for key in keys], ["", *columns])


def campaign(seeds: Sequence[int]) -> list[Case]:
    """Return for each seed one case on one rank and one on two, executors and levels in turn; a tenth under Inductor."""
    kinds = list(itertools.product(EXECUTORS, LEVELS, (1, 2)))
    cases = []
    for place, seed in enumerate(seeds):
        for executor, level, ranks in (kinds[place % len(kinds)], kinds[(7 * place + 5) % len(kinds)]):
            case = Case(seed, executor, level, "inductor" if place % 10 == 9 else "eager", ranks)
            if case not in cases:
                cases.append(case)
    return cases


def test_training_programs(tmp_path):
    cases = campaign(range(2))
    check(outcomes(cases, tmp_path / "journal"), errors_at_most=0.05)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1400, 40))
def test_many_training_programs(first, tmp_path):
    done = outcomes(campaign(range(first, first + 40)), tmp_path / "journal")
    print(f"\n{table(done)}", flush=True)
    check(done, errors_at_most=0.1)  # of a part; of all a twentieth


def main(seed: str, executor: str = "step", level: str = "O0", inner: str = "eager", ranks: str = "1") -> bool:
    """Run one case, or those of FIRST-LAST without Inductor; return whether none failed."""
    first, _, last = seed.partition("-")
    cases = [Case(int(seed), executor, level, inner, int(ranks))] if not last else \
        [case for case in campaign(range(int(first), int(last))) if case.inner == "eager"]
    for start in range(0, len(cases), 8):
        with tempfile.TemporaryDirectory() as folder:
            done = outcomes(cases[start:start + 8], Path(folder, "journal"))
        print("\n".join(f"{end} {described(case, words)}" for case, (end, words) in done.items()), flush=True)
        if any(end == FAILED for end, _ in done.values()):
            return False
    return True


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
