"""The cache key changes with everything that changes the compiled graph."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.passes.infra.pass_base import PassResult

import apexfx
from apexfx.compiler import cache
from apexfx.report.records import StageReport
from tests import fresh_process


class Mine(apexfx.Pass):
    name = "mine"
    stage = "backward"

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def call(self, gm):
        return PassResult(gm, False)

    def options(self):
        return {"factor": self.factor}


def key(config=None, passes=(), facts=None):
    return cache.uuid(config or {"opt_level": "O1"}, passes, facts or {"world": 2})


def test_equal_inputs_give_equal_keys():
    assert key(passes=[Mine(2.0)]) == key(passes=[Mine(2.0)])


def test_everything_counts(monkeypatch):
    keys = [key(), key({"opt_level": "O2"}), key(facts={"world": 3}), key(passes=[Mine()]), key(passes=[Mine(2.0)])]
    monkeypatch.setattr(cache, "package_digest", lambda: "an edited pass of ours")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_what_a_pass_calls_in_its_package_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "own_passes"
    package.mkdir()
    texts = {"__init__": "", "helper": "def factor(): return 1.0\n", "halve": (
        "import apexfx\nfrom .helper import factor\nclass Halve(apexfx.Pass):\n    name, stage = 'halve', 'backward'\n")}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    halve = importlib.import_module("own_passes.halve").Halve
    keys = [key(passes=[halve()]), key(passes=[halve()])]
    (package / "helper.py").write_text("def factor(): return 2.0\n")
    assert keys[0] == keys[1] != key(passes=[halve()])
    for name in ("own_passes", "own_passes.helper", "own_passes.halve"):
        monkeypatch.delitem(sys.modules, name)


def test_every_room_of_the_package_counts(monkeypatch):
    read = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or real(path))
    cache.package_digest.__wrapped__()
    root = Path(apexfx.__file__).parent
    assert {root / "config.py", root / "passes" / "precision.py", root / "ops" / "bucket.py"} <= set(read)


def test_a_pass_without_source_bypasses_the_cache():
    scope = {"apexfx": apexfx}
    exec("class Typed(apexfx.Pass):\n    name = 'typed'\n", scope)
    assert key(passes=[scope["Typed"]()]) is None


class Forgetful(apexfx.Pass):
    name = "forgetful"
    stage = "backward"

    def __init__(self, factor):
        super().__init__()
        self.factor = factor


class Further(Mine):
    power = 2


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_passes_of_a_step_bypass_no_cache(inner, monkeypatch):
    keys, uuid = [], cache.uuid
    monkeypatch.setattr(cache, "uuid", lambda *args: keys.append(uuid(*args)) or keys[-1])  # None: nothing of this is cached
    for _ in range(2):
        model = nn.Linear(2, 2)
        step = apexfx.train_step(model, objective=lambda model, x, y: F.mse_loss(model(x) + model(x), y), inner=inner,
                                 optimizer=torch.optim.AdamW(model.parameters()), opt_level="O1", max_grad_norm=1.0)
        step.capture(torch.ones(1, 2), torch.ones(1, 2))
        assert step.report.matches("cancel_casts")
    assert keys[0] is not None and keys == keys[:1] * len(keys)


def test_a_pass_that_forgets_options_counts_with_its_attributes():
    assert key(passes=[Forgetful(2.0)]) == key(passes=[Forgetful(2.0)]) != key(passes=[Forgetful(3.0)])
    assert key(passes=[Forgetful(object())]) is None  # nothing that a later process could compare
    more = [Further(), Further()]
    more[1].power = 3
    assert key(passes=more[:1]) != key(passes=more[1:])


def test_a_report_survives_the_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    stage = StageReport("backward", captured="the graph")
    cache.save_stage("some-key", stage)
    loaded = cache.load_stage("some-key")
    assert loaded.captured == "the graph" and loaded.from_cache
    assert cache.load_stage("another-key") is None
    path = next(tmp_path.rglob("*.json"))
    path.write_text(json.dumps({"stage": 1})[:-3])
    assert cache.load_stage("some-key") is None


def first_step(folder, caches):
    """Return what a step's first call found in torch's caches, and those caches."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    if caches:
        torch.compiler.load_cache_artifacts(caches)
    model = nn.Linear(8, 4)
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
    step(torch.ones(2, 8), torch.ones(2, 4))
    [graph] = step.report.graphs
    return graph.stages[1].from_cache, graph.stages[1].captured, torch.compiler.save_cache_artifacts()[0]


@pytest.mark.long
def test_torchs_portable_caches_hold_the_report_too(tmp_path):
    from_cache, captured, caches = fresh_process.call(first_step, str(tmp_path / "first"), b"")
    assert not from_cache and captured
    for folder in ("second", "third"):  # what was found is handed on as what was made
        from_cache, found, caches = fresh_process.call(first_step, str(tmp_path / folder), caches)
        assert from_cache and found == captured


class Flat(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.end = end
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x.flatten(0, self.end)).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("is_train_step", [True, pytest.param(False, marks=pytest.mark.long)])
def test_programs_that_lower_to_one_graph_have_a_report_each(is_train_step, tmp_path, monkeypatch):
    """AOTAutograd's cache knows the second by another key than the first, and Inductor's has its code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    stages = []
    for end in (-2, 1, 1):
        torch._dynamo.reset()
        model = Flat(end)
        if is_train_step:
            step = apexfx.train_step(model, None, torch.optim.SGD(model.parameters(), 0.1), objective=lambda model, x: model(x))
            step(torch.ones(2, 3, 8))
            assert step.report.memory()
            stages.append(step.report.graphs[0].stages[1])
        else:
            model = apexfx.transform(model)
            model(torch.ones(2, 3, 8)).backward()
            stages.append(model.report.graphs[0].stages[1])
    assert [stage.from_cache for stage in stages] == [False, True, True]
    assert [stage.captured for stage in stages] == [stages[0].captured] * 3
