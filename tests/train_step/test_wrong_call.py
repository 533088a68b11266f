"""train_step(): how it may be called, and what a wrong call says (`pytest -s` prints every text in full)."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import apexfx
from apexfx.train_step.wrong_call import Call
from tests.tables import table

SGD = torch.optim.SGD
X, Y = torch.linspace(-1, 1, 48).view(6, 8), torch.arange(6) % 4


class Net(nn.Module):
    """With a branch on data it runs in pieces."""

    def __init__(self, branches=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.drop, self.head, self.branches = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4), branches
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.last = x
        y = self.drop(self.body(x)).relu()
        if self.branches and y.norm() > 1e9:
            y = y / y.norm()
        return self.head(y)


def make(branches=False, loss_fn=F.cross_entropy, **options):
    model = Net(branches)
    options = {"opt_level": "O0", "inner": "eager", "fallback": "transform" if branches else None, **options}
    return apexfx.train_step(model, loss_fn, SGD(model.parameters(), lr=0.1), **options)


def objective(model, x, labels):
    return F.cross_entropy(model(x), labels)


# What is called, the error, and what its text has to say; above it what the text has to make a reader do.
CALLS = {
    # Call step(x, y), or step(*batch): a tuple is taken for several inputs of the model.
    "step((x, y))": (lambda s: s((X, Y)), TypeError, [
        "apexfx: step(batch) was called with one tuple of 2", "call step(*batch)", "forward()", "step((float32[6, 8], int64[6]))",
        "loss_fn(model(float32[6, 8], int64[6]))", "step(inputs, *targets)", "f(model, *batch) is given as objective=f"]),
    "step([x, y])": (lambda s: s([X, Y]), TypeError, ["apexfx: step(batch) was called with one list of 2"]),
    # Give the targets, too: step(x, y).
    "step(x)": (lambda s: s(X), TypeError, ["cross_entropy()", "loss_fn(model(float32[6, 8]))"]),
    # Give it a batch.
    "step()": (lambda s: s(), TypeError, ["without a batch", "step(inputs, *targets)"]),
    # Leave out the third argument, which the loss takes for its weight.
    "step(x, y, y)": (lambda s: s(X, Y, Y), Exception, ["weight tensor", "loss_fn(model(float32[6, 8]), int64[6], int64[6])"]),
    # Call step(x, y), or make the step with objective=.
    "step(inputs=x, targets=y)": (lambda s: s(inputs=X, targets=Y), TypeError, [
        "by keyword", "step(inputs, *targets)", "objective=f", "f(model, **batch)"]),
    # Take the labels out of the dictionary: all of it goes to forward.
    "step({'x': x, 'labels': y}, y)": (lambda s: s({"x": X, "labels": Y}, Y), TypeError, [
        "forward()", "loss_fn(model(x=float32[6, 8], labels=int64[6]), int64[6])"]),
    # Give targets as int64.
    "step(x, y.float())": (lambda s: s(X, Y.float()), RuntimeError, ["Long|int64", "step(float32[6, 8], float32[6])"]),
    # Give targets as a vector.
    "step(x, y[:, None])": (lambda s: s(X, Y[:, None]), RuntimeError, ["multi-target not supported", "int64[6, 1]",
                                                                  "call .squeeze(1) on those of shape [N, 1]"]),
    # Give one-hot rows as floats, with as many columns as there are classes.
    "step(x, F.one_hot(y))": (lambda s: s(X, F.one_hot(Y, 4)), RuntimeError, ["class probabilities", "call .float() on one-hot"]),
    "step(x, F.one_hot(y, 5).float())": (lambda s: s(X, F.one_hot(Y, 5).float()), RuntimeError, [
        "multi-target", "as many columns as the model's output"]),
    # Call x.float().
    "step(x.double(), y)": (lambda s: s(X.double(), Y), RuntimeError, ["float64", ".float()"]),
    # Give inputs in the dtype of the weights: x.float().
    "step(x.long(), y)": (lambda s: s(X.long(), Y), RuntimeError, [
        "torch.linear (test_wrong_call.py:", "batch[0] in torch.int64|x in torch.int64", "refuses too: call .float() on "]),
    # Give inputs with 8 features, or change the layer 'body'.
    "step(x[:, :5], y)": (lambda s: s(X[:, :5], Y), RuntimeError, [
        "[6, 5]", "test_wrong_call.py:", "y = self.drop(self.body(x))"]),
    # Give as many targets as inputs.
    "step(x, y[:4])": (lambda s: s(X, Y[:4]), ValueError, ["batch_size (6)", "(4)|(s", "step(float32[6, 8], int64[4])"]),
    # Number the classes from 0 to 3, or give the model more outputs.
    "step(x, y + 4)": (lambda s: s(X, Y + 4), IndexError, [
        "batch[1] has 4 at [0]|Target 4 is out of bounds", "takes 0 <= index < 4|Target 4", "step(float32[6, 8], int64[6])"]),
    # Give a tensor: a list is taken for several inputs of the model.
    "step(x.tolist(), y)": (lambda s: s(X.tolist(), Y), TypeError, [
        "forward()", "step(list of 6 lists, int64[6])", "model(list of 8 floats, list"]),
    # Look for what made the input None.
    "step(None, y)": (lambda s: s(None, Y), TypeError, [
        "must be Tensor, not NoneType", "step(None, int64[6])"]),
    # Bring the input to the device of the model.
    "step(x.to('meta'), y)": (lambda s: s(X.to("meta"), Y), RuntimeError, [
        "apexfx: batch[0] is on meta, and the model on cpu: call .to('cpu'). ", "meta and cpu",
        "step(float32[6, 8] on meta, int64[6])"]),
}
KEYWORDS = {
    # Name it as the objective does.
    "step(x=x, label=y), of an objective": (lambda s: s(x=X, label=Y), TypeError, [
        "apexfx: objective takes no 'label': objective()", "objective(model, x=float32[6, 8], label=int64[6])"]),
    # Unpack the dictionary.
    "step({...}), of an objective": (lambda s: s({"x": X, "labels": Y}), TypeError, [
        "objective(model, {'x': float32[6, 8], 'labels': int64[6]})", "step(**batch) a dictionary"]),
    # Number the labels from 0 to 3, or give the model more outputs.
    "step(x, y + 4), of an objective": (lambda s: s(X, Y + 4), IndexError, [
        "apexfx: labels (batch[1]) has 4 at [0]|Target 4 is out of bounds", "objective(model, float32[6, 8], int64[6])"]),
    # Bring the labels to the device of the model.
    "step(x, y.to('meta')), of an objective": (lambda s: s(X, Y.to("meta")), RuntimeError, [
        "apexfx: labels (batch[1]) is on meta, and the model on cpu: call .to('cpu'). "]),
    # Give the objective its labels.
    "step(x), of an objective": (lambda s: s(X), TypeError, ["objective()", "objective(model, float32[6, 8])",
                                                        "expected: step(...) with what"]),
}


def test_an_input_of_a_wrapper_subclass_is_refused_and_breaks_nothing():
    step = make()
    with pytest.raises(ValueError, match=r"'batch\[0\]' is a TwoTensor, .*as_subclass\(torch.Tensor\)"):
        step(TwoTensor(X, X), Y)
    step(X, Y)


def test_what_a_decorated_objective_takes_is_read_of_what_is_called():
    def objective(model, x, labels):
        return F.cross_entropy(model(x), labels)

    @functools.wraps(objective)
    def decorated(model, *, features, **named):
        return objective(model, features, **named)

    model = Net()
    step = apexfx.train_step(model, objective=decorated, optimizer=SGD(model.parameters(), lr=0.125), inner="eager")
    step(features=X, labels=Y)
    with pytest.raises(TypeError) as raised:  # which eager raises too
        step(features=X, targets=Y)
    assert "objective takes no 'features'" not in str(raised.value)


def test_a_line_of_the_program_is_quoted_as_it_stands():
    def objective(model, x, labels):
        batch = (labels, x)
        print(batch[1].shape)
        return F.cross_entropy(model(x), labels)

    model = Net()
    step = apexfx.train_step(model, objective=objective, optimizer=SGD(model.parameters(), lr=0.125), inner="eager")
    with pytest.raises(RuntimeError, match=r"in objective: print\(batch\[1\].shape\)"):
        step(X, Y)


def test_nothing_is_captured_in_anomaly_mode():
    step = make()
    with torch.autograd.set_detect_anomaly(True):
        for call in (step.capture, step):
            with pytest.raises(RuntimeError, match="set_detect_anomaly.*fallback='transform'"):
                call(X, Y)
    step(X, Y)


def test_fullgraph_false_is_refused():
    with pytest.raises(ValueError, match="fullgraph=False was given, and a training step is one graph.*fallback='transform'"):
        make(fullgraph=False)


def test_a_loss_that_takes_the_model_is_led_to_objective():
    step = make(loss_fn=lambda model, x: model.forward(x).sum())
    with pytest.raises(RuntimeError, match=r"loss_fn takes what the model returns.*\n.*\n.*computes f\(model, \*batch\)"):
        step(X, X)


def check_text(name, how, call, step, error, phrases, logged):
    with pytest.raises(error) as raised:
        call(step)
    text = "\n".join([str(raised.value), *raised.value.__notes__]) if hasattr(raised.value, "__notes__") else str(raised.value)
    assert not [record.getMessage() for record in logged.records if record.levelname in ("WARNING", "ERROR")]
    print(f"\n---- {name}, {how}\n{type(raised.value).__name__}: {text}")
    assert len(text.splitlines()) <= 10
    for phrase in phrases:
        assert any(one in text for one in phrase.split("|")), (phrase, text)


@pytest.mark.long
@pytest.mark.parametrize("branches", [False, True], ids=["one graph", "in pieces"])
@pytest.mark.parametrize("opt_level", ["O0", "O2"])
def test_a_wrong_call_says_what_is_wrong_and_changes_nothing(branches, opt_level, caplog):
    step = make(branches, opt_level=opt_level)
    by_keyword = make(branches, None, objective=objective, opt_level=opt_level)
    if branches:  # a wrong first call is below
        step(X, Y)
        by_keyword(x=X, labels=Y)
    caplog.clear()
    for name, (call, error, phrases) in {**CALLS, **KEYWORDS}.items():
        if opt_level == "O2" and name not in ("step((x, y))", "step(x.long(), y)", "step(x[:, :5], y)"):
            continue
        each = by_keyword if name in KEYWORDS else step
        before, random = copy.deepcopy(each.state_dict()), torch.get_rng_state()
        check_text(name, f"{opt_level}, {'in pieces' if branches else 'one graph'}", call, each, error, phrases, caplog)
        torch.testing.assert_close(each.state_dict(), before, rtol=0, atol=0)
        assert branches or type(each.model.__dict__.get("last", X)) is torch.Tensor
        assert branches or name == "step(x, y + 4)" or torch.equal(random, torch.get_rng_state())
    step(X, Y)
    by_keyword(x=X, labels=Y)


@pytest.mark.long
def test_a_wrong_first_call_decides_nothing_about_the_way_a_step_runs(caplog):
    step = make(fallback="transform")
    with pytest.raises(TypeError, match="missing 1 required"):
        step(X)
    assert not caplog.text.count("apexfx:") and not step.report.notes
    step(X, Y)
    assert len(step.report.graphs) == 1 and not caplog.text.count("apexfx:")
    step = make(True)
    with pytest.raises(TypeError, match="missing 1 required"):
        step(X)
    step(X, Y)
    assert "runs in pieces" in caplog.text and sum("runs in pieces" in note for note in step.report.notes) == 1


@pytest.mark.long
@pytest.mark.parametrize("branches", [False, True], ids=["one graph", "in pieces"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_by_keyword_is_one_by_position(branches, accumulate):
    steps = [make(branches, None, objective=objective, accumulate=accumulate) for _ in range(2)]
    for _ in range(4):
        torch.manual_seed(1)
        by_position = steps[0](X, Y)
        torch.manual_seed(1)
        assert torch.equal(by_position, steps[1](x=X, labels=Y))
    torch.testing.assert_close(steps[0].state_dict(), steps[1].state_dict(), rtol=0, atol=0)
    if not branches:
        assert any("x" in line for line in steps[1].print_readable(print_output=False).splitlines()[:30])
        fresh = make(None, None, objective=objective)
        assert len(fresh.capture(x=X, labels=Y).graphs) == 1


def test_another_mistake_with_several_inputs_is_not_taken_for_a_batch_in_one():
    model = nn.Bilinear(8, 8, 4)
    step = apexfx.train_step(model, lambda y: y.mean() + "1", SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    with pytest.raises(TypeError, match=r"^unsupported operand"):
        step((X, X))


def test_errors_of_the_users_own_classes_stay_what_they_are():
    class Stop(Exception):
        pass

    def stops(model, x, y):
        torch._dynamo.graph_break()
        raise Stop("enough")

    step = make(True, None, objective=stops)
    with pytest.raises(Stop) as raised:
        step(X, Y)
    assert str(raised.value) == "enough"


@pytest.mark.parametrize("dtype, what", [(torch.int32, "what is torch.int32"), (torch.uint8, "what is torch.uint8"),
                                         (torch.float32, "those that are floats")])
def test_class_labels_of_another_dtype_are_led_to_long(dtype, what):
    with pytest.raises(RuntimeError) as raised:
        make()(X, Y.to(dtype))
    assert raised.value.__notes__[-1].endswith(f"call .long() on {what}")


@pytest.mark.parametrize("branches", [False, True])
def test_a_write_to_what_the_backward_reads_is_told_as_such(branches):
    def loss_fn(out, labels):
        saved = out.tanh()
        return F.cross_entropy(saved * 2, labels) + 0 * saved.add_(1).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        make(branches, loss_fn)(X, Y)
    assert raised.value.__notes__ == ["  model or loss writes in place what the backward reads; write it out of place: x = x + 1"]


@pytest.mark.long
def test_an_error_of_a_kernel_says_how_the_step_was_called():
    step = make(loss_fn=lambda out, labels: F.cross_entropy(out, labels * 1), inner="inductor", opt_level="O2", dtype="bfloat16")
    step(X, Y)
    with pytest.raises(IndexError, match="model or loss computes, .* is out of range, expected 0 <= index < 4;") as raised:
        step(X, Y + 4)
    assert ".cpp" not in str(raised.value) and "step(float32[6, 8], int64[6])" in raised.value.__notes__[-1]
    with pytest.raises(RuntimeError, match="an earlier step failed .*out of range"):
        step(X, Y)


def test_an_index_out_of_range_is_told_where_nothing_is_noted():
    error = RuntimeError("index out of bounds: 0 <= tmp4 < 5")
    error.of_compiler = True
    with pytest.raises(IndexError, match="expected 0 <= index < 5"), Call(objective, (X, Y), {}).explained():
        raise error


def test_an_error_of_a_graph_that_runs_op_by_op_names_the_op_and_its_line():
    step = make(loss_fn=lambda out, labels: F.cross_entropy(out, labels * 1))
    for labels in (Y + 4, Y, Y + 4):  # the first call of a graph has other frames
        with contextlib.nullcontext() if labels is Y else pytest.raises(
                IndexError, match=r"Target 4 is out of bounds.\n  apexfx: raised by aten.nll_loss_forward.default"
                                  r"\(_log_softmax, mul\) at .*test_wrong_call.py:\d+, in <lambda>: step = make"):
            step(X, labels)


@pytest.mark.long
def test_a_position_behind_the_last_of_a_table_is_told_as_an_index():
    step = make(loss_fn=lambda out, labels: F.cross_entropy(out + F.embedding(torch.arange(len(out)), torch.ones(5, 4)), labels),
                inner="inductor")
    with pytest.raises(IndexError, match="model or loss computes, .* is out of range, expected 0 <= index < 5;"):
        step(X, Y)


@pytest.mark.long
def test_sizes_that_differ_from_call_to_call_are_numbers_in_an_error():
    """Of an op, of torch's Python, and of a transformed model."""
    step, model = make(), apexfx.transform(Net(), opt_level="O0", inner="eager")
    for rows in (6, 5):
        step(X[:rows], Y[:rows])
        model(X[:rows])
    wide = r"\[4, 7\] X \[8, 16\]"
    for call, said in ((lambda: step(X[:4, :7], Y[:4]), wide), (lambda: model(X[:4, :7]), wide),
                       (lambda: step(X[:4], Y[:3]), r"input batch_size \(4\) to match target batch_size \(3\)")):
        with pytest.raises((RuntimeError, ValueError), match=said):
            call()


