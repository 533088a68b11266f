"""apex.contrib.xentropy: the cross entropy of each row, in float32 whatever the logits are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import HALVES

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss:
    """Called by `.apply`, as Apex's autograd Function of this name: here the derivative is torch's own."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
    ) -> Tensor:
        """Return the loss of each row of `logits` (N, classes), 0 where its label is `padding_idx`, which is class 0 by default.

        The losses are float32 (float64 of float64 logits); `half_to_float` only says that the logits are halves.
        Raises RuntimeError for shapes and dtypes that Apex refuses.
        """
        if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
            raise RuntimeError(f"SoftmaxCrossEntropyLoss: logits of shape {list(logits.shape)}, labels of shape "
                               f"{list(labels.shape)} and {labels.dtype}; expected (N, classes), and N labels of torch.int64")
        if half_to_float and logits.dtype not in HALVES:
            raise RuntimeError(f"SoftmaxCrossEntropyLoss: half_to_float=True with logits of {logits.dtype}, expected a half")
        if logits.dtype in HALVES:
            logits = logits.float()
        return F.cross_entropy(logits, labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing)
