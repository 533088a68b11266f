"""Kernels that share a C++ file compute what they do in files of their own, and come from the cache as those do."""

from __future__ import annotations

import copy
import functools
import os
import re
import signal
import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecISA
from torch._inductor.utils import clear_caches, fresh_cache

import apexfx
from apexfx import _torch_compilers
from apexfx._torch_compilers import CppFile
from apexfx.compiler import kernel_files, progress
from tests import fresh_process

ADD = "#include <torch/csrc/inductor/cpp_prefix.h>\n{}static int twice(int x) {{ return {} * x; }}\n" \
      'extern "C"  void  kernel(const int* in, int* out) {{ *out = twice(*in); }}'


def update(transforms):
    """Return parameters after an update under Inductor, and those of eager."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    reference, x, y = copy.deepcopy(model), torch.randn(5, 4), torch.randint(3, (5,))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (model, reference)]
    if transforms:
        model = apexfx.transform(model, opt_level="O0")
    for each, optimizer in zip((model, reference)[not transforms:], optimizers[not transforms:]):
        F.cross_entropy(each(x), y).backward()
        optimizer.step()
    if not transforms:
        apexfx.train_step(model, F.cross_entropy, optimizers[0], opt_level="O0")(x, y)
    return list(model.parameters()), list(reference.parameters())


@pytest.mark.long
@pytest.mark.parametrize(("transforms", "threads"), [(True, 1), (False, 2)])
def test_a_graph_has_few_files_which_a_cache_keeps(transforms, threads, tmp_path):
    with fresh_cache(dir=tmp_path), inductor_config.patch(compile_threads=threads):
        torch.testing.assert_close(*update(transforms))
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.main.*")}
        assert len(files) == 2 * (1 + transforms), "a source and a library each, of forward and backward"
        torch._dynamo.reset()
        clear_caches()
        torch.testing.assert_close(*update(transforms))
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.main.*")} == files


@pytest.mark.long
def test_a_large_graph_has_more_and_a_long_call_says_how_many_kernels_are_compiled(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernel_files, "_FILE_CHARACTERS", 2000)
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    with fresh_cache(dir=tmp_path):
        torch.testing.assert_close(*update(False))
        assert len(list(tmp_path.rglob("*.main.cpp"))) > 1
    told = capsys.readouterr()
    assert re.search(r"compiles (\d+) kernels\n.*compiled [1-9]\d* of \1 kernels\n", told.err) and told.out == ""


def test_kernels_keep_to_themselves():
    kernels = [(["const int*", "int*"], ADD.format(*rest)) for rest in (("", 2), ("#include <numbers>\n", 3))]
    x, y = torch.tensor(7, dtype=torch.int32), torch.tensor(0, dtype=torch.int32)
    with fresh_cache():
        double, triple = CppFile.load_kernels(kernels)()
        double(x, y)
        assert y == 14
        triple(x, y)
        assert y == 21


def test_vectors_are_found_while_a_model_is_captured(monkeypatch):
    began, goes_on, built, settings = threading.Event(), threading.Event(), [], []

    @functools.cache
    def look():
        settings.append(inductor_config.cpp.vec_isa_ok)
        began.set()
        goes_on.wait(10)
        return [name for name, code in (("wide", "exp"), ("wide", "dot"), ("narrow", "exp"), ("other", "fails"))
                if VecISA.check_build(name, code)]

    def build(name, code):
        built.append((name, code))
        return code != "fails" and len(built) > 1  # an interrupt has ended the first

    with _torch_compilers._FINDING_VECTORS:  # what another test has begun has ended
        monkeypatch.setattr(_torch_compilers, "valid_vec_isa_list", look)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", look)
    monkeypatch.setattr(VecISA, "check_build", build)
    with inductor_config.patch({"cpp.vec_isa_ok": False}):
        _torch_compilers.find_vectors()
    assert began.wait(10) and not built and settings == [False]
    _torch_compilers.find_vectors()  # of the code of a step, which is captured
    if (child := os.fork()) == 0:  # which has the thread no more
        signal.alarm(20)
        goes_on.set()
        os._exit(len(cpu_vec_isa.valid_vec_isa_list()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    goes_on.set()
    assert cpu_vec_isa.valid_vec_isa_list() == ["wide", "wide", "narrow"]
    assert built == [("wide", "exp"), ("wide", "exp"), ("wide", "dot"), ("other", "fails"), ("other", "fails")]
    assert VecISA.check_build is build and cpu_vec_isa.valid_vec_isa_list is look and look.cache_info().misses == 1


def test_without_another_thread_inductor_finds_vectors_itself(monkeypatch):
    look = functools.cache(lambda: [])
    with _torch_compilers._FINDING_VECTORS:  # what another test has begun has ended
        monkeypatch.setattr(_torch_compilers, "valid_vec_isa_list", look)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", look)
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        _torch_compilers.find_vectors()
    assert cpu_vec_isa.valid_vec_isa_list is look and not _torch_compilers._FINDING_VECTORS.locked()


def vectors(find):
    with fresh_cache(), inductor_config.patch({"cpp.vec_isa_ok": None}):
        find()
        return [*map(str, cpu_vec_isa.valid_vec_isa_list())]


@pytest.mark.long
def test_vectors_are_those_that_torch_finds():
    assert fresh_process.call(vectors, _torch_compilers.find_vectors) == fresh_process.call(vectors, dict)
