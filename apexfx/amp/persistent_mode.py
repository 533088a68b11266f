"""A torch function mode that stays on beyond any `with` block, in one thread."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode

from apexfx._torch import function_mode_depth, pop_function_mode, push_function_mode


class PersistentMode:
    """Puts `mode` at the bottom of the calling thread's stack, so that blocks entered before or after stay paired."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode
        above = [pop_function_mode() for _ in range(function_mode_depth())]
        push_function_mode(mode)
        for other in reversed(above):
            push_function_mode(other)

    def remove(self) -> None:
        """Take the mode out, wherever it is; do nothing in a thread that does not have it."""
        modes = [pop_function_mode() for _ in range(function_mode_depth())]
        for mode in reversed(modes):
            if mode is not self._mode:
                push_function_mode(mode)