# ---- what a failed call has changed ------------------------------------------------------------------------------------------


class Fails(apexfx.Pass):
    """Have the graph fail in front of its first node that does something, of its first in-place op, or at its end."""

    name, stage = "fails", "step"
    now = True

    def __init__(self, where):
        super().__init__()
        self.where = where

    def call(self, gm):
        def fail():
            if self.now:
                raise RuntimeError("in the graph")

        nodes = [node for node in gm.graph.nodes if node.op != "placeholder"]
        writes = [node for node in nodes if "_.default" in str(node.target) or "_.Tensor" in str(node.target)]
        with gm.graph.inserting_before({"first": nodes[0], "before the update": writes[0], "after it": writes[0].next,
                                        "last": nodes[-1]}[self.where]):
            gm.graph.call_function(fail).meta["val"] = None
        return torch.fx.passes.infra.pass_base.PassResult(gm, True)


@table(2, "where, breaks, batch_norm", [
    ("first", False, True), ("before the update", False, False), ("before the update", False, True), ("after it", True, False),
    ("last", True, False)])
def test_a_failure_breaks_a_step_where_its_graph_has_written_something(where, breaks, batch_norm):
    fails = Fails(where)
    model = nn.Sequential(Net(), *([nn.BatchNorm1d(4)] if batch_norm else []))
    step = apexfx.train_step(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             passes=[fails])
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(RuntimeError, match="in the graph"):
        step(X, Y)
    fails.now = False
    if breaks:
        with pytest.raises(RuntimeError, match="had begun to change"):
            step(X, Y)
        return
    torch.testing.assert_close(step.state_dict(), before, rtol=0, atol=0)
    step(X, Y)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(step.state_dict(), before, rtol=0, atol=0)
