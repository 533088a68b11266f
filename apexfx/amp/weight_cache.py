"""Half copies of parameters, made once and reused until the parameter changes."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from .._torch import tensor_version

# The parameter, its version and address when it was cast, the cast, and whether it was made for training.
_Entry = tuple[Tensor, int, int, Tensor, bool]


class WeightCache:
    """parameter -> its cast, as long as the parameter's version and memory are those it was made from.

    A cast made without gradients serves until the outermost forward ends, so that evaluation holds no second copy of
    the weights and sees every edit; one made for training serves until `clear`. A cast whose graph is not what the
    moment asks for (made under `no_grad`, needed with gradients) is made again.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        self._passing = False

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, parameter: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return the cast of `parameter`, and whether it was there already."""
        key = (id(parameter), dtype)
        training = is_grad_enabled()
        entries = self._entries
        if key in entries:
            of, version, data_ptr, cast, _ = entries[key]
            if (
                of is parameter
                and version == tensor_version(parameter)
                and data_ptr == parameter.data_ptr()
                and (not training or cast.requires_grad == parameter.requires_grad)
            ):
                return cast, True
        cast = parameter.to(dtype)
        if cast.requires_grad or not (torch.is_inference_mode_enabled() or parameter.is_inference()):
            entries[key] = (parameter, tensor_version(parameter), parameter.data_ptr(), cast, training)
            if not training:
                self._passing = True
        return cast, False

    def drop_passing(self) -> None:
        """Forget casts made without gradients; called when the outermost forward ends."""
        if self._passing:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[4]}
            self._passing = False

    def remove(self, parameter: Tensor) -> None:
        """Forget the casts of one parameter."""
        for key in [key for key in self._entries if key[0] == id(parameter)]:
            del self._entries[key]

    def clear(self) -> None:
        """Forget every cast."""
        self._entries.clear()
        self._passing = False
