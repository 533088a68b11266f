"""Rows that are written as they are measured, by a process that may die or be killed, and gone on with by the next one."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import harness
import torch

Row = dict[str, Any]
MOST_TRIES = 2


class KeptRows:
    """The rows of a JSON file, one for each (model, variant); the file is written whole whenever one has changed.

    Attributes:
        rows: all.
        begun: how often a part was begun that has not come to its end: its process died, or was killed.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path, self._device = path, device
        earlier = json.loads(path.read_text()) if path.exists() else {}
        self.rows: list[Row] = earlier.get("rows", [])
        self.begun: dict[str, int] = earlier.get("begun", {})

    def row(self, model: str, variant: str) -> Row:
        """Return a row, a new one where there is none."""
        for row in self.rows:
            if (row["model"], row["variant"]) == (model, variant):
                return row
        self.rows.append({"model": model, "variant": variant})
        return self.rows[-1]

    def attempt(self, part: str, rows: list[Row], measure: Callable[[], None]) -> None:
        """Have `measure` fill in its rows, and write them; an error is written into them, too, and goes no further.

        Raises:
            SystemExit: CUDA is of no use to this process any more.
        """
        if self.begun.get(part, 0) == MOST_TRIES:  # it hangs, or kills its process
            return self._fail(rows, f"{part}: was begun {MOST_TRIES} times, and its process died or was killed")
        self.begun[part] = self.begun.get(part, 0) + 1
        self.write()
        try:
            measure()
            if self._device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            traceback.print_exc()
            self._fail(rows, f"{part}: {type(error).__name__}: {error}"[:2000])
        del self.begun[part]
        self.write()
        if self._device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                sys.exit(f"{part} has left CUDA in an error, which only the next process is free of")

    def write(self) -> None:
        gpu = torch.cuda.get_device_name() if self._device == "cuda" else None
        harness.write_record(self._path, device=self._device, gpu=gpu, begun=self.begun, rows=self.rows)

    def _fail(self, rows: list[Row], error: str) -> None:
        for row in rows:
            row.setdefault("error", error)
        self.write()


def in_processes(path: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function`, which goes on with the rows at `path`, in one new process after another until one comes to its end.

    Raises:
        SystemExit: a process died that had begun nothing.
    """
    while True:
        before = path.read_text() if path.exists() else ""
        process = get_context("spawn").Process(target=function, args=arguments)
        process.start()
        process.join()
        if process.exitcode == 0:
            return
        if (path.read_text() if path.exists() else "") == before:
            sys.exit(f"the process that measures ended with status {process.exitcode}, and had begun nothing")


def summary(rows: list[Row]) -> str:
    """Return a line about what failed, "" where nothing has."""
    return "; ".join(row["error"].splitlines()[0][:200] for row in rows if "error" in row)
