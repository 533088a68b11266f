"""What one call of `initialize` set up. Models and optimizers keep theirs; `_amp_state` shows the latest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .executor import CastExecutor
from .properties import Properties
from .scaler import LossScaler


@dataclass(eq=False)
class Session:
    """The properties, scalers and executor that belong together.

    Attributes:
        properties: as asked for.
        half: the half type of this session.
        scalers: one a loss.
        executor: of O1; None at the other levels and where functions are not patched.
    """

    properties: Properties
    half: torch.dtype
    scalers: list[LossScaler]
    executor: CastExecutor | None

    def report_overflows(self) -> None:
        """Print what the scalers have to say and is known on the host already."""
        for scaler in self.scalers:
            scaler.report_overflows()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self  # a copied optimizer is scaled by the same scalers
