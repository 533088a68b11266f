"""Runs a test function on several real ranks: a new process each, one gloo group, nothing left behind.

The processes are forked from a server that has imported torch and its compilers, which takes three seconds, and has compiled one
model and forgotten it (`warm`), which saves each rank a third of a second: a rank finds no thread, no process group and no
compiled graph.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

mp.get_context("forkserver").set_forkserver_preload([
    __name__, "torch._inductor.compile_fx", "torch.testing", "pytest", "tests.distributed.warm"])


def on_ranks(*world_sizes: int, **options: Any) -> Callable[[Callable[[int, int], None]], Callable[[int], None]]:
    """Make `case(rank, world_size)` a test that runs it on every rank, once for each of `world_sizes`; options of `run_ranks`."""

    def decorate(case: Callable[[int, int], None]) -> Callable[[int], None]:
        def test(world_size: int) -> None:
            run_ranks(test, world_size, **options)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(case, name))
        test.case = case  # a rank finds the test by its name, and in it the case
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240.0, lost: Collection[int] = (),
              method: str = "forkserver") -> None:
    """Call `fn(rank, world_size, *args)` in `world_size` processes that share a gloo process group.

    Args:
        fn: importable by name (it is pickled).
        timeout: seconds for all ranks together.
        lost: ranks that are to be killed or stopped: neither waited for nor judged, and killed in the end.
        method: "spawn" starts every rank from nothing, each with another hash seed, as torchrun does.

    Raises:
        AssertionError: a rank failed (with its traceback) or did not end in time; the others are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context(method)
        ranks = [context.Process(target=_rank, args=(fn, rank, world_size, folder, args), daemon=True)
                 for rank in range(world_size)]
        for process in ranks:
            process.start()
        try:
            kept = {rank: process for rank, process in enumerate(ranks) if rank not in lost}
            _await(kept, folder, time.monotonic() + timeout, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _await(ranks: dict[int, Any], folder: str, deadline: float, timeout: float) -> None:
    while late := [rank for rank, process in ranks.items() if process.is_alive()]:
        if any(process.exitcode not in (None, 0) for process in ranks.values()):
            break
        if time.monotonic() > deadline:
            raise AssertionError(f"ranks {late} did not end within {timeout} s{_failures(folder)}")
        ranks[late[0]].join(0.05)
    failed = [rank for rank, process in ranks.items() if process.exitcode not in (None, 0)]
    if failed:
        for rank in late:  # which lost its connection, and may be about to say why
            ranks[rank].join(0.2)
        raise AssertionError(f"ranks {failed} failed{_failures(folder)}")


def _failures(folder: str) -> str:
    texts = [path.read_text() for path in sorted(Path(folder).glob("*.traceback"))]
    return "".join(f"\n{text}" for text in texts)


def _rank(fn: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        store = dist.FileStore(str(Path(folder, "store")), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        getattr(fn, "case", fn)(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
    except SystemExit:
        raise  # a case that looks at the end of the interpreter
    except BaseException:
        text = f"--- rank {rank} of {world_size} ---\n{traceback.format_exc()}"
        Path(folder, f"{rank}.traceback").write_text(text)
        os._exit(1)
    os._exit(0)  # no interpreter shutdown: a compile worker or a gloo thread could hang it
