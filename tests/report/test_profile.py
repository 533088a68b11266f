"""Where time goes: kernels are attributed to modules, ops, passes and lines, and what is not is a row of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.report.node_places import NodePlaces
from apexfx.report.profile import COMMUNICATION, UNATTRIBUTED, KernelTime, Profile
from tests.distributed.launch import on_ranks
from tests.tables import table


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, hidden), nn.Linear(hidden, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Small blocks around products that take nearly all of the time, and a module that nothing uses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.wide, self.narrow = nn.Linear(16, 2048), nn.Linear(2048, 16)
        self.big = nn.Linear(2048, 2048, bias=False)
        self.unused = nn.Linear(16, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.wide(x)
        x = self.big(x)  # the line of most of the time
        return self.narrow(x)


LINE = next(number for number, line in enumerate(open(__file__), 1) if "the line of most" in line)
BATCH = torch.randn(64, 16), torch.randn(64, 16)


def profiled(is_train_step, inner, **options):
    torch.manual_seed(0)
    net, options = Net(), {"opt_level": "O0", "inner": inner, **options}
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    if is_train_step:
        step = apexfx.train_step(net, F.mse_loss, optimizer, **options)
        return step.report.profile(step, *BATCH), step.report
    model = apexfx.transform(net, **options)

    def step(x, y):
        F.mse_loss(model(x), y).backward()
        optimizer.zero_grad()

    return model.report.profile(step, *BATCH), model.report


def of_module(profile, path):
    return sum(t.ms for t in profile.times if path in t.modules)


@pytest.mark.long
@pytest.mark.parametrize(("is_train_step", "inner"), [
    (True, "eager"), (False, "eager"), *(pytest.param(each, "inductor", marks=pytest.mark.long) for each in (True, False))])
def test_a_module_that_takes_most_of_the_time_is_named(is_train_step, inner):
    profile, _ = profiled(is_train_step, inner)
    products = [t for t in profile.times if set(t.ops) & {"aten.mm", "aten.addmm", "torch.linear"}]
    assert max(products, key=lambda t: t.ms).modules == ("big",)
    assert sum("big" in t.modules for t in products) == 3  # forward, and both gradients
    assert of_module(profile, "big") > 5 * of_module(profile, "blocks.1.up")
    slowest = max((t for t in products if t.modules == ("big",)), key=lambda t: t.ms)
    assert slowest.lines == (f"test_profile.py:{LINE}",)
    assert not any("unused" in path for t in profile.times for path in t.modules)
    ours = [t for t in profile.times if t.kind != UNATTRIBUTED and not t.outside]
    assert ours and all(t.graph == 0 and t.modules and t.ops for t in ours)
    check_sums(profile)


def check_sums(profile):
    """The rows of each table are the recorded step, unattributed ones included."""
    assert sum(t.ms for t in profile.times) == pytest.approx(profile.ms)
    assert all(t.ms >= 0 for t in profile.times)
    for rows in (profile.by_module(), profile.by_op(), profile.by_pass(), profile.by_line()):
        assert sum(row.ms for row in rows) == pytest.approx(profile.ms)
    unattributed = [t for t in profile.times if t.kind == UNATTRIBUTED]
    assert len(unattributed) == 2 and all(str(profile).count(t.kernel) == 4 for t in unattributed)


@pytest.mark.long
def test_a_cached_graph_knows_its_kernels():
    before, _ = profiled(False, "inductor")
    torch._dynamo.reset()
    after, report = profiled(False, "inductor")
    assert report.graphs[0].stages[1].from_cache
    old, new = ({(t.kernel, t.modules) for t in profile.times if t.graph == 0} for profile in (before, after))
    assert old == new


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x):
        y = self.body(x)
        return (y @ y.T).softmax(-1) @ y


def test_what_is_of_no_submodule_is_named_by_its_op():
    net = Functional()
    step = apexfx.train_step(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=1e-3), opt_level="O0", inner="eager")
    profile = step.report.profile(step, *BATCH, num_steps=1, num_warmup=0)
    check_sums(profile)
    names = {row.name for row in profile.by_module()}
    assert {"body", "model: aten.mse_loss", "model: aten.mm", "model: aten._softmax"} <= names and "model" not in names


@pytest.mark.long
def test_passes_are_told_apart():
    profile, _ = profiled(True, "eager", opt_level="O1", dtype=torch.bfloat16, max_grad_norm=1.0)
    by_pass = {row.name: row.ms for row in profile.by_pass()}
    assert {"as captured", "precision", "unscale_clip_update"} <= by_pass.keys()
    assert {t.ops for t in profile.times if t.passes == ("precision",)} == {("aten._to_copy",)}
    assert {t.modules for t in profile.times if "unscale_clip_update" in t.passes} == {("the update",)}
    assert {"the update", "model: aten.mse_loss"} <= {row.name for row in profile.by_module()}


def test_it_trains_as_it_says_and_leaves_the_code_as_it_was():
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    step = apexfx.train_step(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O0", inner="eager")
    reference = nn.Linear(4, 4)
    reference.load_state_dict(net.state_dict())
    same = apexfx.train_step(reference, F.mse_loss, torch.optim.SGD(reference.parameters(), lr=0.1), opt_level="O0",
                             inner="eager")
    batch = torch.randn(2, 4), torch.randn(2, 4)
    profile = step.report.profile(step, *batch, num_steps=3, num_warmup=2)
    assert len(profile.step_ms) == 3
    for _ in range(2 + 2 * 3 + 1):
        same(*batch)
    [ref] = step.report.graphs[0].running
    assert torch.equal(net.weight, reference.weight) and "apexfx_spans" not in type(ref()).forward.__code__.co_names
    with pytest.raises(ValueError, match="num_steps=0"):
        step.report.profile(step, *batch, num_steps=0)


def test_a_step_that_fails_leaves_the_code_as_it_was():
    net, calls = nn.Linear(4, 4), []
    model = apexfx.transform(net, opt_level="O0", inner="eager")

    def step(x):
        calls.append(model(x))
        if len(calls) == 3:
            raise KeyError("third")

    with pytest.raises(KeyError, match="third"):
        model.report.profile(step, torch.randn(2, 4), num_steps=1, num_warmup=1)
    assert all("apexfx_spans" not in type(ref()).forward.__code__.co_names for ref in model.report.graphs[0].running)


def test_equal_layers_are_a_row_that_says_which_one_takes_most():
    def row(path, ms):
        return KernelTime(kernel=path, kind="compute", ms=ms, graph=0, modules=(path,), ops=("mm",), passes=("",))

    times = tuple(row(f"blocks.{i}.mlp.{j}", 10.0 if (i, j) == (2, 0) else 1.0) for i in range(4) for j in (0, 2))
    rows = Profile("cpu", 17.0, (17.0,), times).by_module()
    assert [(r.name, r.number, r.ms, r.most) for r in rows] == [
        ("blocks.{0..3}.mlp.0", 4, 13.0, "blocks.2.mlp.0"), ("blocks.{0..3}.mlp.2", 4, 4.0, "blocks.0.mlp.2")]
    assert "blocks.{0..3}.mlp.0, 10.000 of it blocks.2.mlp.0" in str(Profile("cpu", 17.0, (17.0,), times))


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(3):
            x = self.a(x).tanh()
        return self.b(x)


PRODUCTS = {"aten.mm", "aten.addmm", "torch.linear"}


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_products_of_a_module_that_is_reused_are_counted_for_it(accumulate, inner):
    net = Reused()
    step = apexfx.train_step(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=1e-3), opt_level="O0", inner=inner,
                             accumulate=accumulate)
    profile = step.report.profile(step, *BATCH, num_steps=2, num_warmup=2)
    check_sums(profile)
    calls = {}
    for t in profile.times:
        if set(t.ops) & PRODUCTS:
            calls[" + ".join(t.modules)] = calls.get(" + ".join(t.modules), 0) + t.calls
    # Forward, gradient of the weight, gradient of the input where there is one.
    assert calls == pytest.approx({"a": accumulate * (3 + 3 + 2), "b": accumulate * 3})
    sums = {path for t in profile.times if t.ops == ("aten.add",) for path in t.modules}
    assert sums <= {"a", "the update"}, "of a parameter's gradients, and with those of earlier calls"


def test_backward_ops_belong_to_the_op_that_they_are_the_backward_of():
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())
    step = apexfx.train_step(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O0", inner="eager")
    places = step.capture(torch.randn(4, 8), torch.randn(4, 8)).stage("step").places
    assert isinstance(places, NodePlaces)
    found = {(op, places.module_of[node]) for node, op in places.ops.items() if op.endswith("_backward")}
    assert found == {("aten.gelu_backward", "1"), ("aten.threshold_backward", "3"), ("aten.native_layer_norm_backward", "4"),
                     ("aten.tanh_backward", "6"), ("aten.mse_loss_backward", "")}
    products = sorted(places.module_of[node] for node, op in places.ops.items() if op == "aten.mm")
    assert products == ["0", "2", "2", "5", "5"]


class Gated(nn.Module):
    """Experts whose results are weighed in the module above them, two convolutions of one input, and a table used twice."""

    def __init__(self):
        super().__init__()
        self.router, self.narrow, self.wide = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.left, self.right = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = x + self.table((x[..., 0] > 0).long())
        shares = self.router(x).softmax(-1)
        x = shares[..., :1] * self.narrow(x) + shares[..., 1:] * self.wide(x)
        return self.head(self.left(x) * self.right(x))


@table(1, "level", ["O0", "O1", "O2"])
def test_a_product_of_the_backward_that_reads_a_parameter_is_of_its_module(level):
    net = nn.Sequential(Gated())
    step = apexfx.train_step(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), opt_level=level, inner="eager")
    places = step.capture(torch.randn(2, 4, 8), torch.randn(2, 4, 8)).stage("step").places
    products = {path: sorted(places.ops[node] for node in nodes if node in places.flops)
                for path, nodes in places.backward_of.items()}
    both = ["aten.mm", "aten.mm"]  # gradient of the input, gradient of the weight
    assert {path: ops for path, ops in products.items() if ops} == {
        "0.router": both, "0.narrow": both, "0.wide": both, "0.head": both,
        "0.left": ["aten.convolution_backward"], "0.right": ["aten.convolution_backward"]}


@pytest.mark.long
@on_ranks(2)
def test_collectives_are_rows_of_their_own(rank, world_size):
    torch.manual_seed(0)
    net = Net()
    step = apexfx.train_step(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=1e-3), opt_level="O0", inner="eager",
                             ddp=apexfx.BucketConfig(message_size=1_000_000))
    profile = step.report.profile(step, *BATCH, num_steps=3)
    starts = [t for t in profile.times if t.kind == COMMUNICATION and "all_reduce" in t.ops[0]]
    assert len(starts) == len(step.report.buckets().buckets) and all(t.ms > 0 for t in starts)
    assert {row.name for row in profile.by_module()} >= {COMMUNICATION}
    check_sums(profile)
