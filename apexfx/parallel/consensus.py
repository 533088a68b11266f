"""What the ranks make of each backward's status: they go on, or all raise the same error.

On CUDA reading it would have the host wait for the device in every backward. There a backward's status is copied to the
host beside what runs, and read at the end of the next one, by all ranks alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.status import Status, StatusMessage, numbers
from ..distributed.watchdog import disagreement, gather_answers, post
from ..errors import RankFailureError
from ..ops.host_copy import HostCopy
from .layout import Layout


class Consensus:
    """The ranks' consensus on the backwards of one module.

    Args:
        group: the ranks.
        label: tells this module's keys in the store apart.
        timeout_s: to wait for the others' words.
        uneven: a parameter may have a gradient on some ranks only.

    Attributes:
        forwards: how many synchronizing forwards this rank has run.
        late: an error that came when the status of its backward had been sent; the next one tells the other ranks.
    """

    def __init__(self, group: dist.ProcessGroup, label: str, timeout_s: float, *, uneven: bool) -> None:
        self.group, self.label, self.timeout_s, self.uneven = group, label, timeout_s, uneven
        self.forwards, self.late = 0, ""
        self._agreed = 0  # forwards, when the ranks last agreed
        self._last: tuple[Any, Tensor] | None = None  # a message as the next is likely to be
        self._unread: tuple[HostCopy, StatusMessage, Layout] | None = None  # of the backward before

    def message(self, backward: int, failure: str, accumulated: bool, used: Sequence[int],
                device: torch.device) -> StatusMessage:
        """Return what this rank has to say of the backward under way, on the `device` it travels from."""
        failure, self.late = failure or self.late, ""
        since = self.forwards - self._agreed
        said = (device, since, bool(failure), accumulated, used)
        if self._last is None or self._last[0] != said:
            self._last = said, numbers(*said)
        return StatusMessage(backward, (since, self.forwards), failure, accumulated, used, self._last[1])

    def check(self, message: StatusMessage, failure: str, layout: Layout) -> Status | None:
        """Return what came of `message`; None where that is read in the next backward.

        Args:
            failure: what this rank has to report by now.

        Raises:
            RankFailureError: on every rank, unless the failure came after the message was sent: then on this one now, and
                on all in the next backward.
        """
        before, self._unread = self._unread, None
        if before is not None:
            copy, *what = before
            self._judge(Status.read(copy.get()), *what, failure="", late=True)
        if self._can_wait(message.tensor, layout):
            self._unread = HostCopy(message.tensor), message, layout
            status = None
        else:
            status = Status.read(message.tensor)
            self._judge(status, message, layout, failure=failure, late=False)
        if failure:
            if not message.failure:
                self.late = f"in the backward before this one: {failure}"
            raise RankFailureError(f"apexfx: {failure}")
        return status

    def _can_wait(self, tensor: Tensor, layout: Layout) -> bool:
        """Whether a status may be read a backward later: nothing but the error depends on it."""
        return tensor.device.type == "cuda" and layout.learned and not self.uneven

    def _judge(self, status: Status, message: StatusMessage, layout: Layout, *, failure: str, late: bool) -> None:
        differ = status.forwards_differ or status.accumulation_differs
        if not (status.failed or differ or self._partly_used(layout, status)):
            self._agreed = message.forwards[1]
            return
        said = gather_answers(self.group, self._key(message), self._words(message, failure, layout), self.timeout_s)
        forwards = message.forwards[1]
        self.forwards += max((words["forwards"] for words in said if words), default=forwards) - forwards
        since = ("\nThat was the backward before this one: an optimizer may have used its gradients since, the same ones on "
                 "every rank that did. Go back to a checkpoint.") if late else ""
        raise RankFailureError(disagreement(said) + since)

    def _partly_used(self, layout: Layout, status: Status) -> bool:
        """Whether a parameter has a gradient where it was not expected, or has none where it was."""
        if self.uneven:
            return False
        used, unused = status.used_somewhere, status.unused_somewhere
        if not layout.learned:  # what no rank uses is left out of the plan
            return any(map(bool.__and__, used, unused))
        return used != layout.planned or any(map(bool.__and__, unused, layout.planned))

    def leave_words(self, message: StatusMessage, failure: str, layout: Layout) -> None:
        """Say what this rank has to say of a backward that it gives up, for peers that find out later; wait for nobody."""
        with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that holds it
            post(self.group, self._key(message), self._words(message, failure, layout))

    def _key(self, message: StatusMessage) -> str:
        return f"apexfx/{self.label}/status{message.backward}"

    def _words(self, message: StatusMessage, failure: str, layout: Layout) -> dict[str, Any]:
        rows = zip(layout.names, layout.bucket_of, message.used)
        unused = [name for name, bucket, used in rows if not used and bucket >= 0]
        return {"failed": message.failure or failure, "forwards": message.forwards[1],
                "accumulated": message.accumulated, "unused": unused}
