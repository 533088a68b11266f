"""What Dynamo captures of a transformed model's forward, and what is said of the rest."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import apexfx
from apexfx.compiler import compiled_model, rewritten_graph
from tests.backward_graphs import TwoGraphs
from tests.small_models import Model
from tests.tables import table
from tests.transform_models import transformed


@pytest.mark.long
def test_many_models_of_one_class():
    for n in range(12):
        assert transformed(nn.Linear(2, 2))(torch.randn(n + 1, 2)).shape == (n + 1, 2)


def test_graph_breaks_are_compiled_on_both_sides():
    source = TwoGraphs()
    reference = copy.deepcopy(source)
    model = transformed(source)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    reference(x).sum().backward()
    assert len(model.report.graphs) == 2
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters()))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        transformed(TwoGraphs(), fullgraph=True)(x)


def test_a_training_loop_looks_through_no_modules(monkeypatch):
    model, x = transformed(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))), torch.randn(3, 4)
    for _ in range(2):
        model(x).sum().backward()
    monkeypatch.setattr(compiled_model, "all_modules", lambda _: pytest.fail("modules were looked through"))
    for _ in range(2):
        model(x).sum().backward()


def test_modules_left_to_eager_are_named(caplog):
    class Disabled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.hidden(self.inside(x))

        @torch._dynamo.disable
        def hidden(self, x):
            return self.outside(x)

    model = transformed(Disabled())
    model(torch.randn(2, 4))
    assert "no captured graph holds outside.weight, outside.bias" in caplog.text
    assert any("outside.weight" in note for note in model.report.notes)


def test_nothing_captured_is_an_error():
    class Skipped(nn.Linear):
        @torch._dynamo.disable
        def forward(self, x):
            return super().forward(x)

    with pytest.raises(RuntimeError, match="Dynamo captured no graph"):
        transformed(Skipped(2, 2))(torch.randn(1, 2))


def read_from_data(net, x):
    h = net.a(x)
    cut, rows = h[:, :int((x > 0).sum(1).max())], h[(x > 0).nonzero()[:, 0]]
    return h * h.sum().item(), cut, rows, h[x[:, 0] > -0.5], h.masked_select(x > 0)


def by_rows(net, x):
    h = net.a(x)
    out = torch.zeros_like(h)
    for expert in range(3):
        rows = torch.where(h.argmax(-1) % 3 == expert)[0]
        out = out.index_add(0, rows, net.a(h[rows]).to(out.dtype))
    return (out,)


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.read = nn.Linear(4, 4), read

    def forward(self, x):
        return sum(each.float().pow(2).sum() for each in self.read(self, x))


@pytest.mark.long
@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("read", [read_from_data, by_rows])
def test_numbers_and_sizes_that_are_read_from_data_are_in_one_graph(read, level):
    reference, model = Reads(read), transformed(Reads(read), opt_level=level, verify="off")
    for seed in range(9):
        for each in (reference, model):
            each(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))).backward()
    assert len(model.report.graphs) == 1 and not model.report.notes
    for p, q in zip(model.parameters(), reference.parameters()):
        assert (p.grad - q.grad).norm() <= (1e-5 if level == "O0" else 0.03) * q.grad.norm()


def test_what_the_inner_compiler_fails_at_is_refused_with_its_line(monkeypatch):
    def fails_at_data(gm, *args, **options):
        if "item" in gm.code:
            raise NotImplementedError("View of u0")
        return eager(gm, *args, **options)

    eager = rewritten_graph.INNER["eager"]
    monkeypatch.setitem(rewritten_graph.INNER, "eager", fails_at_data)
    read, x = (lambda net, x: (net.a(x) * net.a(x).sum().item(),)), torch.randn(6, 4)
    with pytest.raises(RuntimeError, match=r"test_compiled_model.py:\d+ reads a number or a size from data.*: View") as raised:
        transformed(Reads(read))(x)
    assert "@torch.compiler.disable" in raised.value.__notes__[0]
    number = torch.compiler.disable(lambda h: h.sum().item())
    apart = transformed(Reads(lambda net, x: (net.a(x) * number(net.a(x)),)))
    torch.testing.assert_close(apart(x), Reads(read)(x))
    assert len(apart.report.graphs) > 1
    source = Reads(read)
    step = apexfx.train_step(source, lambda loss: loss, torch.optim.SGD(source.parameters(), lr=0.1), inner="eager")
    with pytest.raises(RuntimeError, match=r"(?s)reads a number or a size from data.*fallback='transform'"):
        step(x)


@pytest.mark.parametrize(("read", "cause"), [
    (lambda net, x: [net.a(x) for _ in range(2) if net.a(x).sum() > -1e9], "a branch on data at .*test_compiled_model.py"),
    (lambda net, x: [(print(end=""), net.a(x))[1] for _ in range(2)], "Failed to trace builtin operator at .*compiled_model.py"),
])
def test_a_frame_that_a_break_drops_has_its_cause_named_once(read, cause):
    class Loops(Reads):
        def forward(self, x):
            for _ in range(3):
                x = sum(self.read(self, x))
            return x

    with pytest.raises(RuntimeError, match=f"captured no graph, so nothing was transformed; {cause}"):
        transformed(Loops(read))(torch.randn(2, 4))
    model = transformed(nn.Sequential(nn.Linear(4, 4), *(Breaks() for _ in range(3))))
    model(torch.randn(2, 4))
    assert model.report.notes[0].count("Call to") == 1 and "(2 times)" in model.report.notes[0]


class Breaks(nn.Module):
    def forward(self, x):
        x = x.tanh()
        torch._dynamo.graph_break()
        return x * 2


LIMIT = torch._dynamo.exc.FailOnRecompileLimitHit


@pytest.fixture
def two_graphs_at_most():
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


@pytest.mark.parametrize("trains", [True, False])
def test_recompile_limit_raises(two_graphs_at_most, trains):
    model = transformed(nn.Linear(4, 4), dynamic=False).train(trains)
    with torch.set_grad_enabled(trains), pytest.raises(LIMIT, match="apexfx: forward was compiled 2 times"):
        for n in range(2, 6):
            model(torch.randn(n, 4))


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_a_half_layer_gets_the_half_inputs(opt_level):
    source = Model(lambda m, x: m.head(m.stem(x).float().mean((2, 3))), head=nn.Linear(4, 2), stem=nn.Conv2d(3, 4, 1).bfloat16())
    model = transformed(source, opt_level=opt_level)
    assert model(torch.ones(2, 3, 4, 4, dtype=torch.bfloat16)).shape == (2, 2) and not model.report.notes


@pytest.mark.long
def test_hugging_face_generate_goes_through_the_graphs():
    from transformers import LlamaConfig, LlamaForCausalLM

    source = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                                          vocab_size=64, max_position_embeddings=32)).eval()
    ids = torch.randint(0, 64, (1, 4))
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    expected = source.generate(ids, **options)
    model = transformed(source)
    assert torch.equal(model.generate(ids, **options), expected) and model.report.graphs
    assert model.config is source.config


@pytest.mark.long
def test_a_graph_that_the_inner_compiler_refused_is_not_in_the_report():
    def refuse(graph):
        raise ZeroDivisionError("refused")

    model, x = apexfx.transform(nn.Linear(3, 3), opt_level="O0", inner="inductor"), torch.randn(2, 3)
    for _ in range(2):
        with torch._inductor.config.patch(post_grad_custom_post_pass=refuse), \
                pytest.raises(RuntimeError, match=r"Inductor .* cannot compile this graph: ZeroDivisionError: refused") as raised:
            model(x)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert not model.report.graphs
    model(x).sum().backward()
    assert [(graph.index, graph.training) for graph in model.report.graphs] == [(0, True)]
    assert model.report.stage("backward")


class Raises(nn.Module):
    """Raises where it is told to, behind a graph break or not."""

    def __init__(self, breaks):
        super().__init__()
        self.body, self.breaks, self.error = nn.Linear(6, 6), breaks, None

    def forward(self, x):
        h = self.body(x)
        if self.breaks:
            torch._dynamo.graph_break()
        if self.error is not None:
            raise self.error
        return h @ h.t()


@table(2, "error, breaks, first", itertools.product((ValueError("no batch"), KeyboardInterrupt()), (False, True), (False, True)),
       ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None)
def test_a_forward_that_has_raised_goes_on_in_its_dtypes(error, breaks, first):
    source, x = Raises(breaks), torch.randn(5, 6)
    expected = apexfx.transform(copy.deepcopy(source), inner="eager", opt_level="O1")(x)
    assert not torch.equal(expected, source(x))
    model = apexfx.transform(source, inner="eager", opt_level="O1")
    if not first:
        model(x)
    model.error = error
    for _ in range(2):
        with pytest.raises(type(error)):
            model(x)
    model.error = None
    assert torch.equal(model(x), expected)


def solver(model, x, steps=9):
    """Integrate by Runge-Kutta's method of fourth order."""
    for _ in range(steps):
        a = model(x)
        b = model(x + a / 20)
        c = model(x + b / 20)
        x = x + (a + 2 * b + 2 * c + model(x + c / 10)) / 60
    return x


def accumulated(model, x):
    for _ in range(20):
        model(x).sum().backward()
    return model(x)


def evaluated(model, x):
    with torch.no_grad():
        solver(model, x)
    return model(x)


@table(1, "loop, warns", [(solver, True), (accumulated, False), (evaluated, False), (lambda m, x: m(m(x)), False)])
def test_a_loop_around_a_transformed_model_is_told_that_one_graph_is_faster(loop, warns, caplog):
    model = apexfx.transform(nn.Linear(4, 4), inner="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        loop(model, torch.randn(2, 4)).sum().backward()
        optimizer.step()
    text = "was called 16 times without an update, on results of other calls"
    assert caplog.text.count(text) == warns and any(text in note for note in model.report.notes) is warns


@pytest.mark.long
def test_a_loop_that_is_transformed_is_told_nothing(caplog):
    model = apexfx.transform(Model(lambda m, x: solver(m.net, x), net=nn.Linear(4, 4)), inner="eager")
    model(torch.randn(2, 4)).sum().backward()
    assert "was called" not in caplog.text
