"""transform(): what it refuses, and what it says where nothing was to be done."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import amp
from tests.small_models import Model
from tests.tables import table
from tests.transform_models import Net, images, transformed


@pytest.mark.parametrize(("wrap", "error", "message"), [
    (lambda m: "model", TypeError, "expected a torch.nn.Module"),
    (transformed, ValueError, "transformed already"),
    (torch.compile, ValueError, "not the result of torch.compile"),
    (lambda m: nn.DataParallel(m), ValueError, "the model is wrapped in DataParallel"),
    (lambda m: nn.Sequential(nn.DataParallel(m)), ValueError, "submodule '0' is wrapped in DataParallel"),
    (lambda m: nn.Sequential(m, transformed(m)), ValueError, "submodule '1' is transformed already"),
    (lambda m: nn.LazyLinear(3), ValueError, "has no shape yet"),
])
def test_models_that_cannot_be_transformed(wrap, error, message):
    with pytest.raises(error, match=message):
        transformed(wrap(nn.Linear(2, 2)))


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("apexfx")]


class Broken(nn.Module):
    """Two graphs: a ReLU, which no rule casts, and `last`."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def forward(self, x):
        x = torch.relu(x)
        torch._dynamo.graph_break()
        return self.last(x)


NOTHING = "precision rewrote nothing: every op already gets the dtype its rule asks for, or has no rule (torch.relu)"


def test_nothing_to_rewrite_is_said(caplog):
    model = transformed(Broken(nn.ReLU()), opt_level="O1")
    for _ in range(2):
        model(torch.randn(3))
    of_break, of_pass = warnings_of(caplog)
    assert "Dynamo broke the graph 1 time" in of_break and of_pass == f"apexfx: {NOTHING}"
    assert str(model.report).count("rewrote nothing") == 1 and f"warning: {NOTHING}" in str(model.report)
    with pytest.raises(apexfx.PassError, match="precision.*rewrote nothing"):
        transformed(nn.ReLU(), opt_level="O1", fullgraph=True)(torch.randn(3))


def test_a_graph_without_anything_to_rewrite_is_no_warning_where_another_has_something(caplog):
    model = transformed(Broken(nn.Linear(3, 3)), opt_level="O1")
    model(torch.randn(2, 3))
    assert len(model.report.graphs) == 2 and model.report.graphs[0].forward.passes[0].warning
    assert not any("rewrote nothing" in text for text in (*warnings_of(caplog), str(model.report)))


@table(1, "options", [{"inner": "eager"}, None])
def test_the_backend_knows_the_graphs_so_far(caplog, options):
    model = torch.compile(Broken(nn.Linear(3, 3)), backend="apex", options=options)
    for _ in range(2):
        model(torch.randn(2, 3))
    of_break, of_pass = warnings_of(caplog)
    assert "Dynamo broke the graph" in of_break and of_pass == "apexfx: " + NOTHING.replace("nothing", "nothing so far")
    assert "rewrote nothing" not in str(apexfx.last_report())
    assert len(apexfx.last_report().graphs) == 2


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_double_parameters_are_said_to_be_left_alone(caplog, level):
    said = ("parameters and buffers are torch.float64, which is left alone ({}); call .float() on the model first to have it "
            "cast")
    model = transformed(nn.Linear(3, 3).double(), opt_level=level)
    assert model(torch.randn(2, 3, dtype=torch.float64)).dtype == torch.float64
    nothing = f"precision rewrote nothing: 2 of 2 {said.format('weight, bias')}"
    assert warnings_of(caplog) == [f"apexfx: {nothing}"] and f"warning: {nothing}" in str(model.report)

    caplog.clear()
    head = Model(lambda m, x: m.head(m.body(x).double()), body=nn.Linear(3, 3), head=nn.Linear(3, 3).double())
    model = transformed(head, opt_level=level)
    model(torch.randn(2, 3))
    some = f"2 of 4 {said.format('head.weight, head.bias')}"
    assert warnings_of(caplog) == [f"apexfx: {some}"] and some in str(model.report)
    assert {p.dtype for p in model.head.parameters()} == {torch.float64}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_complex_parameters_are_said_to_be_left_alone_by_a_half_model(caplog, level):
    source = Model(lambda m, x: m.linear((x * m.phase).abs()), linear=nn.Linear(3, 3),
                   phase=nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    model = transformed(source, opt_level=level, verify="off")
    model(torch.randn(2, 3))
    said = "1 of 3 parameters and buffers are torch.complex64, which is left alone (phase)"
    assert warnings_of(caplog) == ([f"apexfx: {said}"] if level != "O1" else [])
    assert (said in str(model.report)) is (level != "O1") and model.phase.dtype == torch.complex64


def test_sync_bn_on_one_process_is_said():
    model = transformed(nn.BatchNorm1d(2), sync_bn=True)
    model(torch.randn(3, 2))
    assert "without a process group" in str(model.report)


@pytest.mark.parametrize("make", [
    lambda m: transformed(m, sync_bn=True),
    lambda m: torch.compile(m, backend="apex", options={"sync_bn": True, "inner": "eager"})(torch.randn(3, 2)),
    lambda m: apexfx.train_step(m, nn.MSELoss(), torch.optim.SGD(m.parameters(), lr=0.1), sync_bn=True),
    lambda m: apexfx.parallel.convert_syncbn_model(m)(torch.randn(3, 2)),
])
def test_sync_bn_before_there_is_a_group_is_refused_where_other_ranks_were_started(monkeypatch, make):
    monkeypatch.setenv("WORLD_SIZE", "1")
    make(nn.Sequential(nn.BatchNorm1d(2)))
    torch._dynamo.reset()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Exception, match=r"before torch.distributed.init_process_group\(\), and WORLD_SIZE=2 says that there are"):
        make(nn.Sequential(nn.BatchNorm1d(2)))
    apexfx.parallel.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2))).eval()(torch.randn(3, 2))


