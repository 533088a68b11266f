"""`python -m apexfx simulate`: what it prints and writes, and how mistakes are named."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from apexfx._torch import fake_process_group
from apexfx.config import BucketConfig
from apexfx.tools.simulate.devices import DEVICES, Costs
from apexfx.tools.simulate.models import load
from apexfx.tools.simulate.network import PRESETS
from apexfx.tools.simulate.profile import analytic
from apexfx.tools.simulate.simulator import simulate
from tests.test_cli import run as run_command


def run(capsys, *arguments):
    """Return (exit status, standard output, standard error)."""
    return run_command(capsys, "simulate", *arguments)


def test_the_numbers_are_those_of_the_library(capsys, tmp_path):
    status, out, _ = run(capsys, "--model", "cnn", "--ranks", "8,64", "--sync-bn", "--dtype", "float32", "--network",
                         "ethernet-25g", "--device", "a100", "--bucket-mib", "0.1", "--json", str(tmp_path / "out.json"))
    assert status == 0 and out.startswith("cnn: ") and out.count("\ncommunication ") == 2
    profile = analytic(*load("cnn", device="meta"), DEVICES["a100"], sync_bn=True)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    config_size = round(0.1 * 2**20 / 4)
    for row, num_ranks in zip(rows, (8, 64)):
        made = simulate(profile, PRESETS["ethernet-25g"], num_ranks, BucketConfig(message_size=config_size),
                        costs=Costs.on(DEVICES["a100"]))
        assert row["step_s"] == made.step_s and row["sync_tax_s"] == made.sync_tax_s > 0
        assert len(row["buckets"]) == len(made.buckets) > 1
        assert min(choice["step_s"] for choice in row["bucket_sizes"]) == row["bucket_sizes"][0]["step_s"]
        assert f"{1e3 * made.step_s:.2f}" in out


@pytest.mark.long
def test_a_step_that_is_sharded_is_simulated(capsys, tmp_path):
    slow = ("--model", "mlp", "--ranks", "8", "--network", "ethernet-25g")
    steps = []
    for options in ((), ("--shard", "model"), ("--shard", "optimizer"), ("--shard", "optimizer", "--clip")):
        out = run(capsys, *slow, *options, "--json", str(tmp_path / "out.json"))[1]
        [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
        steps.append(row["step_s"])
        assert bool(row["gathers"]) is bool(options) and f"{1e3 * row['step_s']:.2f}" in out
        assert (" 9 groups; " in out) is ("model" in options) and ("collectives" in out) is bool(options)
        assert ("A" in out.rpartition("communication ")[2].partition("\n")[0]) is bool(options)
    assert steps[2] < steps[3]  # where nothing is clipped, gathers travel while the backward goes on
    run(capsys, *slow, "--shard", "optimizer", "--bucket-mib", "1,100", "--json", str(tmp_path / "out.json"))
    [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
    tried = {choice["num_buckets"]: choice["step_s"] for choice in row["bucket_sizes"]}
    assert len(row["buckets"]) == max(tried) > min(tried) == 1 and tried[max(tried)] == row["step_s"]


def test_a_model_without_batch_norm_has_none_to_synchronize(capsys):
    asked = "warning: --sync-bn was given, and mlp runs no batch norm: there is nothing to synchronize"
    for model, options, warned in (("mlp", ["--sync-bn"], True), ("cnn", [], False)):
        out = run(capsys, "--model", model, "--ranks", "8", *options)[1]
        assert (asked in out) == warned and next(line for line in out.splitlines() if line.startswith("8 ")).split()[8] == "-"


def test_a_network_of_your_own(capsys):
    fast = run(capsys, "--model", "mlp", "--ranks", "16", "--latency-us", "1", "--bandwidth", "100")[1]
    slow = run(capsys, "--model", "mlp", "--ranks", "16", "--latency-us", "1", "--bandwidth", "0.1", "--ranks-per-node", "8")[1]
    step = [float(next(line for line in out.splitlines() if line.startswith("16 ")).split()[1]) for out in (fast, slow)]
    assert step[0] < step[1]
    assert "1 us, 0.1 GB/s, 8 to a node" in slow.splitlines()[0]


def test_a_model_of_your_own_measured(capsys, monkeypatch):
    module = type(sys)("own_models")
    module.small = lambda: (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8))
    monkeypatch.setitem(sys.modules, "own_models", module)
    status, out, _ = run(capsys, "--model", "own_models:small", "--measured", "--sync-bn", "--ranks", "2")
    assert status == 0 and "measured, 10 steps" in out.splitlines()[0]


def test_a_function_that_returns_something_else_is_refused(capsys, monkeypatch):
    module = type(sys)("own_models")
    module.wrong = lambda: nn.Linear(1, 1)
    monkeypatch.setitem(sys.modules, "own_models", module)
    status, _, err = run(capsys, "--model", "own_models:wrong")
    assert status == 2 and "returned Linear, expected (model, inputs)" in err
    status, _, err = run(capsys, "--model", "own_models:absent")
    assert status == 2 and "absent" in err
    assert run(capsys, "--model", "own_models:wrong", "--batch", "3")[0] == 2
    module.sharded = lambda: (fully_shard(nn.Linear(1, 1)), torch.ones(1, 1))
    with fake_process_group(2):
        status, _, err = run(capsys, "--model", "own_models:sharded")
    assert status == 2 and "return it as it is before fully_shard()" in err
    status, _, err = run(capsys, "--model", "own_models:wrong", "--shard", "model")
    assert status == 2 and "name them, as in --blocks 'blocks.*'" in err


@pytest.mark.parametrize("arguments, named", [
    (("--model", "resnet51"), "model 'resnet51' was given, expected one of mlp"),
    (("--model", "no_such_package:f"), "No module named"),
    (("--ranks", "8,x"), "'8,x' was given, expected whole numbers"), (("--ranks", "0"), "expected whole numbers of at least 1"),
    (("--network", "token-ring"), "invalid choice: 'token-ring'"), (("--device", "z80"), "invalid choice: 'z80'"),
    (("--latency-us", "5"), "give both"), (("--bandwidth", "5"), "give both"),
    (("--ranks-per-node", "8"), "a preset has its own"), (("--bucket-mib", "0"), "'0' was given, expected a number above 0"),
    (("--batch", "1.5"), "expected a whole number above 0"),
    (("--measured", "--device", "a100", "--dtype", "float32"), "float32 with SGD, and --device a100, --dtype float32 was given"),
    (("--clip",), "--clip was given without --shard"), (("--blocks", "*"), "--blocks was given without --shard model"),
    (("--shard", "model", "--bucket-mib", "1"), "--bucket-mib was given with --shard model"),
    (("--bucket-mib", "1,2"), "without --shard optimizer; give one"),
    (("--model", "mlp", "--shard", "model", "--blocks", "block.*"), "no module of Sequential is called 'block.*'"),
    (("--model", "mlp", "--ranks", "2", "--json", "/no/such/folder/x.json"), "No such file or directory"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(capsys, arguments, named):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and named in err
