"""The examples of amp run as their README says, and their loaders read the real formats."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from data import ImageFolder, digits, mnist, read_idx  # noqa: E402


def run(script, *arguments, processes=1):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_imagenet_trains_and_resumes(tmp_path):
    first = run("imagenet/main_amp.py", "--opt-level", "O2", "--epochs", 2, "--checkpoint", tmp_path / "c.pt", "--deterministic")
    assert any(line.startswith("epoch 1 accuracy") for line in first)
    checkpoint = torch.load(tmp_path / "c.pt", weights_only=True)
    assert checkpoint["epoch"] == 2 and checkpoint["best"] > 0.3
    assert {t.dtype for t in checkpoint["model"].values()} == {torch.float32, torch.int64}
    again = run("imagenet/main_amp.py", "--opt-level", "O2", "--resume", tmp_path / "c.pt", "--evaluate")
    assert float(again[-1].split()[-1]) > 0.3


@pytest.mark.long
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_imagenet_learns_on_two_ranks(level):
    out = run("imagenet/main_amp.py", "--opt-level", level, "-b", 32, "--epochs", 4, "--sync-bn", "--fused", processes=2)
    assert float(out[-1].split()[-1]) > 0.85


@pytest.mark.long
def test_mnist_learns():
    out = run("mnist/main.py", "--epochs", 3)
    assert float(out[-1].split()[-1]) > 0.93


@pytest.mark.long
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_dcgan_runs_with_three_scalers(level, tmp_path):
    run("dcgan/main_amp.py", "--epochs", 1, "--opt-level", level, "--out", tmp_path / "gan.pt")
    saved = torch.load(tmp_path / "gan.pt", weights_only=True)
    assert len(saved["amp"]) == 3 and saved["samples"].shape == (64, 1, 8, 8) and saved["samples"].isfinite().all()


@pytest.mark.long
def test_the_simple_ones():
    assert float(run("fp16_optimizer_simple/fp16_optimizer.py", "--epochs", 3)[-1].split()[5]) > 0.9
    out = run("simple/distributed/distributed_data_parallel.py", processes=2)
    assert out[-1].startswith("final loss")


@pytest.mark.long
def test_digits_are_split_once_and_for_all():
    (train, train_labels), (test, _) = (part.tensors for part in digits(channels=3))
    assert train.shape == (1437, 3, 8, 8) and test.shape == (360, 3, 8, 8) and train_labels.dtype == torch.int64
    assert torch.equal(digits(channels=3)[0].tensors[0], train)


def idx(path, tensor):
    header = struct.pack(">HBB", 0, 8, tensor.dim()) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    content = header + bytes(tensor.flatten().tolist())
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_files(tmp_path, suffix):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images = torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8)
    for part in ("train", "t10k"):
        idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        idx(folder / f"{part}-labels-idx1-ubyte{suffix}", torch.arange(5, dtype=torch.uint8))
    train, test = mnist(str(tmp_path))
    assert torch.allclose(train.tensors[0][:, 0] * 0.3081 + 0.1307, images / 255) and train.tensors[0].shape == (5, 1, 28, 28)
    assert test.tensors[1].tolist() == [0, 1, 2, 3, 4]


def test_bad_files_are_explained(tmp_path):
    (tmp_path / "x").write_bytes(b"\x00\x00\x09\x01\x00\x00\x00\x02ab")
    with pytest.raises(ValueError, match="expected the header"):
        read_idx(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\x00\x00\x08\x01\x00\x00\x00\x05ab")
    with pytest.raises(ValueError, match="2 bytes of data; its header says \\(5,\\)"):
        read_idx(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="digits"):
        mnist(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no images"):
        ImageFolder(str(tmp_path), None)


def test_image_folder_numbers_classes_in_order(tmp_path):
    for name in ("b/2.png", "a/1.JPG", "a/0.png", "a/note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    folder = ImageFolder(str(tmp_path), None)
    assert folder.classes == ["a", "b"] and [(p.name, c) for p, c in folder.samples] == [("0.png", 0), ("1.JPG", 0), ("2.png", 1)]
