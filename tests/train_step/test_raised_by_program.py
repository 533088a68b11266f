"""What a program raises itself, in forward or objective, comes out of a step as out of eager: a loop may skip such a batch."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

import apexfx
from tests.small_models import take_step
from tests.tables import table


class NoValid(RuntimeError):
    pass


class Refused(Exception):
    def __init__(self, code, what):
        super().__init__(f"{code}: {what}")
        self.code, self.what = code, what


class Coded(ValueError):
    def __init__(self, code=7):
        self.code = code

    def __str__(self):
        return f"code {self.code}"


class Silent(BaseException):
    pass


KEPT = NoValid("the same each time")


def raises(error):
    def between(h, bad):
        if bad:
            raise error()
        return h

    return between


asserts = {}
exec("""def false_assert(h, bad):
    assert h.shape[0] == 6 - bad, f"rows: {h.shape[0]}"
    return h
""", asserts)  # pytest rewrites those of this file


def missing_key(h, bad):
    return h * {0: 1.0}[bad]


def past_the_end(h, bad):
    return h * [1.0][bad]


def caused(h, bad):
    try:
        return raises(KeyError)(h, bad)
    except KeyError as error:
        raise Refused(1, "caused") from error


def while_handling(h, bad):
    try:
        return raises(KeyError)(h, bad)
    finally:
        if bad:
            raise NoValid("in finally")


def raised_again(h, bad):
    try:
        return raises(lambda: NoValid("again"))(h, bad)
    except NoValid:
        raise


FORMS = {
    "a subclass of RuntimeError": raises(lambda: NoValid("none is valid")),
    "of two arguments": raises(lambda: ValueError("rows", 3)),
    "without arguments": raises(NoValid),
    "FloatingPointError": raises(lambda: FloatingPointError("not finite")),
    "StopIteration": raises(lambda: StopIteration("over")),
    "KeyboardInterrupt": raises(KeyboardInterrupt),
    "a BaseException": raises(lambda: Silent("x")),
    "an object that is kept": raises(lambda: KEPT),
    "without super().__init__": raises(lambda: Coded(3)),
    "a false assert": asserts["false_assert"],
    "a missing key": missing_key,
    "past the end": past_the_end,
    "caused by another": caused,
    "in finally": while_handling,
    "raised again": raised_again,
}  # fmt: skip


def own_init(h, bad):
    if bad:
        raise Refused(3, "an __init__ of its own")
    return h


FORMS["an __init__ of its own"] = own_init


class Net(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.between, self.calls = between, 0

    def forward(self, x, bad):
        self.calls += 1
        h = nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training)
        return self.last(self.between(h, bad) if self.between else h)


def train(between, place, way, level, **options):
    """Return the losses, what was raised in their place, and the model."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Net(between if place == "forward" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def objective(model, x, bad):
        out = model(x, bad).float()
        return (between(out, bad) if place == "objective" else out).square().mean()

    if way == "eager":
        def step(x, bad):
            before = {name: b.clone() for name, b in model.named_buffers()}, torch.get_rng_state()
            try:
                loss = objective(model, x, bad)
            except BaseException:
                model.load_state_dict(before[0], strict=False)  # a step that fails leaves all as it was
                torch.set_rng_state(before[1])
                raise
            take_step(optimizer, loss)
            return loss.detach()
    else:
        options |= {"dtype": torch.bfloat16} if level != "O0" else {}
        step = apexfx.train_step(model, objective=objective, optimizer=optimizer, opt_level=level, inner="eager", **options)
    found = []
    for number, bad in enumerate((0, 1, 0, 1, 0)):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        torch.manual_seed(number)
        try:
            found.append(float(step(x, bad)))
        except BaseException as error:
            found.append(error)
    return found, model


@pytest.mark.long
@pytest.mark.parametrize("form, place, way, level", itertools.product(
    FORMS, ("forward", "objective"), ("step", "pieces"), ("O0", "O2", "O3")))
def test_it_is_what_eager_raises_and_the_next_batch_trains(form, place, way, level):
    options = {"fallback": "transform"} if way == "pieces" else {}
    (expected, eager), (found, model) = train(FORMS[form], place, "eager", "O0"), train(FORMS[form], place, way, level, **options)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, float):
            assert a == pytest.approx(b, rel=1e-5 if level == "O0" else 0.1)
            continue
        assert type(a) is type(b) and a.args == b.args and str(a) == str(b)
        assert {**vars(a), "__notes__": 0} == {**vars(b), "__notes__": 0} and type(a.__cause__) is type(b.__cause__)
        assert b is not KEPT or a is KEPT
        if isinstance(b, Exception):
            assert sum("called: step(" in note for note in a.__notes__) == 1
    assert model.calls == eager.calls == 5
    for (name, a), b in zip(model.named_buffers(), eager.buffers()):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=1e-5 if level == "O0" else 0.1, atol=1e-6 if level == "O0" else 0.02)


@pytest.mark.long
def test_a_loop_skips_more_such_batches_than_dynamo_recompiles_for():
    model = Net(FORMS["a subclass of RuntimeError"])
    step = apexfx.train_step(model, objective=lambda model, x, bad: model(x, bad).square().mean(), opt_level="O0", inner="eager",
                             optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = 0
    for number in range(20):
        try:
            step(torch.randn(6, 4), number % 2)
        except NoValid as error:
            assert not str(error.__context__ or "")
            skipped += 1
    assert skipped == 10 and len(step.report.graphs) == 2  # the second has the count of calls as an input


# ---- warnings ----------------------------------------------------------------------------------------------------------------


def filters(h, bad):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("ignore", message="x", category=UserWarning)
        return h * 2


def an_action(h, bad):
    with warnings.catch_warnings(action="ignore"):
        return h * 2


def filters_alone(h, bad):
    warnings.filterwarnings("ignore", message="of this test")
    return h * 2


def warns(h, bad):
    warnings.warn("of this test", stacklevel=2)
    return h * 2


def warns_in_between(h, bad):
    with warnings.catch_warnings(record=True):
        warnings.resetwarnings()
        warnings.warn("of this test", stacklevel=1)
        return h * 2


@pytest.mark.filterwarnings("ignore:of this test")
@table(2, "form, way, level", [(form, way, level) for form in (filters, an_action, filters_alone, warns, warns_in_between)
                               for way in ("transform", "step") for level in ("O0", "O1", "O2")],
       ids=lambda value: getattr(value, "__name__", value))
def test_a_forward_that_handles_warnings_is_one_graph(form, way, level):
    def model():
        torch.manual_seed(0)
        return Net(form).eval()

    x, options = torch.randn(6, 4), {"opt_level": level, "inner": "eager", **({"dtype": torch.bfloat16} if level != "O0" else {})}
    expected = model()(x, 0).square().mean()
    if way == "transform":
        made = apexfx.transform(model(), **options)
        loss = made(x, 0).float().square().mean()
    else:
        own = model()
        made = apexfx.train_step(own, objective=lambda model, x: model(x, 0).float().square().mean(),
                                 optimizer=torch.optim.SGD(own.parameters(), lr=0.1), **options)
        loss = made(x)
    torch.testing.assert_close(loss, expected, rtol=1e-5 if level == "O0" else 0.05, atol=0.01)
    assert len(made.report.graphs) == 1 or way == "transform" and "warn" in form.__name__
