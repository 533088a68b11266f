"""A call that fails leaves all as it was; where it has changed something before, the step is of no more use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from .._torch import set_grad_enabled
from ..errors import RankFailureError, RankMismatchError


class AllOrNothing:
    """Notes what the call under way changes. If that fails, it undoes what it has read, or lets no call follow."""

    def __init__(self) -> None:
        self.broken = ""  # why nothing can be trained on
        self._changed = self._communicated = False  # by the call under way
        self._undo: Callable[[], None] | None = None

    def note_change(self) -> None:
        """Note that parameters, buffers, state or accumulated gradients change from now on."""
        self._changed = True

    def note_communication(self) -> None:
        """Note that the call communicates from now on: when it fails, another rank may have changed all this."""
        self._communicated = True

    def undo_by(self, undo: Callable[[], None]) -> None:
        """Have `undo` put back what the call reads, if it fails before it has changed anything; the first of a call counts."""
        self._undo = self._undo or undo

    def check_usable(self) -> None:
        """Raise where an earlier call failed after it had changed something."""
        if self.broken:
            raise RuntimeError(f"apexfx: an earlier step failed after it had begun to change parameters, buffers or optimizer "
                               f"({self.broken}), and may have left them half changed; load a checkpoint by the step's own "
                               "load_state_dict(), or load model and optimizer and make a new step")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a call in this context.

        A mismatch is raised on every rank, before what they were about to communicate has reached any, but for one that is late.
        """
        self.check_usable()
        self._changed = self._communicated = False
        self._undo = None
        recorded = torch.is_grad_enabled()
        try:
            yield
        except BaseException as error:
            late = isinstance(error, (RankMismatchError, RankFailureError)) and error.late
            if self._changed or late or self._communicated and not isinstance(error, RankMismatchError):
                self.broken = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            elif self._undo is not None:
                self._undo()
            raise
        finally:
            set_grad_enabled(recorded)  # an interrupt in the methods of torch.no_grad(), which are Python's, leaves it on
            self._undo = None
