"""The precision pass under overrides, and beside another caster."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.precision.rules import lookup
from apexfx.testing import assert_close
from tests.forward_graphs import precision
from tests.passes.precision_models import Nested, run
from tests.small_models import Model
from tests.tables import table


@table(1, "level", ["O1", "O2"])
@pytest.mark.parametrize("overrides, expected", [
    ({}, "bf16 bf16 bf16"),
    ({"encoder": torch.float32}, "f32 f32 bf16"),
    ({"encoder.1.*": "float32"}, "bf16 f32 bf16"),
    ({"linear": "float32"}, "f32 f32 f32"),
    ({"torch.linear": "float32"}, "f32 f32 f32"),
    ({"F.linear": "float32"}, "f32 f32 f32"),
    ({"torch.nn.functional.linear": "float32"}, "f32 f32 f32"),
    ({"linear": "float32", "head": torch.bfloat16}, "f32 f32 bf16"),
    ({"h*d": "float16"}, "bf16 bf16 f16"),
])  # fmt: skip
def test_overrides(level, overrides, expected):
    model, x = Nested(), torch.randn(5, 4)
    out, recorder = run(model, x, level=level, overrides=overrides)
    linears = [line.split("-> ")[1].split("[")[0] for line in recorder.text("torch.linear").splitlines()]
    assert " ".join(linears) == expected
    assert_close(out, copy.deepcopy(model)(x), dtype=torch.bfloat16, scale=2)
    if "encoder" in overrides:
        assert not any(row["tensor"].startswith("encoder") and row["rule"] == "model" for row in recorder.casts())
    if overrides:
        assert any("override" in row["reason"] for row in recorder.casts()) or "f32" in expected


@table(3, "key, near", [
    ("unet.*", ""), ("decoder.*", "; did you mean 'encoder'?"), ("encodre", "; did you mean 'encoder'?"),
    ("encodre.1.*", "; did you mean 'encoder.1'?"), ("lineer", "; did you mean 'linear'?"),
    ("F.lineer", "; did you mean 'linear'?"), ("haed", "; did you mean 'head'?"), ("1", "; did you mean 'encoder.1'?"),
    ("gleu", "; did you mean 'gelu'?"), ("gelu", ""),
])  # fmt: skip
def test_an_override_that_covers_nothing_is_named_with_the_nearest(caplog, key, near):
    model = apexfx.transform(Nested(), inner="eager", precision={key: "float32", "head": "float32"})
    model(torch.randn(5, 4))
    said = f"precision[{key!r}] covers no module path and no op{near}"
    assert [r.getMessage() for r in caplog.records if "covers" in r.getMessage()] == [f"apexfx: {said}"]


@pytest.mark.long
def test_an_override_of_one_graph_is_not_missed_in_another(caplog):
    class Broken(Nested):
        def forward(self, x):
            x = self.encoder(x)
            torch._dynamo.graph_break()
            return self.head(x)

    model = apexfx.transform(Broken(), inner="eager", precision={"head": "float32", "encoder": "float32", "haed": "half"})
    model(torch.randn(5, 4))
    assert [line for line in str(model.report).splitlines() if "covers" in line] == [
        "warning: precision['haed'] covers no module path and no op"]
    assert caplog.text.count("covers no module path") == 1


def every_spelling(m, x):
    """Call ops in the spellings that the ledger prints: functions, operators, methods, in place, of a library."""
    y = F.gelu(m.fc(x)) + F.softmax(m.fc(x), -1) + m.fc(x).softmax(-1)
    z = m.fc(m.norm(y)) * y.exp().sum()
    w = m.fc(z)
    w += z
    w.mul_(y).add_(z)
    return torch.cat([m.fc(w), z]) @ m.fc.weight, 1.5 ** m.fc(y), m.fc(y).divide(z)


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_op_of_a_ledger_can_be_overridden_by_that_name(level):
    model = Model(every_spelling, fc=nn.Linear(8, 8), norm=nn.LayerNorm(8))
    _, recorder = run(model, torch.randn(4, 8), level=level)
    names = {row["op"] for row in recorder.casts() if row["rule"] not in ("model", "output", "captured")}
    assert names >= ({"torch.linear", "torch.gelu", "F.softmax", "operator.iadd"} if level == "O1" else set())
    for name in names:
        _, again = run(model, torch.randn(4, 8), level=level, overrides={name: "float32"})
        assert not any(report.artifacts.uncovered for report in again.reports), name
        reasons = {row["reason"] for row in again.casts() if row["op"] == name}
        in_place = lookup("add_").reason  # stands: what such an op writes cannot change its dtype
        assert reasons - {in_place} <= {f"override precision[{name!r}]"}


@torch.library.custom_op("others::softcap", mutates_args=())
def softcap(x: torch.Tensor) -> torch.Tensor:
    return 5 * torch.tanh(x / 5)


softcap.register_fake(torch.empty_like)


@torch.library.custom_op("others::float32_only", mutates_args=())
def float32_only(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@float32_only.register_fake
def _(x):
    torch._check(x.dtype == torch.float32, lambda: "float32 alone")
    return torch.empty_like(x)


@table(1, "level", ["O1", "O2"])
@pytest.mark.parametrize("op", ["packet", "overload", "python"])
@table(1, "key", ["others.softcap", "softcap", "others.*"])
def test_an_op_of_another_library_can_be_overridden(level, op, key):
    called = {"packet": torch.ops.others.softcap, "overload": torch.ops.others.softcap.default, "python": softcap}[op]
    model = Model(lambda m, x: called(m.fc(x)), fc=nn.Linear(8, 8))
    for overrides, dtype in ({}, "f32"), ({key: "bfloat16"}, "bf16"), ({"fc": "float32", key: "half"}, "bf16"):
        _, recorder = run(model, torch.randn(4, 8), level=level, overrides=overrides)
        assert recorder.text("softcap").count(f"-> {dtype}[") == 1
        assert not any(report.artifacts.uncovered for report in recorder.reports)


def test_an_op_that_refuses_its_override_keeps_its_dtypes_and_says_so():
    model = Model(lambda m, x: torch.ops.others.float32_only(m.fc(x)), fc=nn.Linear(8, 8))
    _, recorder = run(model, torch.randn(4, 8), overrides={"others.float32_only": "bfloat16"})
    assert "-> f32[" in recorder.text("float32_only")
    [row] = [row for row in recorder.casts() if "float32_only" in row["op"]]
    assert row["rule"] == "captured" and row["reason"].startswith("it refuses the others")


@pytest.mark.parametrize("overrides, error", [
    ({"head": "float8"}, ValueError), ({"head": torch.int32}, ValueError), ({3: "half"}, TypeError),
])  # fmt: skip
def test_bad_overrides_are_refused(overrides, error):
    with pytest.raises(error, match="precision="):
        precision("O1", overrides=overrides)


def test_two_casters_are_refused():
    def inner(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    x, line = torch.randn(4, 4), inner.__code__.co_firstlineno + 2
    for level in ("O1", "O2", "O3"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"or the objective enters torch.autocast\('cpu'\), whose first "
                                            fr"op is at .*py:{line},.* cast twice"):
            run(inner, x, level=level)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(Exception, match="cast twice"):
            run(lambda x: x @ x, x, level=level)
    torch._dynamo.reset()
    out, recorder = run(inner, x, level="O0")
    assert out.dtype == torch.bfloat16 and not recorder.casts()


def test_autocast_switched_off_is_a_region_without_rules():
    def f(x):
        h = x @ x
        with torch.autocast("cpu", enabled=False):
            return h.float() @ x.float()

    x = torch.randn(4, 4)
    _, recorder = run(f, x)
    assert [line.split("-> ")[1] for line in recorder.text("matmul").splitlines()] == ["bf16[4,4]", "f32[4,4]"]


# Ops of which the CPU has no kernel of low precision, by the names that precision= takes.
WITHOUT_KERNEL = {"cdist": lambda net, x: torch.cdist(net.a(x), net.a(x)), "pdist": lambda net, x: F.pdist(net.a(x))}


@pytest.mark.parametrize("entry", ["transform", "train_step"])
@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_an_op_without_a_kernel_is_named_with_the_option_that_is_for_it(name, entry):
    def loss(**options):
        model, options = Model(WITHOUT_KERNEL[name], a=nn.Linear(4, 4)), {"opt_level": "O2", "inner": "eager", **options}
        if entry == "transform":
            return apexfx.transform(model, **options)(torch.randn(3, 4)).float().sum()
        return apexfx.train_step(model, lambda out: out.float().sum(), torch.optim.SGD(model.parameters(), lr=0.1),
                                 **options)(torch.randn(3, 4))

    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'") as raised:
        loss()
    op, option = raised.value.__notes__
    assert f"raised by aten._{name}_forward" in op and f"precision={{{name!r}: 'float32'}} computes it" in option
    assert loss(precision={name: "float32"}).isfinite()
