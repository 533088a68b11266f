"""What a first call is doing, on stderr of rank 0 once it takes longer than five seconds: in a terminal one line that is
rewritten, else a line a stage. APEXFX_PROGRESS=0 leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from torch import fx

from ..graph.printing import count_text
from ..ranks import rank

SECONDS = 5.0  # without a line


class Progress:
    """Tells of all that compiles in this process, by any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_compiling = False
        self._began = 0.0
        self._stage, self._untold = "", list[str]()

    @contextlib.contextmanager
    def compiling(self, stage: str) -> Iterator[None]:
        """Tell of what goes on in this context, which begins with `stage`; one inside of another is a stage of it."""
        if self._is_compiling or rank() > 0 or os.environ.get("APEXFX_PROGRESS") == "0":
            self.enter(stage)
            yield
            return
        self._began, self._is_compiling, over = time.monotonic(), True, threading.Event()
        threading.Thread(target=self._watch, args=(over,), daemon=True).start()
        self.enter(stage)
        end = "failed"
        try:
            yield
            end = "compiled"
        finally:
            over.set()
            with self._lock:
                self.enter(end)
                if self._seconds() >= SECONDS and sys.stderr.isatty():
                    print(file=sys.stderr)
                self._is_compiling = False
                self._untold.clear()

    def enter(self, stage: str) -> None:
        """Note what is done from now on."""
        with self._lock:
            if self._is_compiling:
                self._stage = stage
                self._untold.append(self._line())
                if self._seconds() >= SECONDS:
                    self._tell()

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _line(self) -> str:
        return f"apexfx: {self._seconds():.0f} s: {self._stage}"

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(max(SECONDS - self._seconds(), 1.0)):
            with self._lock:
                if not over.is_set():
                    self._tell()

    def _tell(self) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{self._line()}", end="", file=sys.stderr, flush=True)
        else:
            sys.stderr.write("".join(f"{line}\n" for line in self._untold))
            sys.stderr.flush()
        self._untold.clear()


PROGRESS = Progress()


def captured(gm: fx.GraphModule) -> str:
    """Return the stage behind the capture of a graph."""
    num_ops = sum(node.op.startswith("call") for node in gm.graph.nodes)
    return f"captured {count_text(num_ops, 'op')}, passes run over them"
