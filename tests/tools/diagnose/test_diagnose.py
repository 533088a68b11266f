"""`python -m apexfx diagnose` names what a script loses, with its line, and nothing that it does not."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from apexfx.__main__ import main
from apexfx.tools.diagnose import places
from apexfx.tools.diagnose.command import diagnose
from apexfx.tools.diagnose.detectors import _measured
from apexfx.tools.diagnose.experiments import merged
from apexfx.tools.diagnose.findings import Saving, saving
from apexfx.tools.diagnose.observer import Observer
from apexfx.tools.diagnose.places import Place
from tests.tables import table

# What a case adds to this at the places in capital letters; its finding is at the line that ends in "#!".
SCRIPT = """
import argparse, copy, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
CONFIG
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())))
run = model
MODEL
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
OPTIMIZER
for step in range(STEPS):
    inputs = torch.randn(4, 8)
    DATA
    loss = run(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    AFTER
"""
EMA = """with torch.no_grad():
        for average, parameter in zip(averages, model.parameters()): #!
            average.mul_(0.99).add_(parameter, alpha=0.01)"""
LOADER = """batches = iter(DataLoader(Slow()))
class Slow(torch.utils.data.Dataset):"""

CASES = {
    "reads": ("host_sync", {"AFTER": "total = loss.item() #!\n    total = float(loss.detach()) #!\n    print(f'{loss:.3f}') #!\n"
                                     "    total = loss.detach().cpu().numpy() #!\n    total = loss.detach().tolist() #!\n"
                                     "    if loss > 1e9: break #!"}),
    "groups": ("optimizer_groups", {
        "OPTIMIZER": "optimizer = torch.optim.AdamW([{'params': [p]} for p in model.parameters()], fused=True) #!"}),
    "for loop": ("unfused_update", {"OPTIMIZER": "optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=False) #!"}),
    "average": ("ema_loop", {"OPTIMIZER": "averages = [p.detach().clone() for p in model.parameters()]", "AFTER": EMA}),
    "average of a dictionary": ("ema_loop", {
        "OPTIMIZER": "average = copy.deepcopy(model).state_dict()",
        "AFTER": "for k, v in model.state_dict().items(): average[k] = 0.9 * average[k] + 0.1 * v.detach() #!"}),
    "no averages": ("parameter_loop", {
        "AFTER": "for p in model.parameters(): p.data.mul_(0.999) #!\n"
                 "    norms = [p.grad.norm() for p in model.parameters()] #!\n"
                 "    optimizer.zero_grad(); run(inputs).sum().backward()\n"
                 "    norms = [p.grad.norm() for p in model.parameters()] #!"}),
    "not entered": ("compile_not_entered", {"MODEL": "compiled = torch.compile(model, backend='eager') #!"}),
    "item breaks": ("graph_break", {
        "MODEL": "def scaled(x): return model(x / (1 + x.abs().max().item())) #!\nrun = torch.compile(scaled, backend='eager')"}),
    "print breaks": ("graph_break", {
        "MODEL": "def printed(x): print(); return model(x) #!\nrun = torch.compile(printed, backend='eager')"}),
    "recompiles": ("recompiles", {
        "MODEL": "def scaled(x, k): return model(x) * k #!\ncompiled = torch.compile(scaled, backend='eager', dynamic=False)\n"
                 "def run(x): return compiled(x, step)"}),
    "means of means": ("unequal_means", {
        "DATA": "optimizer.zero_grad = lambda: None\n    for size in (2, 4):\n"
                "        targets = torch.arange(4); targets[size:] = -100\n"
                "        (nn.functional.cross_entropy(run(inputs), targets) / 2).backward() #!",
        "AFTER": "for p in model.parameters(): p.grad = None"}),
    "data": ("data_loading", {
        "CONFIG": "class Slow(torch.utils.data.Dataset):\n    def __len__(self): return 1000\n"
                  "    def __getitem__(self, i): time.sleep(0.003); return torch.randn(8)\nbatches = iter(DataLoader(Slow()))",
        "DATA": "inputs = next(batches) #!"}),
}  # fmt: skip

CLEAN = {
    "a GradScaler": {"OPTIMIZER": "scaler = torch.amp.GradScaler('cpu')",
                     "AFTER": "scaler.scale(run(inputs).sum()).backward(); scaler.step(optimizer); scaler.update()"},
    "logs, data, foreach, clips, zeros, one gradient": {
        "OPTIMIZER": "averages = [p.detach().clone() for p in model.parameters()]",
        "DATA": "labels = torch.arange(4); first = labels[0].item(); all_ = labels.tolist()",
        "AFTER": "if step % 5 == 0: print(loss.item())\n"
                 "    torch._foreach_lerp_(averages, list(model.parameters()), 0.01)\n"
                 "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
                 "    optimizer.zero_grad(set_to_none=False); run(inputs).sum().backward(); norm = model[0].weight.grad.norm()"},
    "autocast, evaluation": {"MODEL": "run = lambda x: torch.autocast('cpu', torch.bfloat16)(model)(x)",
                             "AFTER": "if step % 10 == 9:\n        with torch.no_grad(): run(inputs).sum().item()"},
    "compiled": {"MODEL": "run = torch.compile(model, backend='eager')"},
    "compiled in place": {"MODEL": "model.compile(backend='eager')"},
    "groups that differ": {"OPTIMIZER": "optimizer = torch.optim.AdamW([{'params': [p], 'lr': 0.001 * (1 + i)}\n"
                                        "    for i, p in enumerate(model.parameters())], fused=True)"},
    "torch's default": {"OPTIMIZER": "optimizer = torch.optim.AdamW(model.parameters())"},
    "means over equal counts, sums, two heads, an evaluation": {
        "CONFIG": "cross_entropy, targets = nn.functional.cross_entropy, [torch.arange(4), torch.tensor([0, 1, -100, -100])]",
        "DATA": "optimizer.zero_grad = lambda: None\n    (cross_entropy(run(inputs), targets[0]) / 2).backward()\n"
                "    for each in targets: (cross_entropy(run(inputs), each, reduction='sum') / 6).backward()\n"
                "    sum(cross_entropy(run(inputs), each) for each in targets).backward()\n"
                "    for each in targets:\n        with torch.no_grad(): cross_entropy(run(inputs), each)\n"
                "    for _ in range(2): (cross_entropy(run(inputs), targets[0]) / 2).backward()",
        "AFTER": "model.zero_grad()"},
    "layers that share a line": {"MODEL": "def run(x):\n    for layer in model:\n"
                                          "        x = layer(x) * (layer.weight[0] if hasattr(layer, 'weight') else 1)\n"
                                          "    return x"},
}  # fmt: skip


def script(folder: Path, parts: dict[str, str], steps: int = 40) -> tuple[Path, list[int]]:
    """Write a script; return it, and the numbers of its lines that end in "#!"."""
    text = SCRIPT.replace("STEPS", str(steps))
    for name in ("CONFIG", "MODEL", "OPTIMIZER", "DATA", "AFTER"):
        text = text.replace(name, parts.get(name, "pass"))
    path = folder / "train.py"
    path.write_text(text)
    return path, [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("#!")]


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@table(6, "case", CASES)
def test_it_names_the_line(case, tmp_path, capsys):
    kind, parts = CASES[case]
    path, lines = script(tmp_path, parts)
    result = diagnose(str(path), [], num_steps=4)
    found = sorted((each.kind, each.place) for each in result.findings)
    assert found == [(kind, Place(str(path), line)) for line in lines], result


@pytest.mark.long
@pytest.mark.parametrize("case", CLEAN)
def test_it_invents_nothing(case, tmp_path, capsys):
    path, _ = script(tmp_path, CLEAN[case])
    result = diagnose(str(path), [], num_steps=4)
    # Of torch's default update fused=True may be measured to be faster.
    assert not [each for each in result.findings if each.kind != "unfused_update" or not each.saving_ms], result


def test_the_script_runs_as_it_would_alone(tmp_path, capsys, monkeypatch):
    show = "if step == 39: print(sys.argv, __name__, [p.double().sum().item() for p in model.parameters()])"
    path, _ = script(tmp_path, {"AFTER": show})
    diagnose(str(path), ["--lr", "3"], num_steps=0)
    printed = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [str(path), "--lr", "3"])
    runpy.run_path(str(path), run_name="__main__")
    assert printed == capsys.readouterr().out and "'--lr', '3'] __main__" in printed


def test_what_it_patches_is_as_before(tmp_path, capsys):
    before = torch.compile, torch.Tensor.cpu, torch.optim.Optimizer.__init__, list(sys.argv), list(sys.path)
    diagnose(str(script(tmp_path, {})[0]), [], num_steps=2)
    assert before == (torch.compile, torch.Tensor.cpu, torch.optim.Optimizer.__init__, sys.argv, sys.path)
    assert sys.gettrace() is None or "pytest" in repr(sys.gettrace())


def test_one_group_a_setting_trains_as_many():
    def train(change):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1 / (1 + i % 2)} for i, p in enumerate(model.parameters())])
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            groups = optimizer.param_groups
            optimizer.param_groups = merged(groups) if change else groups
            optimizer.step()
            optimizer.param_groups = groups
        return len(merged(groups)), [p.detach() for p in model.parameters()]

    (count, changed), (_, plain) = train(True), train(False)
    assert count == 2 and all(torch.equal(a, b) for a, b in zip(changed, plain))


def test_it_stops_behind_the_steps_asked_for_and_reports_data(tmp_path, capsys):
    path, [line] = script(tmp_path, {"AFTER": "total = loss.item() #!"}, steps=10**6)
    assert main(["diagnose", "--steps", "4", "--json", str(path)]) == 1
    data = json.loads(capsys.readouterr().out)
    [finding] = data["findings"]
    assert (finding["kind"], finding["line"], finding["saving_ms"]) == ("host_sync", line, None)
    assert data["num_steps"] < 40 and data["ms_per_step"] > 0


@pytest.mark.parametrize("text, said", [
    (None, "is not there"), ("x = 1", "called step() of no torch.optim.Optimizer"),
    ("import torch, apexfx; net = torch.nn.Linear(2, 1)\n"
     "step = apexfx.train_step(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1), inner='eager', opt_level='O0')\n"
     "step(torch.ones(2, 2), torch.ones(2, 1))", "is one graph, which step.report describes"),
    ("raise ValueError('mine')", "failed after 0 steps"),
])  # fmt: skip
def test_what_cannot_be_diagnosed_is_said(text, said, tmp_path, capsys):
    path = tmp_path / "train.py"
    if text is not None:
        path.write_text(text)
    assert main(["diagnose", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_short_script_is_counted(tmp_path, capsys):
    result = diagnose(str(script(tmp_path, {"AFTER": "total = loss.item()"}, steps=9)[0]), [])
    assert [each.kind for each in result.findings] == ["host_sync"] and "ended after 9 steps" in result.notes[0]


def test_optimizers_of_a_gan_step_together(tmp_path, capsys):
    other = "second = nn.Linear(8, 8); other = torch.optim.SGD(second.parameters(), 0.1, fused=True)"
    path, _ = script(tmp_path, {"OPTIMIZER": other, "AFTER": "other.step()"})
    result = diagnose(str(path), [], num_steps=4)
    assert not result.findings and result.num_steps < 40


def test_a_saving_is_no_more_than_chance_where_steps_scatter():
    assert saving([1.0, 1.1, 0.9, 1.0], [2.0, 2.1, 1.9, 2.0]).is_clear
    assert not saving([1.0, 9.0, 4.0, 2.0], [2.0, 1.0, 8.0, 3.0]).is_clear


def test_what_may_be_chance_is_not_predicted():
    predicted, how = _measured(Saving(12.33, 11.12, 16))
    assert predicted is None and "not predicted" in how and "12.33 +-11.12 ms" in how
    assert _measured(Saving(1.5, 0.1, 16))[0] == 1.5


def test_the_loop_around_a_line_is_no_training_loop(tmp_path):
    path = tmp_path / "loops.py"
    path.write_text("for x in data:\n    loss.backward()\n    update(x)\n    for p in ps:\n        p.mul_(2)\n")
    assert places.loop_around(Place(str(path), 5)) == (4, 5)
    assert places.loop_around(Place(str(path), 3)) == (3, 3)


RANKS = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 32))
model = DistributedDataParallel(model, bucket_cap_mb=0.003)
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
extra = nn.Linear(32, 32)
other = torch.optim.SGD(extra.parameters(), 0.01, fused=True)
for _ in range(200):
    loss = extra(model(torch.randn(8, 32))).square().mean()
    optimizer.zero_grad()
    other.zero_grad()
    loss.backward()
    optimizer.step()
    other.step()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_what_ranks_lose(tmp_path):
    path = tmp_path / "ranks.py"
    path.write_text(RANKS)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "apexfx",
                           "diagnose", "--steps", "8", "--json", str(path)], capture_output=True, text=True, timeout=240)
    data = json.loads(done.stdout)
    lines = {each["kind"]: each["line"] for each in data["findings"]}
    assert lines == {"buffer_broadcast": 8, "batch_norm_not_synchronized": 8, "gradients_not_averaged": 19}
    assert data["num_ranks"] == 2


def test_what_lies_where_a_gradient_was_is_no_gradient():
    parameter = torch.nn.Parameter(torch.ones(64))
    observer = Observer([parameter])
    for _ in range(20):
        parameter.grad = torch.ones(64)
        parameter.grad = None
        other = torch.ones(64)
        with observer:
            other * 2
    assert not observer.loops