def test_cuda_graphs_are_refused_off_cuda():
    with pytest.raises(ValueError, match="inner='cudagraphs' was given for a model that is not on CUDA"):
        transformed(nn.Linear(2, 2), inner="cudagraphs")(torch.randn(3, 2))


def test_a_dtype_the_device_cannot_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    from apexfx.compiler.model_setup import _can_compute

    assert not _can_compute(torch.device("cuda"), torch.bfloat16)
    assert _can_compute(torch.device("cuda"), torch.float16) and _can_compute(torch.device("cpu"), torch.bfloat16)


def test_a_failed_transform_leaves_the_model():
    source = Net()
    before = {name: (p.dtype, id(p)) for name, p in source.named_parameters()}
    with pytest.raises(ValueError, match="skip names 'precison', which is no pass; did you mean 'precision'"):
        apexfx.transform(source, opt_level="O3", skip=("precison",))
    with pytest.raises(ValueError, match="precision={'conv': 'flot32'} was given, expected torch.float32"):
        apexfx.transform(source, opt_level="O3", precision={"conv": "flot32"})
    assert {name: (p.dtype, id(p)) for name, p in source.named_parameters()} == before


@pytest.mark.parametrize("opt_level", [pytest.param("O0", marks=pytest.mark.long), "O1", "O2"])
@pytest.mark.parametrize("inside", [False, True])
def test_casts_of_amp_and_of_transform_are_not_stacked(opt_level, inside):
    def initialised(level):
        model = amp.initialize(Net(), opt_level=level, verbosity=0)
        return nn.Sequential(model) if inside else model

    where = "submodule '0'" if inside else "the model"
    with pytest.raises(ValueError, match=f"{where} was given to amp.initialize, which casts each of its calls in eager"):
        transformed(initialised("O1"), opt_level=opt_level)
    for level in ("O2", "O3"):
        model = initialised(level)
        if opt_level != "O0":
            with pytest.raises(ValueError, match=f"has cast it to torch.bfloat16; opt_level='{opt_level}' would cast on top"):
                transformed(model, opt_level=opt_level)
            continue
        model = transformed(model)
        assert model(images()).dtype == torch.float32
        assert any(f"{where} was given to amp.initialize: its casts to" in note for note in model.report.notes)


@pytest.mark.long
def test_amp_without_casts_goes_with_any_level():
    model = transformed(amp.initialize(Net(), opt_level="O0", verbosity=0), opt_level="O2")
    model(images()).sum().backward()
    assert model.report.casts() and not any("amp" in note for note in model.report.notes)


def test_a_loss_that_compilers_count_padded_targets_in_is_refused_and_right_outside():
    """pytorch#141017, mended in 2.14."""
    x, targets, model = torch.randn(3, 4), torch.tensor([[0, -1, -1, -1], [2, 1, -1, -1], [3, 0, 1, 2]]), nn.Linear(4, 4)
    step = apexfx.train_step(model, F.multilabel_margin_loss, torch.optim.SGD(model.parameters(), lr=0.0), opt_level="O0",
                             inner="eager")
    expected = F.multilabel_margin_loss(model(x), targets)
    if torch.__version__ < (2, 14):
        with pytest.raises(ValueError, match=r"calls multilabel_margin_loss, .*; take that torch, or transform\(\) the model"):
            step(x, targets)
    else:
        torch.testing.assert_close(step(x, targets), expected.detach())
    loss = F.multilabel_margin_loss(apexfx.transform(model, opt_level="O0", inner="eager")(x), targets)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())),
                               torch.autograd.grad(expected, list(model.parameters())))
