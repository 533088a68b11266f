"""Forwards and losses that lean on Python train as in eager torch, or are refused in one sentence, by all ways and levels."""

from __future__ import annotations

import collections
import copy
import math
import random
import signal
import threading
import timeit

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as hooks

import apexfx
from apexfx._torch import function_mode_depth
from tests.small_models import take_step
from tests.tables import table
from tests.ways import LEVELS, WAYS, check, run_of, trained, updates

NUMBERS = random.Random(0)
IDS = [torch.tensor([[3, 1, 4, 1, 5, 0, 0], [2, 7, 1, 8, 0, 0, 0]]), torch.tensor([[3, 1, 0, 0, 0, 0, 0], [2, 7, 1, 0, 0, 0, 0]])]


# ---- numbers that are read from a tensor -----------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 5)

    def forward(self, ids):
        return self.head(self.table(ids))


def length(ids):
    return int((ids != 0).sum(1).max())


LENGTHS = {
    "end": lambda out, ids: out[:, :length(ids)],
    "begin": lambda out, ids: out[:, length(ids) - 1:],
    "from the end": lambda out, ids: out[:, -length(ids):],
    "narrow": lambda out, ids: out.narrow(1, 0, length(ids)),
    "each row": lambda out, ids: torch.cat([row[:n] for row, n in zip(out, (ids != 0).sum(1).tolist())]),
    "mask": lambda out, ids: out * (torch.arange(7) < length(ids))[:, None],
}


def loss_of(cut):
    return lambda out, ids: cut(out, ids).float().pow(2).mean()


@table(2, ("cut", "level"), list(zip(LENGTHS, LEVELS * 2)))
def test_a_loss_cuts_by_a_length_that_it_reads(cut, level):
    check("step", Words, loss_of(LENGTHS[cut]), IDS, level)


@pytest.mark.long
def test_inductor_cuts_by_a_length_too():
    def cuts(out, ids):
        return torch.cat([LENGTHS[name](out, ids).flatten() for name in ("end", "begin", "from the end", "each row")])

    check("step", Words, loss_of(cuts), IDS, "O0", inner="inductor")


# ---- x.data ----------------------------------------------------------------------------------------------------------------


def with_buffer(write):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.register_buffer("seen", torch.ones(4))

        def forward(self, x):
            write(self, x)
            return self.head(x) + self.seen

    return Model


def adds(model, x):
    model.seen.data += x.mean(0)


def scales_and_adds(model, x):
    model.seen.data *= 0.5
    model.seen.data += x.mean(0)
    model.seen.add_(1)


def assigns(model, x):
    model.seen.data = model.seen.data * 0.5 + x.mean(0)


def assigns_what_it_has_written(model, x):
    model.seen.data = torch.mul(model.seen.data, 0.5, out=torch.empty(4))


