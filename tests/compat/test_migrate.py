"""`python -m apexfx migrate` finds what changes and nothing else, and the scripts of docs/migrate.md train before and after."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import apexfx.compat
from apexfx.__main__ import main
from apexfx.compat.migrate import changes

SCRIPTS = Path(__file__).parents[2] / "examples" / "migrate"
PAIRS = ("apex_amp", "apex_ddp", "torch_amp", "torch_ddp")


def instead_by_line(source):
    rows = {}
    for row in changes("script.py", source):
        rows.setdefault(row.line, []).append(row.instead)
    return rows


def script_changes(name):
    path = SCRIPTS / f"{name}.py"
    return changes(str(path), path.read_text())


@pytest.mark.parametrize("name", PAIRS)
def test_the_line_that_makes_the_step_is_the_one_that_was_written(name):
    lines = [row.instead.removeprefix("keep it, and below:").strip() for row in script_changes(f"{name}_before")]
    [suggested] = [ast.parse(line) for line in lines if "step = apexfx" in line]
    after = ast.parse((SCRIPTS / f"{name}_after.py").read_text())
    written = [node for node in after.body if isinstance(node, ast.FunctionDef) or ast.unparse(node).startswith("step = ")]
    written[-1].value.keywords = [word for word in written[-1].value.keywords if word.arg != "inner"]
    assert ast.unparse(suggested) == "\n".join(map(ast.unparse, written)).strip()
    [loss] = [line for line in lines if line.startswith("loss") and "= step(" in line]
    assert loss in {ast.unparse(node) for node in ast.walk(after) if isinstance(node, ast.Assign)}


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_is_left_to_change_afterwards(name):
    assert script_changes(f"{name}_after") == []


@pytest.mark.parametrize("name", PAIRS)
def test_every_other_line_of_the_script_stays(name):
    before, after = ((SCRIPTS / f"{name}_{when}.py").read_text() for when in ("before", "after"))
    stays = {line.strip() for line in after.splitlines()}
    listed = {row.line for row in script_changes(f"{name}_before")}
    others = [line.strip() for place, line in enumerate(before.splitlines(), 1) if place > 1 and place not in listed]
    only_around = ("if last:", "last = ", "if torch.cuda", "import contextlib", "for place, batch")  # accumulation; SyncBatchNorm
    assert [line for line in others if line not in stays and not line.startswith(only_around)] == []


IMPORTS = """
import torch, torch.nn as nn, torch.optim as optim
from apex import amp
import apex
from torch.nn.parallel import DistributedDataParallel as DDP
"""


@pytest.mark.parametrize("code, instead", [
    ("apex.amp.initialize(net, opt, opt_level=level)",
     "apexfx.train_step(net, optimizer=opt, objective=objective, opt_level=level)"),
    ("amp.initialize(net, opt, min_loss_scale=1)", "# without min_loss_scale"),
    ("amp.load_state_dict(saved['amp'])", "step.load_state_dict(...)"),
    ("self.net = DDP(self.net)", "delete: ddp=True"),
    ("net = DDP(net, device_ids=[0])", "delete: ddp=True"),
    ("ddp_net = DDP(net)", "ddp_net = net  # ddp=True in train_step"),
    ("self.model = DDP(model)", "self.model = model  # ddp=True"),
    ("net: nn.Module = DDP(Net())", "net: nn.Module = Net()  # ddp=True"),
    ("net = DDP(net.to(rank), device_ids=[rank])", "net = net.to(rank)  # ddp=True"),
    ("ddp_net = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net))", "ddp_net = net  # sync_bn=True"),
    ("def wrap(net): return DDP(net)", "return net  # ddp=True"),
    ("compiled = torch.compile(net)", "compiled = net  # a step is compiled as a whole"),
    ("DDP(net)", "delete: ddp=True"),
    ("net = DDP(net, bucket_cap_mb=10)", 'delete: ddp=apexfx.BucketConfig(layout="ddp", bucket_cap_mb=10) in train_step'),
    ("net = DDP(net, bucket_cap_mb=10)\nopt = optim.SGD(net.parameters())\nloss.backward()",
     'ddp=apexfx.BucketConfig(layout="ddp", bucket_cap_mb=10))'),
    ("net = DDP(net, bucket_cap_mb=None)", "delete: ddp=True"),
    ("opt = optim.SGD(net.parameters())\nloss = f(net(x), y) / n\nloss.backward()\ntorch.save(net.state_dict(), 'x')",
     "call step.flush() on every rank before saving, where the batches of an epoch are no multiple of accumulate=n"),
    ("net = DDP(net)\nevaluate(net.module)", "net.module -> net"),
    ("self.net = DDP(net)\ntorch.save(self.net.module.state_dict(), 'x')", "self.net.module -> self.net"),
    ("def save(net): torch.save(net.module.state_dict(), 'x')\nnet = DDP(net)", "net.module -> net"),
    ("net = DDP(net)\nopt = optim.SGD(net.module.parameters())\nloss.backward()", "net.module -> net"),
    ("nn.SyncBatchNorm.convert_sync_batchnorm(net)", "delete: sync_bn=True"),
    ("s = torch.cuda.amp.GradScaler(); s.update()", "delete: the step does it"),
    ("nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=1)", "no counterpart: a step clips the 2-norm, not norm_type=1"),
    ("norm = nn.utils.clip_grad_norm_(amp.master_params(opt), 1.0)", "norm = step.grad_norm, below the step, with max_grad_norm"),
    ("nn.utils.clip_grad_value_(net.parameters(), 1.0)", "no counterpart in a step"),
    ("net = torch.compile(net)", "delete: a step is compiled as a whole"),
    ("net = nn.DataParallel(net)", "delete: start one process a device"),
    ("from torch.distributed.fsdp import fully_shard; fully_shard(net)", "refused: parameters have to be whole"),
    ("from apex.transformer import parallel_state", "not provided: use torch.distributed.tensor.parallel"),
    ("from apex.contrib.clip_grad import clip_grad_norm_ as clip", "delete: clip_grad_norm_"),
    ("import apex.normalization as norms", "import apexfx.normalization as norms"),
    ("from apex.parallel import LARC", "from apexfx.parallel import LARC"),
    ("net = DDP(net, device_ids=[0], process_group=group, find_unused_parameters=True)",
     "delete: ddp=True in train_step, without find_unused_parameters: it is not needed where"),
    ("opt = optim.SGD(net.parameters())\nnet = DDP(net, process_group=group)\nloss.backward()", "ddp=True, process_group=group)"),
    ("net = apex.parallel.DistributedDataParallel(net, 100, True, gradient_average=False, num_allreduce_streams=2, prof=False)",
     "delete: ddp=apexfx.BucketConfig(message_size=100, delay_allreduce=True, gradient_average=False) in train_step, "
     "without num_allreduce_streams"),
    ("with torch.cuda.amp.autocast(): pass", "delete: opt_level=\"O1\""),
    ("context = torch.autocast('cuda')\nopt = optim.SGD(net.parameters())\nwith context: loss = f(net(x), y)\nloss.backward()",
     "step = apexfx.train_step(net, f, opt, opt_level=\"O1\")"),
    ("context = torch.autocast('cuda')\nwith context: loss = f(net(x), y)", "delete: opt_level=\"O1\""),
    ("try:\n    pass\nexcept Exception:\n    loss.backward()", "delete: the step does it"),
    ("@torch.compile\ndef f(): pass", ""),
    ("optimizer = optim.AdamW(net.parameters())\nwith torch.autocast('cuda', enabled=on): loss = f(net(x), y)\nloss.backward()",
     "step = apexfx.train_step(net, f, optimizer, opt_level=\"O1\" if on else \"O0\")"),
    ("opt = optim.SGD(net.parameters())\nnet = DDP(net)\nout = net(a, b)\nloss = crit(out, y) / n\nloss.backward()",
     "loss = step((a, b), y)"),
    ("opt = optim.SGD(net.parameters())\nloss = f(net(x), y)\nloss /= steps\nloss.backward()", "accumulate=steps"),
    ("opt = optim.SGD(net.parameters())\nloss = f(net(x), y)\nloss /= steps\nloss.backward()",
     "delete: accumulate=steps averages so many calls"),
    ("net = DDP(net)\nloss = f(net(x), y, label_smoothing=0.1) / n\nloss.backward()",
     "loss = step(*batch), with this in objective("),
    ("opt = optim.SGD(net.parameters())\nwith torch.autocast('cuda'): loss = f(net(x), y)\nloss.backward()\n"
     "def test():\n    with torch.autocast('cuda', dtype=torch.bfloat16): net(x)",
     "step = apexfx.train_step(net, f, opt, opt_level=\"O1\")"),
    ("net = DDP(net)\nf(net(x), y).backward()", "step(x, y)"),
    ("net = DDP(net)\nloss = f(net(x), y)\naccelerator.backward(loss)", "loss = step(x, y)"),
    ("net = DDP(net)\nloss = f(net(x), y)\nloss.backward()\nout = net(a)\nloss = f(out, b)", "loss = step(x, y)"),
    # What is read of the forward is returned beside the loss.
    ("net = DDP(net)\nout = net(x, y)\nloss = f(out, y)\nloss.backward()\nprint(out)", "loss, out = step(x, y, y)"),
    ("opt = optim.SGD(net.parameters())\nout = net(x.to(d), z[i])\nloss = f(out, y)\nloss.backward()\nprint(out)",
     "def objective(model, x, z, y):\n    out = model(x, z)\n    return f(out, y), out\nstep = apexfx.train_step(net, "),
    ("opt = optim.SGD(net.parameters())\nout = net(x[0])\nloss = f(out, x[1])\nloss.backward()\nprint(out)",
     "def objective(model, inputs, targets):\n    out = model(inputs)\n    return f(out, targets), out\n"),
    ("net = DDP(net)\nif on:\n    out = net(x)\n    loss = f(out, y)\n    loss.backward()\n"
     "else:\n    out = net(x)\n    loss = f(out, y)\n    loss.backward()\nprint(out)", "loss, out = step(x, y)"),
    ("net = DDP(net)\nout = net(x)\nprint(out)\nloss = f(out, y)\nloss.backward()", "keep it, below the step: it reads out"),
    ("net = DDP(net)\nout, loss = net(x, y)\nloss.backward()\nprint(out)",
     "loss, out = step(*batch), with this in objective(model, *batch), a function that returns (loss, out)"),
    ("net = DDP(net)\nfor x in data:\n    h = h.detach()\n    out, h = net(x, h)\n    loss = f(out, y)\n    loss.backward()",
     "loss, h = step(*batch)"),
    ("net = DDP(net)\ndef train(self):\n    self.out = net(x)\n    loss = f(self.out, y)\n    loss.backward()\n"
     "def log(self): print(self.out)", "loss, self.out = step(x, y)"),
    # Several losses, several models.
    ("opt = optim.SGD(net.parameters())\na = f(net(x), y)\na.backward()\nb = g(net(x), y)\nb.backward()\nopt.step()",
     "total, (a, b) = step(*batch), with all that computes a, b in objective(model, *batch), a function that returns (a + b, "),
    ("opt = optim.SGD(list(a.parameters()) + list(b.parameters()))\nloss = f(b(a(x)), y)\nloss.backward()",
     "step = apexfx.train_step(torch.nn.ModuleList([a, b]), optimizer=opt, objective=objective"),
    ("opt = optim.SGD([*net.body.parameters(), *net.head.parameters()])\nloss = f(net(x), y)\nloss.backward()",
     "step = apexfx.train_step(net, f, opt"),
    ("a = optim.SGD(net.body.parameters())\nb = optim.Adam(net.head.parameters())\nloss = f(net(x), y)\nloss.backward()",
     "step = apexfx.train_step(net, f, [a, b], opt_level="),
    # What a step would compute otherwise, were it called with the inputs and the targets alone.
    ("net = DDP(net)\nloss = f(net(x), y, label_smoothing=0.1)\nloss.backward()", "with this in objective(model, *batch)"),
    ("net = DDP(net)\nloss = f(net(x, mask=m), y)\nloss.backward()", "with this in objective(model, *batch)"),
    ("net = DDP(net)\nloss = f(net(*xs), y)\nloss.backward()", "with this in objective(model, *batch)"),
    ("net = DDP(net)\nout = net(x)\nloss = f(out, y) + g(out)\nloss.backward()", "with this in objective(model, *batch)"),
    ("opt = optim.SGD(net.parameters())\nloss = f(net(x), y)\nloss = loss + aux\nloss.backward()",
     "train_step(net, optimizer=opt, objective=objective"),
    # A number of its elements is none of batches.
    *((f"net = DDP(net)\nloss = f(net(x), y){code}", "step(*batch), with this in objective(model, *batch)")
      for code in (" / y.numel()\nloss.backward()", "\nloss = loss / y.numel()\nloss.backward()",
                   "\nloss /= y.numel()\nloss.backward()", "\n(loss / y.numel()).backward()",
                   "\nscaler.scale(loss / y.numel()).backward()")),
    ("opt = optim.SGD(net.parameters())\n(f(net(x), y) + aux).backward()", "train_step(net, optimizer=opt, objective=objective"),
])  # fmt: skip
def test_what_changes(code, instead):
    rows = instead_by_line(IMPORTS + code)
    own = [text for line, texts in rows.items() if line > IMPORTS.count("\n") for text in texts]
    assert any(instead in text for text in own) if instead else not own


@pytest.mark.parametrize("code", [
    "import torch\nmodel = torch.nn.Linear(2, 2)\nmodel(torch.ones(1, 2))",
    "from .apex import amp\nmodel = amp.initialize(model)",  # a module of the script's own
    "def autocast(): ...\nwith autocast(): pass\nclass GradScaler: ...\ns = GradScaler()\ns.update()",
    "import gym\nenv = gym.make('x')\nenv.step(1)\nschedule.step()\nqueue.update()",
    "import torch\nopt = torch.optim.SGD(model.parameters())\nfoo(opt)",  # the loop is elsewhere
    "import torch\nself.module = torch.nn.Linear(2, 2)\nnet = Wrapped(self.module)\nnet.module(1)",  # no wrapper of torch's
    "import torch, apexfx\nmodel = apexfx.transform(model)\nopt = torch.optim.SGD(model.parameters())\n"
    "scaler = torch.amp.GradScaler()\nloss = f(model(x), y)\n"
    "scaler.scale(loss).backward()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1)\nopt.step()",
    "",
])  # fmt: skip
def test_what_stays(code):
    assert changes("script.py", code) == []


@pytest.mark.parametrize("evaluation", ["def validate(net, x, y):", "with torch.no_grad():", "with torch.inference_mode():"])
def test_an_evaluation_is_not_made_a_step(evaluation):
    loop = "out = net(x)\nloss = f(out, y)\n"
    train = "def train():\n    net = DDP(network)\n    " + loop.replace("\n", "\n    ") + "loss.backward()\n"
    rows = instead_by_line(IMPORTS + train + f"{evaluation}\n    " + loop.replace("\n", "\n    ") + "print(loss)\n")
    last = IMPORTS.count("\n") + train.count("\n")
    assert any("loss = step(x, y)" in texts for texts in rows.values()) and max(rows) <= last


TRAINING = """opt = optim.SGD(net.parameters())
with autocast('cuda', torch.float16): loss = f(net(x), y)
loss.backward()
"""


@pytest.mark.parametrize("training, evaluation", [
    (TRAINING, "with torch.no_grad(), autocast('cuda', torch.bfloat16): net(x)"),
    (TRAINING, "with autocast('cuda', torch.bfloat16):\n    with torch.no_grad(): net(x)"),
    (TRAINING, "with autocast('cuda', torch.bfloat16): validate(net)"),
    (TRAINING, "@torch.no_grad()\ndef score():\n    with autocast('cuda', torch.bfloat16): net(x)"),
    (TRAINING, "context = autocast('cuda', torch.bfloat16)\nwith torch.no_grad():\n    with context: net(x)"),
    # Where no block computes a loss.
    ("def training_step():\n    with autocast('cuda', torch.float16): return net(x)\nopt = optim.SGD(net.parameters())\n"
     "loss.backward()\n", "def evaluate():\n    with autocast('cuda', torch.bfloat16): return net(x)"),
])  # fmt: skip
def test_an_evaluation_stays_under_autocast(training, evaluation):
    imports = IMPORTS + "from torch.amp import GradScaler, autocast\n"
    rows = instead_by_line(imports + training + evaluation)
    assert rows[imports.count("\n")] == ["delete: GradScaler"]
    assert max(rows) <= imports.count("\n") + training.count("\n")
    assert any("dtype=torch.float16)" in text for texts in rows.values() for text in texts if "step = " in text)


def test_two_networks_that_train_each_other_are_left_to_the_user():
    loop = ("for x in data:\n    a = f(d(x), y)\n    a.backward()\n    d_opt.step()\n"
            "    b = f(d(g(z)), y)\n    b.backward()\n    g_opt.step()")
    rows = instead_by_line(IMPORTS + "d_opt = optim.Adam(d.parameters())\ng_opt = optim.Adam(g.parameters())\n" + loop)
    said = [text for texts in rows.values() for text in texts]
    for name in ("d_opt", "g_opt"):
        assert any(f"{name}_step = apexfx.train_step(torch.nn.ModuleList([d, g]), optimizer={name}, objective={name}_objective"
                   in text for text in said)
    assert not any("= step(" in text for text in said)
    assert sum("left to you: into the objective" in text for text in said) == 2


@pytest.mark.parametrize("imports", ["import os, torch, torch.nn as nn", "import torch.nn as nn", "from torch.cuda import amp"])
def test_a_step_needs_the_import_of_apexfx(imports):
    rows = instead_by_line(f"{imports}\nfrom torch import optim\nopt = optim.SGD(net.parameters())\nloss.backward()")
    assert sum("import apexfx" in text for texts in rows.values() for text in texts) == 1


def test_the_programs_of_this_project_need_no_change():
    for path in (SCRIPTS.parent / "train.py", *SCRIPTS.parent.glob("step_*.py")):
        assert changes(str(path), path.read_text()) == []


def test_the_command_line(capsys, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.py").write_text("from apex import amp\n")
    (tmp_path / "a" / "old.py").write_text("print 'python 2'\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "apex.py").write_text("from apex import amp\n")
    assert main(["migrate", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/a/train.py:1: from apex import amp\n    -> import apexfx\n1 change\n"
    assert "old.py is not read as Python" in said.err
    assert main(["migrate", "--json", str(tmp_path / "a" / "train.py")]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row == {"path": f"{tmp_path}/a/train.py", "line": 1, "code": "from apex import amp", "instead": "import apexfx"}
    assert main(["migrate", str(tmp_path / "none.py")]) == 2
    assert "none.py is not there" in capsys.readouterr().err


@pytest.fixture
def accuracy_of(monkeypatch, tmp_path, capsys):
    """Run a script of a pair in this process, as the only rank; return its test accuracy in percent."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)

    def run(name):
        assert main(["compat", str(SCRIPTS / f"{name}.py")]) == 0
        return float(capsys.readouterr().out.split()[-2])

    yield run
    apexfx.compat.uninstall()


