"""Bundles: what a skipped step leaves for another process, which computes the same bits, and what happens where that fails."""

from __future__ import annotations

import json
import logging
import math
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.__main__ import main
from apexfx.observe import bundle
from apexfx.observe.replay import replay


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.body(x[:, None]))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


X, Y = torch.linspace(-1, 1, 180).reshape(5, 6, 6), torch.arange(5) % 3
LEVELS = {"O0": {}, "O1": {"opt_level": "O1", "dtype": torch.bfloat16}, "O2": {"opt_level": "O2", "dtype": torch.float16}}
ONE, INFINITE = torch.tensor(1.0), torch.tensor(math.inf)


def objective(model, x, y, factor):
    return F.cross_entropy(model(x), y) * factor  # the loss


def make(model=Images, **options):
    torch.manual_seed(0)
    model = model()
    return apexfx.train_step(model, objective=objective, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
                             **{"inner": "eager", "opt_level": "O0", "safeguard": True, **options})


def skipped(**options):
    step = make(**options)
    step(X, Y, ONE)
    step(X, Y, INFINITE)
    return step


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "bundle"
    skipped().record(path)
    return path


@pytest.fixture
def copied(recorded, tmp_path):
    (tmp_path / "bundle").mkdir()
    for file in recorded.iterdir():
        (tmp_path / "bundle" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "bundle"


def edit(path, change):
    data = json.loads((path / "bundle.json").read_text())
    change(data)
    (path / "bundle.json").write_text(json.dumps(data))


def node_of(data, **values):
    return next(node for node in data["graph"]["nodes"] if all(node[name] == value for name, value in values.items()))


def test_a_new_process_computes_the_same_bits(tmp_path):
    for model, level in ((Images, "O0"), (Images, "O2"), (Words, "O1")):
        skipped(model=model, **LEVELS[level]).record(tmp_path / f"{model.__name__}-{level}")
    script = ("import sys; from apexfx.observe.replay import replay\n"
              "for path in sys.argv[1:]: text, same = replay(path); print(same, 'the same bits in all of' in text)")
    done = subprocess.run([sys.executable, "-c", script, *sorted(map(str, tmp_path.iterdir()))], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 6, done.stdout + done.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_a_bundle_computes_what_the_step_computed(level, tmp_path):
    """A spike, so that the loss is a number; dropout is on."""
    step = make(safeguard=apexfx.Safeguard(spike_factor=2.0, window=1), **{**LEVELS[level], "loss_scale": 8.0})
    step(X, Y, ONE)
    before = {name: t.clone() for name, t in step.model.state_dict().items()}
    scale = step.loss_scale
    loss, norm = step(X, Y, 100 * ONE), step.grad_norm.clone()
    assert step.events[-1].reason == "spike" and step.loss_scale == scale
    step.record(tmp_path / "bundle")
    read = bundle.load(tmp_path / "bundle")
    module, graph = read.graph()
    inputs = read.inputs()
    names = {node.meta.get("apexfx_name"): x for node, x in zip(graph.find_nodes(op="placeholder"), inputs)}
    assert all(torch.equal(names[name], t) for name, t in before.items())
    with read.random_state(), torch.no_grad():
        outputs = bundle.Interpreter(module, graph=graph).run(*inputs)
    assert torch.equal(outputs[0], loss) and any(torch.equal(x, norm) for x in outputs[1:])


def test_the_command_says_what_was_recorded(recorded, capsys):
    assert main(["replay", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert "event: call 2: not finite" in out and "input 'batch[2]' is not finite (inf), first read by aten.mul" in out
    assert "test_record.py:" in out and "the same bits in all of" in out and f"torch {torch.__version__}" in out
    assert main(["replay", str(recorded), "--until", "addmm"]) == 0
    assert "addmm: aten.addmm.default at test_record.py:" in capsys.readouterr().out
    assert main(["replay", str(recorded), "--to", "float64"]) == 0
    assert "computed in float64" in capsys.readouterr().out
    assert main(["replay", str(recorded), "--until", "no_node"]) == 2
    assert "has no node 'no_node'" in capsys.readouterr().err


def test_in_float64_an_overflow_of_half_is_gone(tmp_path):
    def steep(model, x, y, factor):
        return (model(x).half() * factor.half() * 1e4).float().mean()

    torch.manual_seed(0)
    model = Images()
    step = apexfx.train_step(model, objective=steep, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), inner="eager",
                             opt_level="O0", safeguard=True)
    step(X, Y, torch.tensor(1e4))
    step.record(tmp_path / "bundle")
    assert "(float16)" in replay(str(tmp_path / "bundle"))[0]
    assert "not finite: nothing" in replay(str(tmp_path / "bundle"), to="float64")[0]


def test_the_first_node_that_differs_is_named(copied):
    def change(data):
        node_of(data, target="aten::relu.default")["target"] = "aten::neg.default"

    edit(copied, change)
    text, same = replay(str(copied))
    assert not same and "the first is relu: aten.neg.default" in text


def test_on_another_torch_bits_are_compared_only(copied):
    def change(data):
        data["machine"]["torch"] = "2.11.0"
        node_of(data, target="aten::relu.default")["target"] = "aten::neg.default"

    edit(copied, change)
    text, same = replay(str(copied))
    assert same and "so the bits may differ: torch 2.11.0 -> " in text and "the first is relu" in text


# ---- what a stranger sends ---------------------------------------------------------------------------------------------------


class Malicious:
    def __reduce__(self):
        return exec, ("import tests.train_step.test_record as here; here.EXECUTED.append(1)",)


EXECUTED: list[int] = []


def with_pickle(path):
    tensors = torch.load(path / "tensors.pt", weights_only=True)
    torch.save({**tensors, "inputs": [Malicious()]}, path / "tensors.pt")


def plain_pickle(path):
    (path / "tensors.pt").write_bytes(pickle.dumps(Malicious()))


def in_graph(**changes):
    def change(path):
        edit(path, lambda data: node_of(data, target="aten::relu.default").update(changes))
    return change


def placeholder(path):
    edit(path, lambda data: node_of(data, op="placeholder").update(target="x=__import__('os').abort()"))


def cut(name):
    def change(path):
        file = path / name
        file.write_bytes(file.read_bytes()[:-200])
    return change


@pytest.mark.parametrize("change, message", [
    (with_pickle, "holds more than tensors"), (plain_pickle, "holds more than tensors"),
    (cut("bundle.json"), "is damaged"), (cut("tensors.pt"), "is damaged"),
    (lambda path: (path / "bundle.json").unlink(), "is no bundle"), (lambda path: (path / "tensors.pt").unlink(), "is damaged"),
    (lambda path: edit(path, lambda data: data.update(format=99)), "format 99, and this apexfx reads format 1"),
    (lambda path: edit(path, lambda data: data.pop("digests")), "lacks a part"),
    (lambda path: edit(path, lambda data: data["graph"].pop("nodes")), "is damaged"),
    (in_graph(target="os::system"), "no op of torch"), (in_graph(target="builtins::exec.default"), "no op of torch"),
    (in_graph(target="aten::from_file.default"), "no op of torch"),
    (in_graph(target="aten::__class__.__init__"), "no op of torch"),
    (in_graph(op="call_method", target="share_memory_"), "which no graph of a step has"),
    (in_graph(op="get_attr", target="__class__"), "which no graph of a step has"),
    (in_graph(args={"tuple": [{"dtype": "save"}]}), "which is none that a graph has"),
    (in_graph(args={"tuple": [{"node": "nobody"}]}), "is damaged"), (in_graph(args={"tuple": []}), "cannot be run here"),
    (placeholder, "which no graph of a step has"),
])  # fmt: skip
def test_what_is_damaged_or_strange_is_refused_and_not_executed(copied, change, message, capsys):
    change(copied)
    assert main(["replay", str(copied)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and EXECUTED == []


# ---- where it cannot be written ----------------------------------------------------------------------------------------------


def train(step, caplog):
    with caplog.at_level(logging.WARNING):
        for factor in (ONE, INFINITE, ONE):
            loss = step(X, Y, factor)
    assert loss.isfinite() and step.skipped == 1
    return caplog.text


def guarded(folder, **options):
    return apexfx.Safeguard(record_dir=folder, **options)


def test_skipped_steps_are_recorded(tmp_path, caplog):
    text = train(make(safeguard=guarded(tmp_path / "failures")), caplog)
    path, = (tmp_path / "failures").iterdir()
    assert path.name == "call-2-rank-0" and f"python -m apexfx replay {path} runs it again" in text
    assert replay(str(path))[1] and sorted(file.name for file in path.iterdir()) == ["bundle.json", "graph.py", "tensors.pt"]


def test_what_is_recorded_is_not_trained_otherwise(tmp_path):
    one, other = make(safeguard=guarded(tmp_path)), make()
    for step in (one, other):
        torch.manual_seed(3)
        for factor in (ONE, INFINITE, ONE):
            step(X, Y, factor)
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0, equal_nan=True)


def test_there_are_at_most_so_many(tmp_path):
    step = make(safeguard=guarded(tmp_path, max_records=2, max_consecutive_skips=3))
    (tmp_path / ".call-9-rank-0.123").mkdir()  # of a process that was killed
    for _ in range(2):
        step(X, Y, INFINITE)
    with pytest.raises(apexfx.NonFiniteError, match="3 steps in a row"):
        step(X, Y, INFINITE)
    assert sorted(path.name for path in tmp_path.glob("call*")) == ["call-1-rank-0", "call-2-rank-0"]


def test_the_last_step_before_an_error_is_recorded(tmp_path):
    step = make(safeguard=guarded(tmp_path, max_consecutive_skips=1))
    with pytest.raises(apexfx.NonFiniteError, match="1 steps in a row"):
        step(X, Y, INFINITE)
    assert [path.name for path in tmp_path.iterdir()] == ["call-1-rank-0"]


@pytest.mark.parametrize("broken", ["torch.save", "os.replace", "pathlib.Path.mkdir"])
def test_a_full_disk_is_a_warning(broken, tmp_path, caplog, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    step = make(safeguard=guarded(tmp_path))
    monkeypatch.setattr(broken, full)
    assert "could not be recorded" in train(step, caplog) and "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert "could not be recorded" in train(make(safeguard=guarded(tmp_path / "file" / "below")), caplog)


def test_what_cannot_be_recorded_says_why(tmp_path):
    step = make()
    with pytest.raises(RuntimeError, match="no last call"):
        step.record(tmp_path / "one")
    x = X.clone()
    step(x, Y, ONE)
    step.record(tmp_path / "one")
    with pytest.raises(FileExistsError, match="is a new folder"):
        step.record(tmp_path / "one")
    x.zero_()
    with pytest.raises(RuntimeError, match="was written since"):
        step.record(tmp_path / "two")
    with pytest.raises(TypeError, match="record_dir=3"):
        guarded(3)


def test_strides_and_aliases_of_inputs_are_kept():
    base = torch.arange(60.0)
    for tensor in (base.reshape(6, 10)[1:5, ::3], base[:6].expand(4, 6), base.reshape(3, 4, 5).permute(2, 0, 1), base[:0]):
        copy = bundle.exact_copy(tensor)
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
        assert copy.untyped_storage().nbytes() <= base.untyped_storage().nbytes()


def test_what_other_ranks_sent_is_there_without_them(tmp_path):
    """A world of which this is the one real rank; the replay has none."""
    from apexfx._torch import fake_store

    dist = torch.distributed
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    try:
        step = make(ddp=True, sync_bn=True)
        step(X, Y, ONE)
        step(X, Y, INFINITE)
        step.record(tmp_path / "bundle")
    finally:
        dist.destroy_process_group()
    read = bundle.load(tmp_path / "bundle")
    assert read.tensors["received"]
    text, same = replay(str(tmp_path / "bundle"))
    assert same and "the same bits in all of" in text


