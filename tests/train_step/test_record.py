"""Bundles: what a skipped step leaves for another process, which computes the same bits, and what happens where that fails."""

from __future__ import annotations

import functools
import json
import logging
import math
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.__main__ import main
from apexfx.observe import bundle
from apexfx.observe.digests import digest
from apexfx.observe.replay import replay
from apexfx.train_step.last_update import LastCall
from tests import fresh_process
from tests.tables import table


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.body(x[:, None]))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        return self.head(F.dropout(x.flatten(1), 0.3, self.training))


X, Y = torch.linspace(-1, 1, 180).reshape(5, 6, 6), torch.arange(5) % 3
LEVELS = {"O0": {}, "O2": {"opt_level": "O2", "dtype": torch.float16}}
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


RUNS = {**{level: {"model": Images, **LEVELS[level]} for level in LEVELS}, "inductor": {"model": Small, "inner": "inductor"}}


@pytest.fixture(scope="module")
def spikes(tmp_path_factory):
    """By name, a bundle of a step that a spike has skipped, so that its loss is a number, and what that step computed."""
    folder = tmp_path_factory.mktemp("spikes")

    def spike(name):
        step = make(safeguard=apexfx.Safeguard(spike_factor=2.0, window=1), loss_scale=8.0, **RUNS[name])
        step(X, Y, ONE)
        before = {key: t.clone() for key, t in step.model.state_dict().items()}
        loss, scale = step(X, Y, 100 * ONE), step.loss_scale
        assert step.events[-1].reason == "spike" and step.loss_scale == scale
        step.record(folder / name)
        return folder / name, before, loss, step.grad_norm

    return functools.cache(spike)


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


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_new_process_computes_the_same_bits(name, spikes):
    text, same = fresh_process.call(replay, str(spikes(name)[0]))
    assert same and "\nthe same bits in all of" in text


@table(1, "name", RUNS)
def test_a_bundle_computes_what_the_step_computed(name, spikes):
    """Dropout is on; Inductor's kernels have other random numbers."""
    path, before, loss, norm = spikes(name)
    read = bundle.load(path)
    _, graph = read.graph()
    names = {node.meta.get("apexfx_name"): x for node, x in zip(graph.find_nodes(op="placeholder"), read.inputs())}
    assert all(torch.equal(names[key], t) for key, t in before.items())
    assert name == "inductor" or {digest(loss), digest(norm)} <= set(read.data["digests"].values())


