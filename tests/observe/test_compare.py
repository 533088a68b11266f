"""`compare()`: the op and line that make the error are named, nothing is changed, and what cannot be compared says so."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.__main__ import main
from tests.small_models import Model
from tests.tables import table

X = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))


@torch.library.custom_op("apexfx_tests::rounded", mutates_args=())
def rounded(x: torch.Tensor) -> torch.Tensor:
    return (x * 16).round() / 16


rounded.register_fake(torch.empty_like)
rounded.register_autograd(lambda ctx, grad: grad)  # straight through


@torch.library.custom_op("apexfx_tests::of_float32", mutates_args=())
def of_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise NotImplementedError
    return x * 2


of_float32.register_fake(torch.empty_like)


class Net(nn.Module):
    def __init__(self, what=""):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.what, self.num_calls = what, 0

    def forward(self, x):
        self.num_calls += 1
        h = self.norm(self.a(x))
        if self.what == "overflow":
            h = (200 * h @ (200 * h).transpose(-1, -2)).softmax(-1) @ h  # overflow
        if self.what == "variance":
            h = h + 3000
            variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2  # variance
            h = (h - h.mean(-1, keepdim=True)) / (variance.abs() + 0.1).sqrt()
        if self.what == "rounded":
            h = rounded(h)
        if self.what == "difference":
            large = h + 200000  # difference
            h = large - 200000  # magnified
        if self.what == "sigmoid":
            probability = torch.sigmoid(h + 16)  # sigmoid
            h = h + torch.log(1 - probability).clamp(min=-100)  # lost by sigmoid
        if self.what == "eps":
            divisor = (h.half() * 0).abs() + 1e-9  # eps
            h = h + (h.half() * 0 / divisor).float()  # lost by eps
        if self.what == "squares":
            squares = (h.half() * 1e-5) ** 2  # squares
            h = h + squares.sum(-1, keepdim=True).sqrt().float()  # lost by squares
        if self.what == "root":
            h = h + (h * 0).abs().sqrt()  # root
        return self.c(F.dropout(F.gelu(self.b(h)), 0.1) + x)


def line_of(comment):
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return f"test_compare.py:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {comment}'))}"


@table(1, "what, line, text", [("difference", "magnified", "times as much"),
                               *((what, f"lost by {what}", "nan or an infinity")
                                 for what in ("sigmoid", "eps", "squares"))])  # fmt: skip
def test_what_a_later_op_makes_of_an_error_is_said(what, line, text):
    comparison = apexfx.compare(Net(what), X)
    assert f"({line_of(line)}) makes " in comparison.verdict and text in comparison.verdict, comparison
    assert comparison.verdict.count("nan or an infinity") <= 1 and comparison[0].stands_out


@table(1, "options", [None, {}, {"opt_level": "O2"}, {"dtype": torch.float16}], ids=str)
def test_nothing_stands_out_in_a_clean_model(options):
    model = Net()
    if options is not None:
        model = apexfx.transform(model, inner="eager", **{"dtype": torch.bfloat16, **options})
    comparison = apexfx.compare(model, X)
    assert "no op stands out" in comparison.verdict and 0 < max(comparison.errors.values()) < 0.05, comparison
    assert {row.phase for row in comparison} == {"forward", "backward"}
    assert sum(row.share for row in comparison) == pytest.approx(1, abs=0.3)


class Steep(nn.Module):
    """A layer of which nothing but the gradients of its parameters is wrong, by an op behind it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return (y[0] if isinstance(y, tuple) else y).bfloat16().tanh().float()


