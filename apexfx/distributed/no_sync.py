"""What both executors of data parallelism have in common: gradients are averaged, or stay local for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.weak import WeakTensorKeyDictionary

# Parameter that has accumulated inside of `no_sync()` -> whether that is set aside, by `amp.scale_loss`, so that a backward which
# synchronizes would not reduce it.
local_gradients: Any = WeakTensorKeyDictionary()
SET_ASIDE = ("scale_loss has set aside what {} accumulated inside of no_sync(), so it would not be reduced; pass "
             "delay_unscale=True to every scale_loss inside of no_sync()")


class Synchronizer:
    """Averages the gradients of one model over the ranks.

    Attributes:
        enabled: False inside `no_sync()`.
    """

    enabled = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients local inside of the block; the first backward after it averages what has accumulated."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before
