"""Artifacts: a step that another process compiled computes the same bits, and no other program gets it."""

from __future__ import annotations

import abc
import copy
import functools
import hashlib
import os
import re
from collections import deque
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.__main__ import main
from apexfx._torch import tensor_check, tree_flatten
from apexfx.train_step.artifact import archive
from apexfx.train_step.artifact.guards import Facts, NotComparable, Scope, Values, code_digest, row_of_write
from apexfx.train_step.artifact.match import Batch, Watch
from tests import fresh_process
from tests.distributed.launch import run_ranks

SCALE = 1.0
X, Y = torch.linspace(-1, 1, 30).reshape(5, 6), torch.arange(5) % 3


class Net(nn.Module):
    def __init__(self, p=0.3, eps=1e-5, activation=F.relu):
        super().__init__()
        self.body, self.norm, self.drop, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8, eps=eps), nn.Dropout(p), nn.Linear(8, 3)
        self.activation = activation

    def forward(self, x):
        return self.head(self.drop(self.activation(self.norm(self.body(x))))) * SCALE


def other_forward(self, x):
    return self.head(self.activation(self.drop(self.norm(self.body(x))))) * SCALE


def loss_of(weight):
    def loss(output, y):
        return F.cross_entropy(output, y) * weight
    return loss


def make(path, model=None, loss=None, optimizer=torch.optim.AdamW, weight_decay=0.01, **options):
    torch.manual_seed(0)
    model = model or Net()
    optimizer = optimizer((p for p in model.parameters() if p.requires_grad), lr=0.01, weight_decay=weight_decay)
    return apexfx.train_step(model, loss or loss_of(1.0), optimizer, artifact=path, **{"max_grad_norm": 1.0, **options})


def digest(step):
    state = hashlib.sha256()
    for tensor in (*step.model.parameters(), *step.model.buffers()):
        state.update(tensor.detach().double().numpy().tobytes())
    return state.hexdigest()