X = list(torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_buffer_is_written_by_its_data(level, way):
    check(way, with_buffer(assigns), lambda out, x: out.float().pow(2).mean(), X, level)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", [adds, scales_and_adds])
def test_an_operator_writes_by_the_data(write, way):
    check(way, with_buffer(write), lambda out, x: out.float().pow(2).mean(), X, "O0")


def masks(model, x):  # as PixelCNN does
    model.head.weight.data *= torch.ones(4, 4).tril()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_forward_masks_its_weight_by_the_data(level):
    check("transform", with_buffer(masks), lambda out, x: out.float().pow(2).mean(), X, level)


def test_a_step_names_the_parameter_that_its_forward_replaces():
    def clips(model, x):
        model.head.weight.data = model.head.weight.data.clamp(-0.1, 0.1)

    with pytest.raises(ValueError, match="writes parameter 'head.weight' in place"):
        trained("step", with_buffer(clips), lambda out, x: out.pow(2).mean(), X)


def test_memory_that_is_written_and_put_in_the_place_of_a_tensor_s_is_refused():
    with pytest.raises(Exception, match=r"test_python_forwards.py:\d+ puts memory in the place of a tensor's"):
        trained("transform", with_buffer(assigns_what_it_has_written), lambda out, x: out.pow(2).mean(), X)


# ---- threads and interrupts ------------------------------------------------------------------------------------------------


def test_first_calls_in_two_threads_at_once():
    def train(losses):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = apexfx.train_step(model, lambda out: out.pow(2).mean(), optimizer, opt_level="O0", inner="eager")
        barrier.wait()
        losses += [float(step(x)) for x in X]

    torch.compiler.reset()
    barrier, results = threading.Barrier(2), [[], []]
    threads = [threading.Thread(target=train, args=(losses,)) for losses in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(losses) for losses in results] == [3, 3]


@pytest.mark.parametrize("calls", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_interrupts_leave_no_mode_on_and_a_step_that_was_done_or_not(calls):
    """The gradient is 1 and so are the learning rate and the momentum: a parameter says how many steps there were."""
    torch.compiler.reset()
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    step = apexfx.train_step(model, lambda out: out.sum(), optimizer, opt_level="O0", inner="eager")
    x, done, late, armed, ends = torch.ones(1, 1), 3, 0, False, collections.Counter()

    def interrupt(*_):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    seconds = min(timeit.repeat(lambda: step(x), number=1, repeat=done))
    checkpoint = copy.deepcopy(step.state_dict())
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(calls):
            try:
                armed = True
                longest = NUMBERS.choice([1.5, 10]) * seconds  # behind an interrupt a call takes several times as long
                signal.setitimer(signal.ITIMER_REAL, longest * NUMBERS.random() + 1e-6)
                try:
                    step(x)
                    armed, end, done = False, "done", done + 1
                except RuntimeError as error:  # which the call before has left
                    armed, end, done = False, "refused", 3
                    assert "an earlier step failed after it had begun to change" in str(error)
                    step.load_state_dict(copy.deepcopy(checkpoint))
            except KeyboardInterrupt:
                end = "interrupted"
            ends[end] += 1
            assert function_mode_depth() == 0 and torch.is_grad_enabled(), end
            torch.zeros(1) + 1
            if end == "done":  # and so, perhaps, were calls that were interrupted at their end
                taken = float(optimizer.state[model.bias]["momentum_buffer"])
                assert done <= taken <= done + late
                assert [float(p) for p in model.parameters()] == [-taken * (taken + 1) / 2] * 2
                assert float(optimizer.state[model.weight]["momentum_buffer"]) == taken
                done = taken
            late = late + 1 if end == "interrupted" else 0
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert min(ends["done"], ends["interrupted"]) > calls / 20


# ---- hooks on all modules --------------------------------------------------------------------------------------------------

EVERYWHERE = {
    "forward": lambda: hooks.register_module_forward_hook(lambda m, args, out: out * 2 if type(m) is nn.Linear else None),
    "forward_pre": lambda: hooks.register_module_forward_pre_hook(
        lambda m, args: args[0] * 2 if type(m) is nn.Linear else None),
    "full_backward": lambda: hooks.register_module_full_backward_hook(lambda module, into, out: None),
    "full_backward_pre": lambda: hooks.register_module_full_backward_pre_hook(lambda module, out: None),
}


@table(1, "kind", EVERYWHERE)
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_on_all_modules_is_not_passed_over(way, kind):
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    options = {"opt_level": "O0", "inner": "eager"}
    run = updates(way, model, lambda model, x: model(x).sum()) if way == "step" else run_of(way, model, **options)
    run(X[0])
    plain = model if way == "transform" else nn.Sequential(model)  # torch.compile() is a module around it, with hooks as well
    handle = EVERYWHERE[kind]()
    try:
        with pytest.raises((RuntimeError, ValueError), match=r"a hook (is registered )?on all modules"):
            run(X[0])
        if way == "transform" and "backward" in kind:
            torch.compiler.reset()
            with pytest.raises((RuntimeError, ValueError), match="a hook is registered on all modules"):
                apexfx.transform(model, **options)(X[0])
        elif way != "step" and "backward" not in kind:  # what reset() forgets is captured anew, hooks included
            torch.compiler.reset()
            torch.testing.assert_close(run(X[0]), plain(X[0]))
    finally:
        handle.remove()
    torch.compiler.reset()
    run(X[0])


class Queue(nn.Module):
    """Writes a slice of a buffer from a place that a buffer has, as momentum contrast does."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.register_buffer("queue", torch.ones(4, 18))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        out, place = self.head(x), int(self.place)
        far = out @ self.queue.clone().detach()
        self.queue[:, place:place + len(x)] = out.detach().T
        self.place[0] = (place + len(x)) % 18
        return far


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_queue_is_written_from_a_place_in_a_buffer(level):
    check("step", Queue, squares, X, level)


# ---- random numbers, torch.func, and models that are unlike a class of the user's ------------------------------------------


def drawing(draw):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.numbers = nn.Linear(4, 4), random.Random(0)
            np.random.seed(0)
            random.seed(0)

        def forward(self, x):
            return self.head(x) * draw(self)

    return Model


def squares(out, x):
    return out.float().pow(2).mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", [lambda model: model.numbers.random(), lambda model: NUMBERS.randint(1, 5)])
def test_a_generator_of_the_program_s_is_refused(draw, way):
    with pytest.raises(Exception, match=r"is a random.Random, and a number"):
        trained(way, drawing(draw), squares, X)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_number_that_the_objective_draws_is_one_of_python(level):
    check("step", lambda: nn.Linear(4, 4), lambda out, x: squares(out, x) * random.uniform(0.5, 1), X, level)


class Anneals(nn.Linear):
    def __init__(self, inside):
        super().__init__(4, 4)
        self.inside, self.factor = inside, 1.0

    def forward(self, x):
        if self.inside:
            self.factor = self.factor + 0.25
        return super().forward(x) * self.factor


@pytest.mark.long
@pytest.mark.parametrize("way, inside", [*zip(("step", "backend", "transform"), (False, True, True)),
                                         *zip(("step", "backend", "transform"), (True, False, False))],
                         ids=lambda value: value if isinstance(value, str) else ("the loop", "the forward")[value])
def test_a_float_that_changes_is_that_of_each_call(inside, way):
    def make():
        return nn.Sequential(layers.append(Anneals(inside)) or layers[-1])

    def loss(out, x):
        if not inside:
            layers[-1].factor += 0.25
        return squares(out, x)

    layers = []
    check(way, make, loss, X * 2, "O0")


@pytest.mark.parametrize("inside", [True, False], ids=["the forward", "the loop"])
def test_a_float_that_changes_is_a_tensor_and_one_that_the_forward_keeps_a_constant(inside):
    layer = Anneals(inside)
    run = apexfx.transform(nn.Sequential(layer), opt_level="O0", inner="eager")
    for _ in range(4):
        run(X[0]).sum().backward()
        layer.factor += 0.0 if inside else 0.25
    graphs = [(".item()" in graph.forward.captured, "f64[]" in graph.second.captured) for graph in run.report.graphs]
    assert len(graphs) == 4 if inside else graphs == [(False, False), (True, True)]


TAKES = {  # what takes a float, and the graphs for three values
    "clamp": (lambda y, number: y.clamp(1 - number, 1 + number), 2),
    "clamp of one bound": (lambda y, number: y.clamp(max=1 + number) + y.clamp_min(number), 2),
    "clamp of a constant": (lambda y, number: y.clamp(-0.25, number), 2),
    "clamp in place": (lambda y, number: (y * 2).clamp_(-number, number), 2),
    "masked_fill": (lambda y, number: y.masked_fill(y > 0.5, number), 3),
}


@table(2, "name, inner", [*((name, "eager") for name in TAKES),
                          pytest.param("clamp", "inductor", marks=pytest.mark.long)])
def test_a_float_that_an_op_takes_is_that_of_each_call(name, inner):
    use, num_graphs = TAKES[name]
    model = nn.Linear(4, 4)
    reference = copy.deepcopy(model)
    step = updates("step", model, lambda m, x, number: squares(use(m(x), number), x), inner=inner)
    for number in (0.5, 0.4, 0.3):
        loss = squares(use(reference(X[0]), number), X[0])
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        for p, gradient in zip(reference.parameters(), gradients):
            p.data -= 0.1 * gradient
        torch.testing.assert_close(step(X[0], number), loss.detach())
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    assert len(step.report.graphs) == num_graphs


class Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * -ctx.factor, None


class Reversed(Anneals):
    def forward(self, x):
        return Reverses.apply(nn.Linear.forward(self, x), self.factor)


@pytest.mark.parametrize("layer", [Anneals, Reversed])
def test_a_step_of_a_schedule_in_the_loop_is_two_graphs(layer):
    model, x = layer(False), X[0]
    reference = copy.deepcopy(model)
    step = updates("step", model, lambda m, x: squares(m(x), x))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(10):
        model.factor = reference.factor = number / 4
        loss = take_step(optimizer, squares(reference(x), x))
        torch.testing.assert_close(step(x), loss.detach())
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    assert len(step.report.graphs) == 2


@pytest.mark.long
def test_a_float_that_one_model_keeps_makes_no_constants_of_another_s():
    class Keeps(Anneals):
        def forward(self, x):
            return nn.functional.elu(nn.Linear.forward(self, x), self.factor)

    class Other(Anneals):
        def forward(self, x):
            return nn.Linear.forward(self, x) * self.factor

    keeps, other = (updates("step", model, lambda m, x: squares(m(x), x)) for model in (Keeps(False), Other(False)))
    for step, num_graphs in ((keeps, 3), (other, 2)):
        for number in range(3):
            step.model.factor = 1 + number / 4
            step(X[0])
        assert len(step.report.graphs) == num_graphs


@pytest.mark.long
def test_what_is_captured_or_recorded_draws_no_number_of_python(tmp_path):
    random.seed(3)
    drawn = [random.uniform(0.5, 1) for _ in range(3)]
    model, seen = nn.Linear(4, 4), []
    step = updates("step", model, lambda m, x: (squares(m(x), x) * (u := random.uniform(0.5, 1)), u), lr=0.0, safeguard=True)
    step.capture(X[0])
    random.seed(3)
    for number in range(3):
        seen.append(step(X[0])[1])
        step.record(tmp_path / f"call {number}")
        apexfx.compare(step, X[0])
        step.capture(X[0][:2])
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(drawn))
    for number, value in enumerate(drawn):
        scalars = [float(x) for x in torch.load(tmp_path / f"call {number}" / "tensors.pt")["inputs"] if x.numel() == 1]
        assert any(math.isclose(scalar, value, rel_tol=1e-6) for scalar in scalars)


@pytest.mark.long
def test_a_step_returns_a_float_that_changes_and_what_follows_from_it():
    model = Anneals(False)
    step = updates("step", model, lambda m, x: (squares(m(x), x), {"factor": m.factor, "half": m.factor / 2}))
    for number in range(1, 7):
        model.factor = number / 4
        assert step(X[0])[1] == {"factor": number / 4, "half": number / 8}


@pytest.mark.long
@pytest.mark.parametrize("inside", [True, False], ids=["the forward", "the loop"])
def test_compiled_code_has_the_float_of_each_call(inside):
    for again in (False,) if inside else (False, True):
        layer = Anneals(inside)
        run = apexfx.transform(nn.Sequential(layer), opt_level="O0")
        counters.clear()
        for number in range(1, 3 if again else 5):
            layer.factor = layer.factor if inside else 1 + number / 4
            out = run(X[0])
            out.sum().backward()  # behind which AOTAutograd keeps the graph in its cache
            torch.testing.assert_close(out, torch.nn.functional.linear(X[0], layer.weight, layer.bias) * (1 + number / 4))
            assert layer.factor == 1 + number / 4
    assert inside or counters["inductor"]["fxgraph_cache_hit"] > 0 == counters["inductor"]["fxgraph_cache_miss"]


@table(1, "way", ["transform", "step"])
@pytest.mark.parametrize("draw, said", [
    (lambda model: torch.from_numpy(np.random.rand(4)).float(), "np.random of NumPy"),
    (lambda model: random.random(), r"random.random\(\) of Python"),
], ids=["numpy", "random"])  # fmt: skip
def test_numpy_and_python_draw_by_seeds_of_their_own(draw, said, way):
    make = drawing(draw)
    if way == "step":
        with pytest.raises(RuntimeError, match=rf"{said} is called.*\n  at .*test_python_forwards.py"):
            trained("step", make, squares, X)
    check(way, make, squares, X, "O0", **{"fallback": "transform"} if way == "step" else {})


MADE = {"fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
        "exported": lambda: torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (X[0],)).module()}


@pytest.mark.parametrize("kind", MADE)
@table(1, ("way", "level"), [*zip(WAYS, LEVELS[:3]), ("transform", "O0")])
def test_a_model_that_torch_has_made(kind, way, level):
    check(way, MADE[kind], squares, X, level)


class Slots(nn.Linear):
    __slots__ = ("scale",)


class Outputs(dict):
    pass


def test_what_has_no_dictionary_of_its_own_is_refused():
    model = Slots(4, 4)
    with pytest.raises(ValueError, match="class Slots has __slots__"):
        apexfx.transform(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = apexfx.train_step(model, optimizer=optimizer, objective=lambda m, x: (m(x).mean(), Outputs(x=m(x))), opt_level="O0",
                             inner="eager")
    with pytest.raises(TypeError, match="returned a Outputs of tensors"):
        step(X[0])
    meta = nn.Linear(4, 4, device="meta")
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        apexfx.train_step(meta, nn.MSELoss(), torch.optim.SGD(meta.parameters(), lr=0.1), opt_level="O0", inner="eager")
