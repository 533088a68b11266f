"""scikit-learn's handwritten digits: 1797 real 8 x 8 images, split once and for all, and the order they are seen in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_TEST_SHARE = 0.3  # 539 images: one image is 0.19 points of accuracy
_SPLIT_SEED = 0
NUM_TRAIN = 1797 - 539


@dataclass(frozen=True)
class Digits:
    """Images are float32 (N, 1, 8, 8) in [-1, 1]; labels int64 (N,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(device: torch.device | str = "cpu") -> Digits:
    """Return the digits on a device, the same split every time.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 8 - 1  # pixels are 0 to 16
    labels = torch.from_numpy(labels).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    images, labels = images[order].to(device), labels[order].to(device)
    num_test = int(_TEST_SHARE * len(labels))
    return Digits(images[num_test:], labels[num_test:], images[:num_test], labels[:num_test])


def batches(num_samples: int, batch_size: int, epoch: int, *, rank: int = 0, num_ranks: int = 1) -> Iterator[Tensor]:
    """Yield the indices (batch_size / num_ranks,) of each batch's share of one rank; a last partial batch is left out.

    All ranks together see the batches that one rank alone would see.
    """
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(1000 + epoch))
    for start in range(0, num_samples - batch_size + 1, batch_size):
        yield order[start : start + batch_size][rank::num_ranks]
