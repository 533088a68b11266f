"""Data of the examples: scikit-learn's digits by default; MNIST's files and folders of images where they are at hand."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def digits(*, channels: int = 1) -> tuple[TensorDataset, TensorDataset]:
    """Return (train, test): 1437 and 360 real 8 x 8 images (N, channels, 8, 8) in [-1, 1], the same split every time."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8).expand(-1, channels, 8, 8) / 8 - 1
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].contiguous(), torch.from_numpy(labels).long()[order]
    return TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])


def read_idx(path: Path) -> Tensor:
    """Read an IDX file (the format of MNIST), gzipped or not, as a uint8 tensor.

    Raises:
        ValueError: not an IDX file of bytes, or shorter than its header says.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        content = file.read()
    zeros, kind, num_dims = struct.unpack(">HBB", content[:4])
    if zeros != 0 or kind != 8:
        raise ValueError(f"{path} begins with {content[:4]!r}; expected the header of an IDX file of bytes")
    sizes = struct.unpack(f">{num_dims}I", content[4 : 4 + 4 * num_dims])
    body = numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * num_dims)
    if body.size != numpy.prod(sizes):
        raise ValueError(f"{path} holds {body.size} bytes of data; its header says {sizes}")
    return torch.from_numpy(body.reshape(sizes).copy())


def mnist(folder: str) -> tuple[TensorDataset, TensorDataset]:
    """Return (train, test) from MNIST's four files in `folder` (or in its MNIST/raw): images (N, 1, 28, 28), normalized.

    Raises:
        FileNotFoundError: a file is missing; where to get it.
    """

    def find(name: str) -> Path:
        for place in (Path(folder), Path(folder) / "MNIST" / "raw"):
            for candidate in (place / name, place / f"{name}.gz"):
                if candidate.exists():
                    return candidate
        raise FileNotFoundError(f"{folder} has no {name}(.gz); get MNIST's files, or leave --data out to train on digits")

    def load(part: str) -> TensorDataset:
        images = read_idx(find(f"{part}-images-idx3-ubyte")).float().div(255).sub(0.1307).div(0.3081)
        return TensorDataset(images[:, None], read_idx(find(f"{part}-labels-idx1-ubyte")).long())

    return load("train"), load("t10k")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images as `folder/class name/image.jpg`; classes numbered in alphabetical order. Items are ((3, S, S), class)."""

    def __init__(self, folder: str, transform: Callable[..., Tensor]) -> None:
        root = Path(folder)
        self.classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in IMAGE_SUFFIXES
        ]
        if not self.samples:
            raise FileNotFoundError(f"{folder} has no images in folders by class ({', '.join(IMAGE_SUFFIXES)})")
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image  # Pillow; only real images need it

        path, label = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label


class Crop:
    """A random resized crop and flip for training, or a resize and centre crop; then a normalized float tensor."""

    def __init__(self, size: int, *, train: bool) -> None:
        self.size = size
        self.train = train

    def __call__(self, image: object) -> Tensor:
        image = self._random(image) if self.train else self._centre(image)
        pixels = torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1).float().div(255)
        return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]

    def _random(self, image):
        width, height = image.size
        scale, ratio = torch.empty(2).uniform_(0.08, 1.0)[0].item(), torch.empty(1).uniform_(-0.2877, 0.2877).exp().item()
        area = width * height * scale
        w, h = min(width, round((area * ratio) ** 0.5)), min(height, round((area / ratio) ** 0.5))
        left, top = (int(torch.randint(0, limit + 1, ()).item()) for limit in (width - w, height - h))
        image = image.resize((self.size, self.size), box=(left, top, left + w, top + h), resample=2)
        return image.transpose(0) if torch.rand(()).item() < 0.5 else image  # 0: FLIP_LEFT_RIGHT

    def _centre(self, image):
        width, height = image.size
        side = min(width, height) * 0.875
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        return image.resize((self.size, self.size), box=box, resample=2)


class Prefetcher:
    """Iterates over a loader one batch ahead: the copy to the GPU runs on a stream of its own while the model works."""

    def __init__(self, loader: object, device: torch.device) -> None:
        self.loader = loader
        self.device = device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if self.device.type != "cuda":
            yield from self.loader
            return
        stream = torch.cuda.Stream(self.device)
        ahead: tuple[Tensor, ...] | None = None
        for batch in self.loader:
            with torch.cuda.stream(stream):
                following = tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)
            if ahead is not None:
                yield ahead
            torch.cuda.current_stream(self.device).wait_stream(stream)
            for tensor in following:
                tensor.record_stream(torch.cuda.current_stream(self.device))
            ahead = following
        if ahead is not None:
            yield ahead
