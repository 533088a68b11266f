"""The programs with a whole-step graph learn, on one process and on two, and resume to the bit."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.test_train import run_program, train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def run_here(script, capsys):
    """Run a program in this process; return what it defined and what it printed."""
    defined = run_program(EXAMPLES / script)
    return defined, capsys.readouterr().out.splitlines()


def run_on_two_ranks(script, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / script)]
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def number(line, after):
    return float(line.partition(f"{after} ")[2].split()[0].rstrip(","))


train_classifier = functools.partial(train, program=EXAMPLES / "step_image_classifier.py", checkpoint="step_image_classifier.pt")


@pytest.mark.long
def test_a_classifier_that_was_stopped_ends_as_one_that_was_not(tmp_path, monkeypatch, capsys):
    whole = train_classifier(tmp_path / "whole", monkeypatch)
    assert whole["step"]["scaler"]["loss_scale"] > 1 and len(whole["step"]["ema"]["averages"]) == 18
    assert number(capsys.readouterr().out.splitlines()[-1], "accuracy") > 90
    train_classifier(tmp_path / "stopped", monkeypatch, stop_after=1)
    resumed = train_classifier(tmp_path / "stopped", monkeypatch)
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()] == [f"epoch {n}" for n in range(1, 4)]
    torch.testing.assert_close(resumed["step"], whole["step"], rtol=0, atol=0)
    assert resumed["schedule"] == whole["schedule"]


@pytest.mark.long
def test_the_classifier_learns_on_two_ranks(tmp_path):
    printed = run_on_two_ranks("step_image_classifier.py", tmp_path)
    assert len(printed) == 3 and number(printed[-1], "accuracy") > 90
    assert torch.load(tmp_path / "step_image_classifier.pt")["step"]["num_ranks"] == 2
    assert run_on_two_ranks("step_image_classifier.py", tmp_path) == []  # it is done


@pytest.mark.long
def test_bert_learns_the_rule(capsys):
    pytest.importorskip("transformers")
    defined, printed = run_here("step_bert_finetune.py", capsys)
    losses = [number(line, "loss") for line in printed]
    assert losses[-1] < 0.5 * losses[0] and number(printed[-1], "test accuracy") > 85
    step = defined["step"]
    assert len(step.report.graphs) == 2 and {state["step"].item() for state in step.optimizer.state.values()} == {96}
    no_decay = {id(p) for p in step.optimizer.param_groups[1]["params"]}
    assert all((id(p) in no_decay) == (name.endswith("bias") or "LayerNorm" in name) for name, p in step.model.named_parameters())


@pytest.mark.long
def test_each_step_of_the_gan_trains_its_own_half(capsys):
    defined, printed = run_here("step_gan.py", capsys)
    differences = [number(line, "differ by") for line in printed]
    assert differences[-1] < 0.6 * differences[0] and differences[-1] < 0.08
    gan, noise = defined["gan"].train(), torch.randn(64, 32, 1, 1)
    for step, batch, trained in ((defined["discriminator_step"], (defined["real"], noise), "discriminator"),
                                 (defined["generator_step"], (noise,), "generator")):
        before = copy.deepcopy(gan)
        gan.discriminator.requires_grad_(trained == "discriminator")
        step(*batch)
        pairs = zip(gan.named_parameters(), before.parameters())
        changed = {name.split(".")[0] for (name, p), q in pairs if not torch.equal(p, q)}
        assert changed == {trained} and len(step.report.graphs) == 1


@pytest.mark.long
def test_grpo_raises_the_reward_and_leaves_the_reference(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    defined, printed = run_here("step_grpo.py", capsys)
    step, old_policy = defined["step"], defined["old_policy"]
    assert number(printed[-1], "reward") > 0.9 and len(step.report.graphs) == 2 and len(old_policy.report.graphs) == 1
    assert 3.8 < number(printed[-1], "length") < 4.2  # it has learned where to end
    assert {state["step"].item() for state in step.optimizer.state.values()} == {80} and defined["schedule"].last_epoch == 80
    torch.manual_seed(0)
    torch.testing.assert_close(defined["reference"].state_dict(), defined["Policy"]().state_dict(), rtol=0, atol=0)
    ids, mask = defined["sample"](old_policy, torch.randint(1, 8, (64, 3)))
    with torch.no_grad():
        old = defined["log_probs"](old_policy, ids)
    assert not mask.all() and step(ids, mask, old, torch.randn(64, 1))[1]["ratio"] == 1


@pytest.mark.long
def test_grpo_that_was_stopped_ends_as_one_that_was_not(tmp_path, monkeypatch):
    train_policy = functools.partial(train, program=EXAMPLES / "step_grpo.py", checkpoint="step_grpo.pt")
    whole = train_policy(tmp_path / "whole", monkeypatch)
    train_policy(tmp_path / "stopped", monkeypatch, stop_after=10)
    resumed = train_policy(tmp_path / "stopped", monkeypatch)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("script, measured, bound", [
    ("step_bert_finetune.py", "test accuracy", lambda last: last > 85), ("step_gan.py", "differ by", lambda last: last < 0.09),
    ("step_grpo.py", "reward", lambda last: last > 0.8),
])  # fmt: skip
def test_the_others_learn_on_two_ranks(script, measured, bound, tmp_path):
    assert bound(number(run_on_two_ranks(script, tmp_path)[-1], measured))
