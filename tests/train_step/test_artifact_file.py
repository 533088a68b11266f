"""The file of an artifact: whole or not there, whatever happens to its disk, its folder and its writers; nothing is compiled."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch.multiprocessing as mp

import apexfx
from apexfx.train_step.artifact import archive
from tests.train_step.test_artifact import make, refused


def test_a_damaged_file_is_refused(tmp_path):
    path, program = tmp_path / "step", {"program": {"torch": "2"}, "calls": []}
    archive.write(path, program, {"a.so": bytes(range(256))})
    assert archive.read(path)[:2] == (program, {"a.so": bytes(range(256))})
    assert [file.name for file in tmp_path.iterdir()] == ["step"]
    data, generator = path.read_bytes(), random.Random(0)
    for place in {0, 39, 40, 104, 105, len(data) - 1, *(generator.randrange(len(data)) for _ in range(200))}:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1:])
        with pytest.raises(apexfx.ArtifactMismatch, match="is damaged or cut|is no artifact of this version"):
            archive.read(path)
        path.write_bytes(data[:place])
        with pytest.raises(apexfx.ArtifactMismatch, match="is damaged or cut|is no artifact|is empty"):
            make(path)


@contextlib.contextmanager
def unprivileged(mode, place):
    """What the owner of `place` may not do with it by its mode."""
    user, before = os.geteuid(), place.stat().st_mode
    place.chmod(mode)
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
        place.chmod(before)


@contextlib.contextmanager
def full_disk(num_bytes):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def written():
    """A file that anybody may reach, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        archive.write(Path(folder, "step"), program_of(0), {})
        yield Path(folder, "step")


def program_of(number):
    return {"program": {"torch": str(number)}, "calls": []}


def names_in(folder):
    return sorted(file.name for file in folder.iterdir())


LIBRARY = {"a.so": random.Random(0).randbytes(100_000)}
NOT_WRITTEN = {
    "no permission": (lambda path: unprivileged(0o555, path.parent), "step", "Permission denied"),
    "full before it begins": (lambda _: full_disk(0), "step", "File too large"),
    "full": (lambda _: full_disk(50_000), "step", "File too large"),
    "no folder": (lambda _: contextlib.nullcontext(), "none/step", "No such file or directory"),
    "a file as the folder": (lambda _: contextlib.nullcontext(), "step/step", "Not a directory"),
    "a folder": (lambda _: contextlib.nullcontext(), ".", "Device or resource busy|Is a directory|not empty"),
}


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_what_cannot_be_written_leaves_what_was_there(name, written):
    fault, place, reason = NOT_WRITTEN[name]
    with fault(written), pytest.raises(OSError, match=reason):
        archive.write(written.parent / place, program_of(1), LIBRARY)
    assert archive.read(written)[:2] == (program_of(0), {}) and names_in(written.parent) == ["step"]


@pytest.mark.parametrize("fault, place, reason", [
    (lambda path: unprivileged(0o000, path), "step", "Permission denied"),
    (lambda path: unprivileged(0o000, path.parent), "step", "Permission denied"),
    (lambda _: contextlib.nullcontext(), "step/step", "Not a directory"),
    (lambda _: contextlib.nullcontext(), ".", "Is a directory")])
def test_what_cannot_be_read_is_refused(fault, place, reason, written):
    with fault(written), pytest.raises(apexfx.ArtifactMismatch, match=f"cannot be read .{reason}.; delete the file"):
        make(written.parent / place)
    assert archive.read(written)[0] == program_of(0)


def test_a_file_of_another_torch_is_refused_before_anything_is_captured(written):
    refused(written, "difference: torch. The file has 0, and the program has 2.*Delete the file")


def killed(path, point):
    """Write, and be killed: when so many bytes are on the disk, or at what Python tells its audit hooks."""
    if type(point) is int:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (point, point))
    else:
        sys.addaudithook(lambda event, _: event == point and os.kill(os.getpid(), signal.SIGKILL))
    archive.write(path, program_of(1), LIBRARY)


def write_often(path, number):
    while path.with_name("go on").exists():
        archive.write(path, program_of(number), {"a.so": bytes([number]) * 1_000_000})


def started(function, *args):
    process = mp.get_context("forkserver").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def test_who_is_killed_while_writing_leaves_what_was_there(written):
    for point in (0, 1, 100, 99_999, "tempfile.mkstemp", "os.rename"):
        process = started(killed, written, point)
        process.join()
        assert process.exitcode in (-signal.SIGXFSZ, -signal.SIGKILL) and archive.read(written)[0] == program_of(0)
    archive.write(written, program_of(1), {})
    assert 1 < len(names_in(written.parent)) < 7  # which another process may be writing
    for file in written.parent.iterdir():
        os.utime(file, (0, 0))
    archive.write(written, program_of(2), {})
    assert archive.read(written)[0] == program_of(2) and names_in(written.parent) == ["step"]


def test_of_several_that_write_at_once_each_writes_all_of_it(written):
    (signal_file := written.with_name("go on")).touch()
    writers, found = [started(write_often, written, number) for number in (1, 2, 3)], set()
    while not found >= {1, 2, 3}:
        program, libraries, _ = archive.read(written)
        found.add(number := int(program["program"]["torch"]))
        assert libraries == ({"a.so": bytes([number]) * 1_000_000} if number else {})
        assert all(writer.is_alive() for writer in writers)
    signal_file.unlink()
    for writer in writers:
        writer.join()
    assert names_in(written.parent) == ["step"] and not any(writer.exitcode for writer in writers)
