"""Calls a function in a process of its own: no test has been there before, and a crash ends it and not the tests.

It is forked from the server of `tests.distributed.launch`, which has imported torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

import tests.distributed.launch  # noqa: F401  # which says what the server imports


def call(function: Callable[..., Any], *args: Any, timeout: float = 500.0) -> Any:
    """Return `function(*args)` of another process; the function is importable by name, what it returns can be pickled.

    Raises:
        AssertionError: it raised, crashed or took longer than `timeout` seconds; with the last lines of its stderr.
    """
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        stderr = Path(folder, "stderr")
        stderr.touch()
        process = context.Process(target=_call, args=(theirs, str(stderr), function, args), daemon=True)
        process.start()
        theirs.close()
        try:
            if ours.poll(timeout):
                return ours.recv()
            failure = f"it took more than {timeout} s"
        except EOFError:
            process.join()
            failure = f"status {process.exitcode}"
        finally:
            process.kill()
            process.join()
        raise AssertionError(f"{failure}; the last lines: {stderr.read_text().splitlines()[-12:]}")


def _call(pipe: Connection, stderr: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    pipe.send(function(*args))