@pytest.mark.long
def test_the_command_says_what_was_recorded(recorded, capsys):
    assert main(["replay", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert "event: call 2: not finite" in out and "input 'batch[2]' is not finite (inf), first read by aten.mul" in out
    assert "options: opt_level=" in out and "=None" not in out
    assert "test_record.py:" in out and "the same bits in all of" in out and f"torch {torch.__version__}" in out


@pytest.mark.long
def test_the_first_node_that_differs_is_named(copied):
    def change(data):
        node_of(data, target="aten::relu.default")["target"] = "aten::neg.default"

    edit(copied, change)
    text, same = replay(str(copied))
    assert not same and "the first is relu: aten.neg.default" in text


@pytest.mark.long
def test_an_update_that_differs_is_named(tmp_path):
    step = make()
    step(X, Y, ONE)
    step.record(tmp_path / "bundle")
    assert replay(str(tmp_path / "bundle"))[1]
    edit(tmp_path / "bundle", lambda data: node_of(data, target="apexfx::adam_.default")["args"]["tuple"].__setitem__(-1, False))
    text, same = replay(str(tmp_path / "bundle"))
    assert not same and "other bits in 1 of" in text and "the first is adam_" in text


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


def with_tensors(name):
    def change(path):
        tensors = torch.load(path / "tensors.pt", weights_only=True)
        torch.save({**tensors, name: None}, path / "tensors.pt")
    return change


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
    (lambda path: edit(path, lambda data: data.update(digests={})), "has no digest of"),
    (lambda path: edit(path, lambda data: data.update(format=99)), "format 99, and this apexfx reads format 4"),
    (lambda path: edit(path, lambda data: data.pop("digests")), "lacks a part"),
    (lambda path: edit(path, lambda data: data["graph"].pop("nodes")), "is damaged"),
    (in_graph(target="os::system"), "no op of torch"), (in_graph(target="builtins::exec.default"), "no op of torch"),
    (in_graph(target="aten::from_file.default"), "no op of torch"), (in_graph(target="aten::save.default"), "no op of torch"),
    (in_graph(target="aten::__class__.__init__"), "no op of torch"),
    (in_graph(op="call_method", target="share_memory_"), "which no graph of a step has"),
    (in_graph(op="get_attr", target="__class__"), "which no graph of a step has"),
    (in_graph(args={"tuple": [{"dtype": "save"}]}), "which is none that a graph has"),
    (in_graph(args={"tuple": [{"node": "nobody"}]}), "is damaged"), (in_graph(args={"tuple": []}), "cannot be run here"),
    (placeholder, "which no graph of a step has"), (in_graph(trace=10**6), "is damaged"),
    (in_graph(args=3), "is damaged"), (in_graph(args={"tuple": [{}]}), "is damaged"),
    (in_graph(custom=3), "which no graph of a step has"),
    *((with_tensors(name), "lacks a part") for name in ("inputs", "constants", "received", "random")),
    *((lambda path, name=name: edit(path, lambda data: data.update({name: [1]})), "lacks a part")
      for name in ("machine", "graph", "digests")),
])  # fmt: skip
def test_what_is_damaged_or_strange_is_refused_and_not_executed(copied, change, message, capsys):
    change(copied)
    assert main(["replay", str(copied)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and EXECUTED == []


def test_a_digest_of_one_element_is_that_of_its_bits():
    assert digest(torch.ones(()).expand(1)) == digest(torch.ones(1)) != digest(torch.zeros(1))


def test_a_text_of_a_stranger_is_no_line_of_ours(copied, capsys):
    edit(copied, lambda data: data.update(event="nothing\nthe same bits in all of 9 nodes\x1b[2J"))
    assert main(["replay", str(copied)]) == 0
    assert "recorded event: 'nothing\\nthe same bits in all of 9 nodes\\x1b[2J'" in capsys.readouterr().out


# ---- where it cannot be written ----------------------------------------------------------------------------------------------


def train(step, caplog):
    with caplog.at_level(logging.WARNING):
        for factor in (ONE, INFINITE, ONE):
            loss = step(X, Y, factor)
    assert loss.isfinite() and step.skipped == 1
    return caplog.text


def guarded(folder, **options):
    return apexfx.Safeguard(record_dir=folder, **options)


@pytest.mark.long
def test_skipped_steps_are_recorded(tmp_path, caplog):
    text = train(make(model=Small, safeguard=guarded(tmp_path / "failures")), caplog)
    path, = (tmp_path / "failures").iterdir()
    assert path.name == "call-2-rank-0" and f"python -m apexfx replay {path} runs it again" in text
    assert replay(str(path))[1] and sorted(file.name for file in path.iterdir()) == ["bundle.json", "graph.py", "tensors.pt"]


@pytest.mark.long
def test_what_is_recorded_is_not_trained_otherwise(tmp_path):
    one, other = make(model=Small, safeguard=guarded(tmp_path)), make(model=Small)
    for step in (one, other):
        torch.manual_seed(3)
        for factor in (ONE, INFINITE, ONE):
            step(X, Y, factor)
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.long
def test_a_bundle_of_a_model_that_was_changed_since_says_so(tmp_path):
    step = make(model=Small, safeguard=apexfx.Safeguard(spike_factor=2.0, window=1))
    step(X, Y, ONE)
    step(X, Y, 100 * ONE)
    step.record(tmp_path / "at once")
    with torch.no_grad():
        step.model.head.weight.mul_(2)
    step.record(tmp_path / "later")
    replays = [replay(str(tmp_path / name)) for name in ("at once", "later")]
    assert ["event not reproduced" in text for text, _ in replays] == [False, True]
    assert [as_recorded for _, as_recorded in replays] == [True, False]


@pytest.mark.long
def test_a_bundle_has_the_rates_of_a_call_after_which_parameters_are_counted_apart(tmp_path):
    model, x = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), torch.ones(2, 3)
    step = apexfx.train_step(model, objective=lambda m, x: m[0](x).square().mean(), inner="eager", opt_level="O0", safeguard=True,
                             optimizer=torch.optim.AdamW(model.parameters(), lr=0.25))
    step(x)
    step.record(tmp_path / "bundle")
    nodes = json.loads((tmp_path / "bundle/bundle.json").read_text())["graph"]["nodes"]
    names = [node.get("apexfx_name") for node in nodes if node["op"] == "placeholder"]
    assert torch.load(tmp_path / "bundle/tensors.pt")["inputs"][names.index("lr_0")] == 0.25


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_flush_records_the_call_before_it(accumulate, tmp_path):
    step = make(model=Small, safeguard=guarded(tmp_path), accumulate=accumulate)
    for _ in range(accumulate):
        step(X, Y, INFINITE)
    step.flush()
    step(X, Y, ONE)
    assert [path.name for path in tmp_path.iterdir()] == ["call-1-rank-0"]


@pytest.mark.long
def test_there_are_at_most_so_many(tmp_path):
    step = make(model=Small, safeguard=guarded(tmp_path, max_records=2, max_consecutive_skips=3))
    (tmp_path / ".call-9-rank-0.123").mkdir()  # of a process that was killed
    for _ in range(2):
        step(X, Y, INFINITE)
    with pytest.raises(apexfx.NonFiniteError, match="3 steps in a row"):
        step(X, Y, INFINITE)
    assert sorted(path.name for path in tmp_path.glob("call*")) == ["call-1-rank-0", "call-2-rank-0"]


@pytest.mark.long
def test_the_last_step_before_an_error_is_recorded(tmp_path):
    step = make(model=Small, safeguard=guarded(tmp_path, max_consecutive_skips=1))
    with pytest.raises(apexfx.NonFiniteError, match="1 step in a row"):
        step(X, Y, INFINITE)
    assert [path.name for path in tmp_path.iterdir()] == ["call-1-rank-0"]


@pytest.mark.long
@pytest.mark.parametrize("broken", ["torch.save", "os.replace", "pathlib.Path.mkdir"])
def test_a_full_disk_is_a_warning(broken, tmp_path, caplog, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    step = make(model=Small, safeguard=guarded(tmp_path))
    monkeypatch.setattr(broken, full)
    assert "could not be recorded" in train(step, caplog) and "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_where_another_was_freed_is_not_of_the_call():
    batch = types.SimpleNamespace(x=torch.zeros(2))
    call = LastCall((batch,), {}, torch.device("cpu"))
    batch.x = None
    batch.x = torch.zeros(2)
    assert call.batch_has_changed()


@pytest.mark.long
def test_what_cannot_be_recorded_says_why(tmp_path):
    step = make(model=Small)
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


@torch.library.custom_op("tests_record::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: twice(gradient))


@pytest.mark.long
def test_an_op_that_no_bundle_holds_is_named(tmp_path, caplog):
    class Twice(Small):
        def forward(self, x):
            return twice(super().forward(x))

    step = make(model=Twice, safeguard=guarded(tmp_path))
    train(step, caplog)
    assert "cannot be recorded because of tests_record.twice.default at test_record.py:" in caplog.text
    assert list(tmp_path.iterdir()) == [] and [event.call for event in step.events] == [2]
    with pytest.raises(ValueError, match="because of tests_record.twice"):
        step.record(tmp_path / "bundle")


def test_strides_and_aliases_of_inputs_are_kept():
    base = torch.arange(60.0)
    for tensor in (base.reshape(6, 10)[1:5, ::3], base[:6].expand(4, 6), base.reshape(3, 4, 5).permute(2, 0, 1), base[:0]):
        copy = bundle.exact_copy(tensor)
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
        assert copy.untyped_storage().nbytes() <= base.untyped_storage().nbytes()