@pytest.mark.parametrize("name", PAIRS)
def test_it_trains_before_and_after(name, accuracy_of):
    before, after = (accuracy_of(f"{name}_{when}") for when in ("before", "after"))
    assert before > 85 and after > 85 and abs(before - after) < 3


@pytest.mark.long
@pytest.mark.parametrize("name", [f"{pair}_{when}" for pair in ("apex_ddp", "torch_ddp") for when in ("before", "after")])
def test_it_trains_on_two_ranks(name, tmp_path):
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "apexfx.compat"]
    done = subprocess.run([sys.executable, "-m", *command, str(SCRIPTS / f"{name}.py")], cwd=tmp_path, capture_output=True,
                          text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-2]) > 85


def test_statements_of_one_line_change_one_by_one_and_names_of_a_star_import_are_the_usual_ones():
    rows = changes("x.py", """import torch
from common import *
m = Net(); o = torch.optim.SGD(m.parameters(), 0.1)
for x, y in data:
    loss = F.mse_loss(m(x), y)
    loss.backward(); nn.utils.clip_grad_norm_(m.parameters(), 2.0); o.step(); schedule.step()
""")
    last = [(row.code, row.instead) for row in rows if row.line == 6]
    assert last == [("loss.backward()", "delete: the step does it"),
                    ("nn.utils.clip_grad_norm_(m.parameters(), 2.0)", "delete: give max_grad_norm= to train_step"),
                    ("o.step()", "delete: the step does it")]
    assert any("max_grad_norm=2.0" in row.instead for row in rows)


def test_a_scaler_that_is_an_argument_is_one_in_the_function_and_its_call_stays():
    rows = changes("x.py", """import torch
def train(model, optimizer, scaler):
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
train(model, optimizer, torch.amp.GradScaler("cpu"))
""")
    assert [row.line for row in rows if row.instead == "delete: the step does it"] == [3, 4, 5]
    assert rows[-1].line == 6 and rows[-1].instead.startswith("without the argument torch.amp.GradScaler('cpu'): ")


def test_what_a_script_does_under_a_condition_the_step_does_under_it():
    rows = changes("x.py", """import torch
from torch import nn
if args.distributed:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler() if args.amp else None
with torch.autocast("cuda", enabled=scaler is not None, dtype=torch.float16):
    loss = nn.functional.mse_loss(model(x), y)
loss.backward()
optimizer.step()
""")
    [made] = [row.instead for row in rows if "apexfx.train_step(" in row.instead]
    assert 'opt_level="O1" if args.amp else "O0", dtype=torch.float16 if args.amp else None' in made
    assert "ddp=bool(args.distributed)" in made
