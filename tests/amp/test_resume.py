"""Train 2N steps; train N, save, train N in a new process: everything is equal to the bit, at every level."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from apexfx import amp
from tests.amp.amp_cases import OPTIMIZERS, ConvNet, assert_same, fresh_state, train
from tests.amp.resume_process import run

STEPS = 4


def in_a_new_process(jobs):
    root = Path(__file__).parents[2]
    lines = ",".join(" ".join(map(str, job)) for job in jobs)
    done = subprocess.run([sys.executable, "-m", "tests.amp.resume_process", *lines.split(" ")], cwd=root, text=True,
                          capture_output=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("per_level", [1, pytest.param(4, marks=pytest.mark.long)])
def test_resume_in_a_new_process_is_bitwise(per_level, tmp_path):
    torch.set_num_threads(1)  # as in the other process: sums of many threads round in another order
    jobs = []
    for place, level in enumerate(("O0", "O1", "O2", "O3")):
        for name in (2 * ("adam", "fused_adam", "larc", "fused_sgd"))[place:place + per_level]:
            whole, half, rest = (tmp_path / f"{level}_{name}_{part}.pt" for part in ("whole", "half", "rest"))
            torch.manual_seed(0)
            run(None, whole, 0, 2 * STEPS, level, name)
            fresh_state()
            run(None, half, 0, STEPS, level, name)
            fresh_state()
            jobs.append((half, rest, STEPS, STEPS, level, name))
    in_a_new_process(jobs)
    for half, rest, _, _, level, name in jobs:
        whole = torch.load(str(half).replace("_half", "_whole"), weights_only=False)
        again = torch.load(rest, weights_only=False)
        for group in (*whole["optimizer"]["param_groups"], *again["optimizer"]["param_groups"]):
            group.pop("differentiable", None)  # torch adds this default to the groups of an optimizer that loads
        assert_same({(level, name): again}, {(level, name): whole})
        assert whole["amp"]["loss_scaler0"] == {"loss_scale": 2.0**18, "unskipped": 2}  # the scaler moved on the way


@pytest.mark.parametrize("order", [("model", "optimizer", "amp"), ("amp", "optimizer", "model")])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_order_of_loading_does_not_matter(tmp_path, level, order):
    run(None, tmp_path / "half.pt", 0, STEPS, level, "adam")
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    results = []
    for names in (("model", "optimizer", "amp"), order):
        fresh_state()
        model = ConvNet()
        model, optimizer = amp.initialize(model, OPTIMIZERS["adam"](model.parameters()), opt_level=level,
                                          loss_scale="dynamic", verbosity=0)
        targets = {"model": model, "optimizer": optimizer, "amp": amp}
        for name in names:
            targets[name].load_state_dict(copy.deepcopy(saved[name]))  # torch's optimizers train on in the tensors they load
        results.append(train(model, optimizer, 3, first=STEPS))
    assert torch.equal(*results)


def test_a_checkpoint_moves_between_levels(tmp_path):
    run(None, tmp_path / "o2.pt", 0, STEPS, "O2", "adam")
    saved = torch.load(tmp_path / "o2.pt", weights_only=True)
    fresh_state()
    model = ConvNet()
    model, optimizer = amp.initialize(model, OPTIMIZERS["adam"](model.parameters()), opt_level="O1", verbosity=0)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    assert_same([*model.parameters()], saved["masters"])
    assert train(model, optimizer, 2, first=STEPS).isfinite().all()