class Imaginary(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return torch.fft.fft(self.scale * x).imag


@pytest.mark.parametrize("model, shape", [(Steep(nn.LayerNorm(8)), (4, 8)), (Imaginary(), (4, 16))],
                         ids=["layer norm", "complex"])
def test_what_a_gradient_inherits_has_a_share(model, shape):
    comparison = apexfx.compare(model, torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    assert not [note for note in comparison.notes if "first order" in note]
    assert all(row.share is not None for row in comparison)


@pytest.mark.parametrize("loss_fn", [None, lambda out, target: (out - target).abs().square().mean()])
def test_complex_outputs_and_gradients_are_compared(loss_fn):
    model = Model(lambda m, x: torch.fft.fft((x.half() * 1e-3).float()) @ m.weight,
                  weight=nn.Parameter(torch.linspace(0, 1, 16).view(4, 4).cfloat()))
    comparison = apexfx.compare(model, (torch.randn(3, 4), *([torch.ones(3, 4)] if loss_fn else [])), loss_fn=loss_fn)
    assert comparison.errors["gradient of weight"] > 1e-5 and sum(row.share for row in comparison) == pytest.approx(1, abs=0.1)


class Phases(nn.Module):
    """Angles of hundreds, beside an op whose backward has no derivative."""

    def __init__(self):
        super().__init__()
        self.bag, self.frequencies, self.out = nn.EmbeddingBag(20, 16, mode="mean"), nn.Linear(1, 16), nn.Linear(16, 16)
        nn.init.normal_(self.frequencies.weight, std=300.0)

    def forward(self, tags, onset):
        return self.out(self.bag(tags) + torch.sin(self.frequencies(onset)))


def test_an_op_without_a_derivative_leaves_others_their_shares():
    generator = torch.Generator().manual_seed(2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = apexfx.transform(Phases(), dtype=torch.bfloat16, inner="eager")
    batch = torch.randint(20, (8, 4), generator=generator), torch.rand(8, 1, generator=generator)
    comparison = apexfx.compare(model, batch)
    assert comparison[0].module == "frequencies" and "torch.sin" in comparison[0].consequence, comparison
    assert comparison[0].share == pytest.approx(1, abs=0.1), comparison


class Inner(nn.Module):
    """A gradient that is narrowed between a bag of embeddings, which alone is wrong by it, and layers that have little error."""

    def __init__(self):
        super().__init__()
        self.bag, self.layers = nn.EmbeddingBag(20, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, tags):
        y = self.bag(tags)
        narrow = y.bfloat16().float()
        return self.layers(y + narrow - narrow.detach())


def test_an_error_that_shares_cannot_see_is_not_given_to_others():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Inner()
    comparison = apexfx.compare(model, torch.randint(20, (4, 3), generator=torch.Generator().manual_seed(2)))
    assert all(row.share is None for row in comparison) and {row.dtype for row in comparison[:2]} == {"bf16"}, comparison
    assert any("no shares" in note for note in comparison.notes)


def test_what_has_no_derivative_is_said():
    comparison = apexfx.compare(Steep(nn.GRU(8, 8)), torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2)))
    assert any("an op without a second derivative" in note for note in comparison.notes)


@pytest.mark.long
def test_the_verdict_names_no_share_where_shares_do_not_hold():
    comparison = apexfx.compare(apexfx.transform(Net("variance"), dtype=torch.bfloat16, inner="eager"), X)
    assert any("first order, and most of the error is not" in note for note in comparison.notes), comparison
    assert "of the error" not in comparison.verdict.replace("of the error of its inputs", ""), comparison.verdict


def test_a_straight_through_estimator_is_no_fault():
    assert "no op stands out" in apexfx.compare(Net("rounded"), X).verdict


class Attention(nn.Module):
    """Fused attention whose keys have lost most of their digits, in an op before it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 4)

    def forward(self, x):
        query, key, value = self.qkv(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        narrow = (key + 300).bfloat16()  # keys
        key = narrow.float() - 300
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


@pytest.mark.long
def test_an_error_goes_through_attention():
    comparison = apexfx.compare(Attention(), X)
    assert comparison.errors["output 0"] > 0.1 and f"({line_of('keys')})" in comparison.verdict, comparison
    [row] = [row for row in comparison if "attention" in row.op and row.phase == "forward"]
    assert 0 < row.introduced < 1e-6 and row.inherited > 0.05, comparison


def test_the_error_of_attention_itself_is_measured():
    comparison = apexfx.compare(apexfx.transform(Attention(), dtype=torch.bfloat16, inner="eager"), X)
    [row] = [row for row in comparison if "attention" in row.op and row.phase == "forward"]
    assert row.introduced > 1e-4, comparison


def test_random_numbers_are_those_of_the_run():
    comparison = apexfx.compare(Model(lambda model, x: model.a(x) + torch.rand_like(x), a=nn.Linear(8, 8)), X[..., :8])
    assert 0 < comparison.errors["output 0"] < 1e-6, comparison


def test_an_op_without_a_kernel_in_float64_hands_errors_on():
    model = Model(lambda model, x: of_float32((model.a(x) + 300).bfloat16().float() - 300), a=nn.Linear(8, 8)).eval()
    comparison = apexfx.compare(model, X[..., :8])
    assert any("of_float32.default cannot run in float64" in note for note in comparison.notes), comparison
    assert comparison.errors["output 0"] > 0.1, comparison


def test_bits_that_are_seen_as_another_dtype_are_those_of_the_run():
    def forward(model, x):
        bits = model.a(x).bfloat16().detach().view(torch.int16) & -16  # three bits of each mantissa
        return model.b(bits.view(torch.bfloat16).float())

    comparison = apexfx.compare(Model(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), X[..., :8])
    assert 0 < comparison.errors["output 0"] < 1e-5, comparison


@pytest.mark.long
def test_a_step_is_compared_by_its_own_loss():
    model = Net("overflow")
    step = apexfx.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters()), dtype=torch.float16, inner="eager")
    comparison = apexfx.compare(step, (X, X))
    assert comparison[0].is_lost and comparison[0].source == line_of("overflow"), comparison
    assert "loss" in comparison.errors and "gradient of a.weight" in comparison.errors and not step.optimizer.state


def residual(model, points):
    """A loss of first and second derivatives: each layer gets several gradients, which autograd sums."""
    points = points.detach().requires_grad_()
    u = model(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), points, create_graph=True)
    return (second + u * first).square().mean()


def skipped(model, points):
    """A loss of layers with connections around them, whose gradients are sums, too."""
    for layer in (model[0], model[2]):
        points = points + layer(points).tanh()
    return points.square().mean()


@pytest.mark.parametrize("objective, num_derivatives", [(residual, 2), (skipped, 0)])
def test_a_sum_of_gradients_is_not_blamed_on_the_loss(objective, num_derivatives):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = apexfx.train_step(model, objective=objective, optimizer=optimizer, dtype=torch.bfloat16, inner="eager")
    comparison = apexfx.compare(step, X[0])
    rows = [row for row in comparison if row.op in ("mean", "square") and row.phase == "backward"]
    assert rows and not any("aten.add" in row.call for row in rows), comparison
    assert {row.dtype for row in rows} == {"f32"}, "of the loss; the sums are of half tensors"
    lines, first = inspect.getsourcelines(objective)
    derivatives = [f"test_compare.py:{first + i}" for i, line in enumerate(lines) if "autograd.grad" in line]
    assert len(derivatives) == num_derivatives
    assert [line for line in derivatives if not any(row.source == line for row in comparison)] == []
    assert sum(f"the derivative at {', '.join(derivatives)}" in note for note in comparison.notes) == bool(derivatives)
    text = str(step.capture(X[0]).ops())
    assert (f"the derivative at {', '.join(derivatives)} have no rows" in text) == bool(derivatives)


def test_a_formula_that_is_not_finite_is_no_matter_of_dtypes():
    comparison = apexfx.compare(Net("root"), X)
    assert "not a matter of dtypes: aten.div.Tensor in the backward" in comparison.verdict
    assert line_of("root") in comparison.verdict


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "transformed", "step"])
def test_everything_is_left_as_it_was(kind):
    model = nn.Sequential(Net(), nn.BatchNorm1d(8))
    subject, batch = model, X
    if kind == "transformed":
        subject = apexfx.transform(model, dtype=torch.bfloat16, inner="eager")
    if kind == "step":
        subject, batch = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                                           dtype=torch.bfloat16, inner="eager"), (X, X)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    random, x = torch.get_rng_state(), X.clone()
    first = apexfx.compare(subject, batch)
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(X, x) and model[0].num_calls == 0
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(bool((p.grad == 2).all()) for p in model.parameters())
    assert kind == "plain" or not subject.report.graphs
    assert apexfx.compare(subject, batch).errors == first.errors  # dropout included


def test_a_model_in_eval_mode_has_no_backward():
    comparison = apexfx.compare(Net().eval(), X)
    assert list(comparison.errors) == ["output 0"] and {row.phase for row in comparison} == {"forward"}


def test_where_nothing_can_be_compared_nothing_is_said_to_be_right():
    model = Model(lambda m, x: m.fc(x.bfloat16().float()).argmax(-1), fc=nn.Linear(4, 4)).eval()
    assert apexfx.compare(model, torch.randn(3, 4)).verdict.startswith("nothing to compare")


def test_a_loss_is_that_of_the_targets():
    comparison = apexfx.compare(Net(), (X, X), loss_fn=F.mse_loss)
    assert "loss" in comparison.errors and any("mse_loss" in row.op for row in comparison)


def test_a_gradient_that_is_zero_by_the_formula_is_left_out():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    comparison = apexfx.compare(apexfx.transform(model, dtype=torch.bfloat16, inner="eager"), torch.randn(2, 2, 6, 6))
    assert "gradient of 0.bias" not in comparison.errors and "the gradient of 0.bias is zero by the formula" in str(comparison)


@pytest.mark.long
def test_a_compiled_model_says_what_fusion_changes():
    assert "Inductor keeps what is between the ops of one kernel in float32" in str(apexfx.compare(torch.compile(Net()), X))
    model = torch.compile(Net(), backend="apex", options={"dtype": torch.bfloat16, "inner": "eager"})
    assert any(row.dtype == "bf16" for row in apexfx.compare(model, X))


def test_a_sparse_gradient_is_refused():
    with pytest.raises(ValueError, match=r"the gradient of '0.weight' is sparse.*sparse=False"):
        apexfx.compare(nn.Sequential(nn.Embedding(4, 2, sparse=True)), torch.tensor([1, 2]))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return torch.cond(h.sum() < 1e9, lambda h: (h + 300).bfloat16().float() - 300, lambda h: h * 3, (h,))  # branch


@pytest.mark.long
def test_a_cast_in_a_branch_is_seen():
    comparison = apexfx.compare(Branches(), X[..., :8])
    assert comparison[0].source == line_of("branch") and comparison.errors["output 0"] > 0.1, comparison


def test_what_a_loss_trains_goes_by_its_name():
    loss = nn.Module()
    loss.scale = nn.Parameter(torch.ones(()))
    loss.forward = lambda y, target: F.mse_loss(loss.scale * y, target)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD([*model.parameters(), loss.scale], lr=0.1)
    step = apexfx.train_step(model, loss, optimizer, inner="eager", opt_level="O0")
    assert "gradient of objective.loss_fn.scale" in apexfx.compare(step, (X, X)).errors
    assert "gradient of objective.loss_fn.scale" in apexfx.compare(model, (X, X), loss_fn=loss).errors, "without an optimizer"


@pytest.mark.long
def test_it_goes_into_json():
    data = json.loads(json.dumps(apexfx.compare(Net("overflow").half(), X.half()).to_json()))
    assert data["rows"][0]["is_lost"] and data["rows"][0]["dtype"] == "f16" and data["errors"]["output 0"] == "inf"


@pytest.mark.parametrize("arguments, options, error", [
    ((3, X), {}, "compare() was given int, expected a torch.nn.Module or what train_step() returns"),
    ((Net(), X, X), {}, "expected the batch as one argument: compare(step, (inputs, targets))"),
    ((Net(), X, "bfloat16"), {}, "reference='bfloat16' was given, expected 'float64' or 'float32'"),
    ((Net(), X, None), {}, "reference=None was given"), ((Net(), X), {"loss_fn": 3}, "expected a function"),
])  # fmt: skip
def test_wrong_arguments(arguments, options, error):
    with pytest.raises((TypeError, ValueError)) as raised:
        apexfx.compare(*arguments, **options)
    assert error in str(raised.value)


def test_what_is_not_one_graph_is_refused_with_the_place():
    branches, prints = Net(), Net()
    branches.forward = lambda x: branches.c(x) if x.sum() > 0 else x
    prints.forward = lambda x: print("here") or prints.c(x)
    for model, reason in ((branches, "Data-dependent"), (prints, r"print\(\) of Python is called")):
        with pytest.raises(RuntimeError, match=rf"compare\(\) runs .* as one graph, and cannot: {reason}") as raised:
            apexfx.compare(model, X)
        assert "test_compare.py:" in str(raised.value) and "step" not in str(raised.value)


LABELS = torch.tensor([0, 40])
WRONG_BATCHES = {
    "shape": (lambda m: apexfx.compare(m, X[..., :5]), RuntimeError, [
        "h = self.norm(self.a(x))", "called: compare(model, float32[2, 8, 5])"]),
    "targets without loss_fn=": (lambda m: apexfx.compare(m, (X, LABELS)), TypeError, [
        "forward(): ", "which computes model(float32[2, 8, 32], int64[2])",
        "targets go with loss_fn= alone"]),
    "name": (lambda m: apexfx.compare(m, {"y": X}), TypeError, ["forward()", "{'y': float32[2, 8, 32]}"]),
    "no targets": (lambda m: apexfx.compare(m, X, loss_fn=F.mse_loss), TypeError, [
        "'target'", "which computes loss_fn(model(float32[2, 8, 32]))", "expected: compare(model, (inputs, *targets), loss_fn="]),
    "by name with loss_fn=": (lambda m: apexfx.compare(m, {"x": X}, loss_fn=F.mse_loss), TypeError, [
        "compare(model, {'x': float32[2, 8, 32]}, loss_fn=loss_fn) was called, expected compare(model, (inputs, *targets)"]),
    "label": (lambda m: apexfx.compare(m, (X, LABELS), loss_fn=lambda y, t: F.cross_entropy(y[:, 0], t)), IndexError, [
        "Target 40 is out of bounds", "in F.cross_entropy", "test_compare.py:"]),
}


@table(3, "what", WRONG_BATCHES)
def test_a_wrong_batch_says_what_was_given_and_what_is_expected(what):
    call, error, phrases = WRONG_BATCHES[what]
    for model in (Net(), apexfx.transform(Net(), dtype=torch.bfloat16, inner="eager")):
        with pytest.raises(error) as raised:
            call(model)
        text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
        assert all(phrase in text for phrase in phrases) and not {"step", "Dynamo"} & set(text.split()), text


def test_a_wrong_batch_of_a_step_speaks_of_compare():
    model = Net()
    step = apexfx.train_step(model, lambda y, t: F.cross_entropy(y[:, 0], t), torch.optim.SGD(model.parameters()), inner="eager")
    with pytest.raises(IndexError, match=r"(?s)Target 40 .*called: compare\(step, \(float.*\), which .*expected: compare\(step"):
        apexfx.compare(step, (X, LABELS))


def test_the_command(tmp_path, capsys):
    program = "import torch\nmodel = torch.nn.Linear(4, 4)\nbatch = torch.randn(2, 4)\n"
    (tmp_path / "clean.py").write_text(program)
    (tmp_path / "none.py").write_text("model = 1\n")
    assert main(["compare", str(tmp_path / "clean.py"), "--json", str(tmp_path / "out.json")]) == 0
    assert "no op stands out" in capsys.readouterr().out and json.loads((tmp_path / "out.json").read_text())["rows"]
    assert main(["compare", str(tmp_path / "none.py")]) == main(["compare", str(tmp_path / "absent.py")]) == 2
    said = capsys.readouterr().err
    assert "has to define `batch`" in said and "absent.py' is not there; give a Python file" in said
    (tmp_path / "own.py").write_text("open('no such data')")
    assert main(["compare", str(tmp_path / "own.py")]) == 2
    assert "no such data" in capsys.readouterr().err  # with the program's own line


def test_a_float8_result_is_compared():
    def forward(net, x):
        h = net.a(x)
        return h + h.detach().to(torch.float8_e4m3fn).float()

    assert "to" in str(apexfx.compare(Model(forward, a=nn.Linear(4, 4)), (torch.randn(3, 4),)))