def train(path, cache, num_steps=6, compiles=True, build=Net, batch=lambda: (X, Y), seed=1, **options):
    """Return what a new process computes, and what of Dynamo's and Inductor's it has run."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    if not compiles:
        os.environ["CXX"] = "false"
    from torch._dynamo.utils import get_compilation_metrics

    torch.manual_seed(0)
    step, frames = make(path, build(), **options), len(get_compilation_metrics())
    torch.manual_seed(seed)
    losses = [step(*batch()).item() for _ in range(num_steps)]
    built = [file.name for file in Path(cache).rglob("*.so")] if Path(cache).exists() else []
    return losses, digest(step), len(get_compilation_metrics()) - frames, built, step.report.notes, str(step.report)


def in_new_process(path, cache, **options):
    return fresh_process.call(functools.partial(train, path, cache, **options))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """An artifact, and what the process has computed that wrote it."""
    folder = tmp_path_factory.mktemp("artifact")
    return folder / "step", in_new_process(folder / "step", folder / "cache")


@pytest.mark.long
def test_another_process_computes_the_same_bits_and_compiles_nothing(kept, tmp_path):
    path, (losses, state, frames, built, notes, report) = kept
    assert frames == 1 and built and notes == [] and path.exists()
    again = in_new_process(path, tmp_path, compiles=False)
    assert again == (losses, state, 0, [], [], report)
    without = in_new_process(None, tmp_path / "cache")
    assert without[:2] == (losses, state)


def in_eval_mode():
    return Net().eval()


@pytest.mark.long
def test_another_process_says_what_the_first_one_said(tmp_path):
    first = in_new_process(tmp_path / "step", tmp_path / "cache", build=in_eval_mode, memory_budget=1)
    again = in_new_process(tmp_path / "step", tmp_path / "empty", compiles=False, build=in_eval_mode, memory_budget=1)
    assert again[:5] == (*first[:2], 0, [], first[4]) and "eval mode" in first[4][0] and len(first[4]) > 1


@pytest.mark.long
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"opt_level": "O2", "safeguard": True},
                                     {"opt_level": "O0", "keep_grads": True}])
def test_other_steps_do_so_too(options, tmp_path):
    first = in_new_process(tmp_path / "step", tmp_path / "cache", **options)
    again = in_new_process(tmp_path / "step", tmp_path / "empty", compiles=False, **options)
    assert first[4] == [] and again[:5] == (*first[:2], 0, [], [])


def with_transposed_weight():
    model = Net()
    model.body.weight.data = model.body.weight.data.t().contiguous().t()
    return model


def frozen():
    model = Net()
    model.body.bias.requires_grad_(False)
    return model


def hooked():
    model = Net()
    model.head.register_forward_hook(lambda *_: None)
    return model


CHANGES = {
    "eps": ({"model": lambda: Net(eps=1e-4)}, r"model.norm.eps. The file has 1e-05, and the program has 0.0001"),
    "p": ({"model": lambda: Net(p=0.4)}, r"model.drop.p. The file has 0.3, and the program has 0.4"),
    "activation": ({"model": lambda: Net(activation=torch.tanh)}, "model.activation. The file has function .*relu"),
    "closure": ({"loss": lambda: loss_of(2.0)}, r"loss_fn.__closure__\[0\].* The file has 1.0, and the program has 2.0"),
    "optimizer option": ({"weight_decay": lambda: 0.5}, "the update. The file has .*0.01.* program has .*0.5"),
    "optimizer": ({"optimizer": lambda: torch.optim.SGD}, "optimizer. The file has AdamW, and the program has SGD"),
    "option": ({"max_grad_norm": lambda: 2.0}, "option max_grad_norm. The file has 1.0, and the program has 2.0"),
    "frozen": ({"model": frozen}, "parameter body.bias. The file has .*requires_grad, and"),
    "strides": ({"model": with_transposed_weight}, r"parameter body.weight. The file has .*\(6, 1\).* has .*\(1, 8\)"),
    "dtype": ({"model": lambda: Net().double()}, "parameter body.weight. The file has .*float32.* has .*float64"),
    "hook": ({"model": hooked}, r"model.head._forward_hooks. The file has .*OrderedDict .*of \[\]"),
    "name": ({"model": lambda: nn.Sequential(Net())}, "parameter body.weight. .* program has nothing of that"),
}
PATCHES = {
    "global": ("tests.train_step.test_artifact.SCALE", 2.0, "SCALE. The file has 1.0, and the program has 2.0"),
    "line": ("tests.train_step.test_artifact.Net.forward", other_forward, "class tests.train_step.test_artifact.Net"),
}


def refused(path, pattern, batch=(X, Y), **options):
    with pytest.raises(apexfx.ArtifactMismatch, match=pattern) as caught:
        step = make(path, **options)
        before = digest(step)
        step(*batch)
    assert "Delete the file, and the step compiles anew" in str(caught.value)
    if "step" in locals():
        assert digest(step) == before and not step.optimizer.state_dict()["state"]


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_another_program_does_not_get_it(kept, name):
    options, pattern = CHANGES[name]
    refused(kept[0], pattern, **{option: value() for option, value in options.items()})


@pytest.mark.long
@pytest.mark.parametrize("name", PATCHES)
def test_nor_does_one_with_other_code_around(kept, name, monkeypatch):
    place, value, pattern = PATCHES[name]
    monkeypatch.setattr(place, value)
    refused(kept[0], pattern)


@pytest.mark.long
def test_threads_and_autocast_are_compared(kept):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        refused(kept[0], f"threads. The file has {before}, and the program has {before + 1}")
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
def test_what_changes_between_calls_compiles_as_always(kept, tmp_path):
    def run(path):
        step = make(path)
        torch.manual_seed(1)
        step(X, Y)
        step.model.activation = torch.tanh
        step(X, Y)
        step.model.drop.p = 0.9
        step(X, Y)
        step.model.eval()
        return step, step(X[:4], Y[:4]).item(), digest(step)

    (tmp_path / "step").write_bytes(kept[0].read_bytes())
    step, *results = run(tmp_path / "step")
    assert results == list(run(None)[1:])
    assert len(archive.read(tmp_path / "step")[0]["calls"]) == 2  # of the same kind, and of another
    step.save_artifact(tmp_path / "other")
    assert archive.read(tmp_path / "other")[0] == archive.read(tmp_path / "step")[0]


WATCHED = {
    "attribute": lambda model, _: setattr(model, "activation", torch.tanh),
    "mode": lambda model, _: model.drop.eval(),
    "buffer": lambda model, _: setattr(model.norm, "running_mean", torch.zeros(8)),
    "parameter": lambda model, _: setattr(model.head, "bias", nn.Parameter(torch.zeros(3))),
    "submodule": lambda model, _: setattr(model, "drop", nn.Identity()),
    "element": lambda model, _: model.scales.append(1.0),
    "element of a deque": lambda model, _: model.recent.append(1.0),
    "order": lambda model, _: model._modules.__setitem__("norm", model._modules.pop("norm")),
    "hook": lambda model, _: model.head.register_forward_hook(lambda *_: None),
    "hook that is gone": lambda _, hook: hook.remove(),
}


@pytest.mark.parametrize("change", WATCHED)
def test_a_loaded_call_notices_what_modules_hold(change):
    step = make(None)
    step.model.scales, step.model.recent, hook = [1.0], deque([1.0]), step.model.body.register_forward_hook(lambda *_: None)
    watch = Watch(step._parts)
    assert not watch.has_changed()
    WATCHED[change](step.model, hook)
    assert watch.has_changed()


def test_a_loaded_call_notices_what_else_was_read(monkeypatch):
    class Options:
        scale, weights = 1.0, [[1.0]]

    options, loss, model = Options(), loss_of(2.0), Net()
    table = {"a": 1.0}
    model.config = {"inner": {"a": 1.0, "b": 2.0}, "recent": deque([1.0]), "table": MappingProxyType(table)}
    sources = ["G['SCALE']", "L['inputs'].objective.options.scale", "L['inputs'].objective.options.weights[0]",
               "L['inputs'].objective.loss.__closure__[0].cell_contents",
               "L['inputs'].model.config['inner']", "L['inputs'].model.config['recent']",
               "L['inputs'].model.config['table']",
               "L['inputs'].model._modules['drop'].p", "L['batch'][0]", "L['inputs'].params[0]", "G['not_there']"]
    objective = SimpleNamespace(options=options, loss=loss)
    scope = Scope(Net.forward, {"inputs": SimpleNamespace(model=model, objective=objective, params=[X]), "batch": (X,)})

    def values():
        return Values([[source, "EQUALS_MATCH", None, ""] for source in sources], scope)

    for change in (lambda: monkeypatch.setattr("tests.train_step.test_artifact.SCALE", 2.0),
                   lambda: model.config["inner"].update(c=3.0), lambda: model.config["recent"].append(2.0),
                   lambda: table.update(b=2.0),
                   lambda: model.config["inner"].update(a=model.config["inner"].pop("a")),  # equal, and in another order
                   lambda: setattr(options, "scale", 2.0), lambda: options.weights[0].append(2.0),
                   lambda: setattr(loss.__closure__[0], "cell_contents", 3.0),
                   lambda: delattr(objective, "options")):
        before = values()
        assert not before.have_changed()
        change()
        assert before.have_changed() and not values().have_changed()


def test_a_class_is_the_same_after_an_object_of_it_was_copied():
    class Objective:
        weight = 2.0

    before = Facts().of(Objective)
    copy.deepcopy(Objective())
    assert "__slotnames__" in vars(Objective) and Facts().of(Objective) == before
    Objective.weight = 3.0
    assert Facts().of(Objective) != before


def test_batches_are_told_apart():
    z = torch.ones(3, dtype=torch.complex64)
    batches = [(X, X), (X, X.clone()), (X, X.double()), (X, X.t()), (X, 1), (X, 1.0), (z, z.clone()), (z, z.conj()), (X, z.imag),
               (X, z.conj().imag), (X,), ([X],)]
    keys = [Batch(*tree_flatten((batch, {}))).key() for batch in batches]
    assert len(set(keys)) == len(keys) and keys[1] == Batch(*tree_flatten(((X.clone(), X.clone()), {}))).key()


@pytest.mark.parametrize("changed", [lambda x: x.double(), lambda x: x[:3], lambda x: x.t().contiguous().t(), lambda x: None])
def test_tensors_of_another_kind_are_noticed(changed):
    tensors = [torch.ones(5, 6), nn.Parameter(torch.ones(5, 6))]
    holds = tensor_check(tensors)
    assert holds(*tensors)
    if (data := changed(tensors[1].data)) is not None:
        tensors[1].data = data
    else:
        tensors[1].requires_grad_(False)
    assert not holds(*tensors)


BETWEEN_CALLS = {
    "another tensor": lambda model, batch: batch.__setitem__(1, X + 1),
    "global": lambda *_: globals().__setitem__("SCALE", 3.0),
    "dtype": lambda model, _: setattr(model.factor, "data", model.factor.data.double()),
}


@pytest.mark.long
@pytest.mark.parametrize("change", BETWEEN_CALLS)
def test_a_loaded_call_computes_what_one_without_a_file_does(change, tmp_path, monkeypatch):
    def objective(model, x, other):
        return (model(x).sum() * model.factor - other.mean()).square() * SCALE

    def run(path):
        monkeypatch.setattr("tests.train_step.test_artifact.SCALE", 1.0)
        torch.manual_seed(0)
        model, batch = Net(), [X, X]
        model.register_buffer("factor", torch.tensor([0.7]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = apexfx.train_step(model, objective=objective, optimizer=optimizer, artifact=path)
        torch.manual_seed(1)
        losses = [step(*batch), step(*batch)]
        BETWEEN_CALLS[change](model, batch)
        return torch.stack([*losses, step(*batch), step(*batch)]), step

    first, _ = run(tmp_path / "step")
    loaded, step = run(tmp_path / "step")
    assert step._graphs._calls and torch.equal(first, loaded) and torch.equal(loaded, run(None)[0])


@pytest.mark.long
def test_the_command(kept, capsys):
    main(["artifact", str(kept[0])])
    text = capsys.readouterr().out
    assert "call 0, which updates: Tensor torch.float32 (5, 6)" in text and "optimizer: AdamW" in text
    assert main(["artifact", f"{kept[0]}.not_there"]) == 2


def of_ranks(rank, world_size, path):
    def run(artifact):
        step = make(artifact, ddp=True)
        torch.manual_seed(rank)
        for _ in range(3):
            step(X + rank, Y)
        return digest(step)

    first = run(path)
    dist.barrier()
    os.environ["CXX"] = "false"
    again = run(path)
    assert first == again
    states = [None] * world_size
    dist.all_gather_object(states, first)
    assert Path(path).exists()
    if rank == 1:
        path = f"{path}.other"
    with pytest.raises(apexfx.RankMismatchError, match="artifact of the step"):
        make(path, ddp=True)


@pytest.mark.long
def test_ranks_take_one_file(tmp_path):
    run_ranks(of_ranks, 2, str(tmp_path / "step"))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.head(x)


class Decides(Counts):
    """Changes at the first call alone, as classifiers of transformers do: each process begins with that."""

    def forward(self, x):
        if self.calls == 0:
            self.calls = 1
        return self.head(x)


@pytest.mark.long
@pytest.mark.parametrize("model, calls", [(Counts, 2), (Decides, 1)])
def test_what_cannot_be_told_from_another_program_is_not_written(model, calls, tmp_path):
    step = make(tmp_path / "step", model=model())
    step(X, Y)
    step(X, Y)
    assert step.model.calls == calls and not (tmp_path / "step").exists()
    assert any("model.calls, which the forward changes" in note for note in step.report.notes)
    with pytest.raises(RuntimeError, match="no compiled graph"):
        step.save_artifact(tmp_path / "step")


@torch.compiler.allow_in_graph
def doubled(x):
    return x * SCALE * 2.0


class Scaled(type):
    def __instancecheck__(cls, each):
        return SCALE > 0


SCALED = Scaled("Anything", (), {})


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("compute, obstacle", [
    (lambda x, _: x * (1.0 + dist.get_rank()), r"dist.get_rank\(\), another number on each rank"),
    (lambda x, _: doubled(x), r"doubled\(\), which Dynamo has put into the graph and not read"),
    (lambda x, _: x.doubled(), r"doubled\(\), which Dynamo has put into the graph"),
    (lambda x, _: x * isinstance(x, SCALED), "SCALED, a class with an isinstance of its own"),
    (lambda x, y: x * y.weight, r"batch\[1\].weight, an attribute of a tensor of the batch")])
def test_what_another_program_could_do_otherwise_unseen_is_not_written(compute, obstacle, tmp_path, monkeypatch, one_rank):
    monkeypatch.setattr(torch.Tensor, "doubled", doubled, raising=False)
    step, y = make(tmp_path / "step", loss=lambda output, y: F.cross_entropy(compute(output, y), y)), Y.clone()
    y.weight = 2.0
    step(X, y)
    assert any(re.search(obstacle, note) for note in step.report.notes) and not (tmp_path / "step").exists()


@pytest.mark.long
def test_a_step_whose_file_cannot_be_written_trains(kept, tmp_path):
    losses, state, *_, notes, _ = in_new_process(tmp_path / "none" / "step", tmp_path / "cache")
    assert (losses, state) == kept[1][:2]
    assert any("cannot be written (No such file or directory), and the step compiles at each start" in note for note in notes)


# ---- without compiling anything ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, pattern", [
    ({"inner": "eager"}, "artifact= keeps the code that Inductor makes.*inner='eager'"),
    ({"fallback": "transform"}, "fallback='transform' asks for something else"),
    ({"dynamic": True}, "dynamic=True asks for something else")])
def test_what_has_no_artifact_is_refused(options, pattern, tmp_path):
    with pytest.raises(ValueError, match=pattern):
        make(tmp_path / "step", **options)
    with pytest.raises(TypeError, match="artifact=3 was given, expected the path of a file"):
        make(3)
    with pytest.raises(RuntimeError, match="make it with artifact="):
        make(None, inner="eager").save_artifact(tmp_path / "step")


def test_functions_and_classes_are_what_they_compute():
    spaces = [{"__name__": "program"} for _ in range(3)]
    text = "def f(x, k=1.0):\n    return [x + k for k in {'a', 'b'}]\nclass C:\n    y = 2\n    def g(self): return self.y"
    for space, source in zip(spaces, (text, f"\n\n{text}", text.replace("x + k", "x - k").replace("self.y", "-self.y"))):
        exec(source, space)
    same, moved, other = ([Facts().of(space["f"]), Facts().of(space["C"])] for space in spaces)
    assert same == moved and all(a != b for a, b in zip(same, other))
    assert code_digest(spaces[0]["f"].__code__) == code_digest(spaces[1]["f"].__code__)
    assert Facts().of({"a": 1}) != Facts().of({"b": 1}) and Facts().of({"x", "y", "z"}) == Facts().of({"z", "y", "x"})
    assert Facts().of(MappingProxyType({"a": 1})) != Facts().of(MappingProxyType({"b": 1}))
    config = ModuleType("config")
    before = Facts().of(config), Facts().of(refused)
    config.dropout, refused.scale = 0.1, 2.0
    assert all(now != then for now, then in zip((Facts().of(config), Facts().of(refused)), before))
    del refused.scale
    assert Facts().of(SimpleNamespace(a=1)) != Facts().of(SimpleNamespace(a=1, b=1))
    assert Facts().of(deque([1.0])) != Facts().of(deque([1.0, 1.0]))
    base, other = (abc.ABCMeta("Base", (), {"__module__": "program"}) for _ in range(2))
    base.register(Net)
    assert Facts().of(base) != Facts().of(other)
    assert Facts().of(torch.ones(2)) != Facts().of(torch.ones(2, requires_grad=True))


def test_a_write_is_allowed_that_changes_nothing():
    held = type("Held", (), {"flag": False, "rate": 1.0, "places": (1, 2), "names": []})()
    scope = Scope(make, {"held": held})
    assert row_of_write("L['held'].rate", 1.0, scope, Facts()) == ["L['held'].rate", "EQUALS_MATCH", None, "1.0"]
    for name, value in [("flag", True), ("flag", 0), ("rate", 2.0), ("rate", 1), ("rate", scope), ("names", []), ("other", None)]:
        with pytest.raises(NotComparable, match=f"^held.{name}, which the forward changes"):
            row_of_write(f"L['held'].{name}", value, scope, Facts())
