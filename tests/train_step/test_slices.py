"""train_step(slices=) of one process: what an update is, what is refused, and what a checkpoint and a digest have of it."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx._torch import fake_process_group
from apexfx.observe.replay import replay
from tests.own_parts import AdaptiveClip
from tests.small_models import train_on
from tests.tables import table
from tests.train_step.sliced_programs import SLICES, make, train


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), *layers, nn.Tanh(), nn.Linear(4, 3)).double()


def step_of(model, objective=lambda model, x, t: F.cross_entropy(model(x), t), **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return apexfx.train_step(model, objective=objective, optimizer=optimizer,
                             **{"opt_level": "O0", "inner": "eager", "slices": SLICES, **options})


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (6,), generator=generator))
            for _ in range(count)]


def of_words(model, x, t):
    losses = F.cross_entropy(model(x), torch.where(t > 0, t, -100), reduction="sum")
    return apexfx.Mean(losses, (t > 0).sum())


@table(2, "options", [{}, {"objective": of_words}, {"loss_scale": 1024.0}], ids=["scalar", "mean", "scaled"])
def test_an_update_is_that_of_one_batch_of_all_slices(options):
    model, expected, is_mean = net(), net(), "objective" in options
    step, theirs = step_of(model, max_grad_norm=0.1, **options), torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for update in range(3):
        slices = batches(SLICES, update)
        if update == 1 and is_mean:
            slices = [(x, torch.zeros_like(t)) for x, t in slices[:2]] + slices[2:]  # slices without a word
        updated = [step(*each) is not None and bool(step.updated) for each in slices]
        assert updated == [False] * (SLICES - 1) + [True]
        x, t = (torch.cat(each) for each in zip(*slices))
        loss = of_words(expected, x, t).value if is_mean else F.cross_entropy(expected(x), t)
        theirs.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        theirs.step()
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step.grad_norm, norm, rtol=1e-12, atol=0)
        if is_mean:
            torch.testing.assert_close(step.mean_loss, loss.detach(), rtol=1e-12, atol=0)
    assert step.grad_norm > 0.1


@pytest.mark.long
def test_an_update_over_no_word_changes_nothing():
    step = step_of(net(), of_words)
    before = copy.deepcopy(step.model.state_dict())
    for x, t in batches(SLICES):
        step(x, torch.zeros_like(t))
    assert step.mean_loss.isnan() and not step.updated
    torch.testing.assert_close(step.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.long
def test_random_numbers_follow_from_the_seed_alone():
    losses = []
    for seed, of_user in ((5, 1), (5, 2), (6, 1)):
        step = step_of(net(nn.Dropout(0.5)), seed=seed)
        step.optimizer.param_groups[0]["lr"] = 0.0
        torch.manual_seed(of_user)
        expected = torch.Generator().manual_seed(of_user).get_state()
        losses.append([step(*each).item() for each in batches(1) * 2 * SLICES])
        assert torch.equal(torch.get_rng_state(), expected)
        assert len(set(losses[-1])) == 2 * SLICES  # each slice, and each update, has its own
    assert losses[0] == losses[1] and losses[0][0] != losses[2][0]


class Counts(nn.Module):
    """Has statistics, and buffers that its forward writes in place, replaces, and leaves alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.tensor(10))
        self.register_buffer("any", torch.tensor([True, False, False]))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x):
        self.calls += 1
        self.any ^= torch.stack([x[0, 0] > 0, x[0, 1] > 0, x[0, 0] > 99])
        self.last = x.mean()
        return self.norm(self.layer(x)) + self.table


@pytest.mark.long
@pytest.mark.parametrize("safe", [False, True])
def test_what_a_forward_writes_begins_as_the_update_did(safe):
    torch.manual_seed(0)
    model = Counts()
    expected = [copy.deepcopy(model) for _ in range(SLICES)]
    step = step_of(model, safeguard=safe)
    slices = [(x.float(), t) for x, t in batches(SLICES)]
    for each, (x, t) in zip(expected, slices):
        step(x, t)
        each(x)
    for name in ("norm.running_mean", "norm.running_var", "last"):
        mean = torch.stack([each.get_buffer(name) for each in expected]).double().mean(0)
        torch.testing.assert_close(model.get_buffer(name).double(), mean, rtol=1e-6, atol=1e-6)
    assert model.calls == 10 + SLICES and model.norm.num_batches_tracked == SLICES
    assert model.any.tolist() == [all(x[0, 0] <= 0 for x, _ in slices), any(x[0, 1] > 0 for x, _ in slices), False]
    before = copy.deepcopy(model.state_dict())
    for x, t in slices:
        step(x * torch.inf, t)
    same = all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert same == safe and model.calls == before["calls"] + (0 if safe else SLICES)


class Writes(nn.Linear):
    """Writes what is no buffer."""

    def __init__(self, what):
        super().__init__(5, 3)
        self.what, self.held = what, torch.zeros(3)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("made", None)

    def forward(self, x):
        y = super().forward(x)
        if self.what == "made":
            self.made = y.detach().mean(0)
        elif self.what == "sum":
            y = functional.all_reduce(y, "sum", dist.group.WORLD)
        else:
            getattr(self, self.what).add_(y.detach().mean(0))
        return y


@table(4, "what, message", [
    ("held", "the forward writes 'model.held', which is no buffer of the model"), ("frozen", "the forward writes 'frozen'"),
    ("made", "another buffer 'made', torch.float32 of shape .* in the place of None"),
    ("sum", "forward or loss communicates .*all_reduce"),
])  # fmt: skip
def test_a_forward_that_would_not_be_a_slice_is_refused(what, message):
    with fake_process_group(2):
        step = step_of(Writes(what))
        with pytest.raises(ValueError, match=message):
            step(torch.randn(6, 5), torch.zeros(6, dtype=torch.int64))


@table(4, "options, message", [
    ({"slices": 6}, "expected a power of two"), ({"slices": True}, "expected a power of two"),
    ({"accumulate": 2}, "accumulate=2 was given with slices="), ({"fallback": "transform"}, "slices= was given with fallback="),
    ({"sync_bn": True}, "sync_bn=True, whose batch norms need all slices"),
    ({"shard": "gradients"}, "with shard='gradients', and slices add up whole gradients; shard='optimizer' is there"),
    ({"shard": "optimizer", "max_grad_norm": 1.0, "parts": [AdaptiveClip()]}, "shard= and max_grad_norm= beside a part in front"),
    ({"ddp": apexfx.BucketConfig(gradient_average=False)}, "a BucketConfig of other sums"),
    ({"dynamic": True}, "whose code depends on the sizes"),
    ({"inner": "inductor", "inner_options": {"max_autotune": True}}, "by which each rank takes the kernels that it measures"),
    ({"seed": 0.5}, "seed=0.5 was given"),
    ({"slices": None, "seed": 1}, "seed=1 was given, expected a whole number, and slices="),
    ({"ddp": True, "slices": 1}, "slices=1 was given on 2 ranks, expected a multiple"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, message):
    with fake_process_group(2), pytest.raises(ValueError, match=message):
        step_of(net(), **options)


@pytest.mark.long
def test_an_update_is_whole_or_not_there():
    step, data = step_of(net(), max_grad_norm=1.0, safeguard=True), batches(SLICES)
    step.flush()  # nothing is there
    step(*data[0])
    with pytest.raises(RuntimeError, match="after 1 of 4 slices of this rank"):
        step.flush()
    with pytest.raises(RuntimeError, match="after 1 of 4 calls that accumulate .* applies them$"):  # flush() is refused
        step.digest()
    train_on(step, data[1:])
    whole = step.digest()
    other = step_of(net(), max_grad_norm=1.0, safeguard=True)
    other(*data[1])  # of an update that is dropped
    other.load_state_dict(step_of(net(), max_grad_norm=1.0, safeguard=True).state_dict())
    train_on(other, data)
    assert other.digest() == whole


@pytest.mark.long
def test_the_slice_that_is_not_finite_is_named_and_recorded(tmp_path):
    step, data = step_of(net(nn.Dropout(0.2)), safeguard=True, slices=8, max_grad_norm=1.0), batches(16)
    data[8 + 5][0][2, 1] = torch.inf
    train_on(step, data)
    [event] = step.events
    assert event.where.startswith("input 'batch[0]' is not finite (inf)") and event.where.endswith(", in slice 5")
    step.record(tmp_path / "skipped")
    text, same = replay(str(tmp_path / "skipped"))
    assert same and "in slice 5" in text and "not finite: input 'batch[0]' is not finite (inf)" in text
    train_on(step, data[:8])
    step.record(tmp_path / "finite")
    text, same = replay(str(tmp_path / "finite"))
    assert same and "\nnot finite: nothing\n" in text and "event" not in text


@pytest.mark.long
def test_a_slice_is_found_behind_those_whose_batch_was_written():
    step, held = step_of(net(), safeguard=True), torch.empty(6, 5, dtype=torch.float64)
    data = batches(SLICES)
    data[-1][0][2, 1] = torch.inf
    for x, y in data:
        step(held.copy_(x), y)
    assert step.events[-1].where.endswith(f"in slice {SLICES - 1}")


@pytest.mark.long
def test_what_is_written_between_slices_is_refused():
    """A rank that computes fewer of them would have read it before."""
    step, data = step_of(net(nn.BatchNorm1d(4).double())), batches(SLICES)
    step(*data[0])
    with pytest.raises(RuntimeError, match="reduction dim"):
        step(data[0][0][:, :4], data[0][1])  # writes nothing
    step(*data[1])
    step.model(data[2][0])
    with pytest.raises(RuntimeError, match="'1.num_batches_tracked' was written between two slices of an update"):
        step(*data[2])
    step = step_of(net(nn.BatchNorm1d(4).double()))
    step(*data[0])
    step.model[1].running_mean = torch.ones(4).double()  # another one
    with pytest.raises(RuntimeError, match="'1.running_mean' was written between two slices"):
        step(*data[1])


@pytest.mark.long
def test_a_digest_is_of_every_bit_and_no_run():
    step, other = make("convolution"), make("convolution")
    assert step.digest() == other.digest()
    for held in (step.model.conv.weight.data, step.model.sum, step.model.norm.num_batches_tracked):
        before = step.digest()
        held.view(-1)[0] = torch.nextafter(held.view(-1)[0], torch.tensor(9.0)) if held.dtype == torch.float32 else 1
        assert step.digest() != before
    [name] = train(other, "convolution", [0])
    other.optimizer.param_groups[0]["lr"] *= 2
    assert other.digest() != name


@pytest.mark.long
@pytest.mark.parametrize("way", ["torch.save", "dcp"])
def test_a_checkpoint_goes_on_to_the_same_bits(way, tmp_path):
    step = make("convolution")
    digests = train(step, "convolution", range(2))
    state = step.state_dict()
    expected, again = train(make("convolution"), "convolution", range(3)), make("convolution")
    assert expected[:2] == digests
    if way == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "saved")
        state = again.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "saved")
    else:
        torch.save(state, file := io.BytesIO())
        state = torch.load(io.BytesIO(file.getvalue()))
    again.load_state_dict(state)
    assert train(again, "convolution", [2]) == expected[2:]


@pytest.mark.long
def test_a_checkpoint_of_another_machine_warns_once_by_name(caplog):
    step = make("heads")
    train(step, "heads", [0])
    state = step.state_dict()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "apexfx"):
        make("heads").load_state_dict(state)
        assert not [record for record in caplog.records if record.name.startswith("apexfx")]
        state["slices"].update(threads=64, torch="2.9.0")
        make("heads").load_state_dict({**state, "num_ranks": 2})
    [record] = [record for record in caplog.records if record.name.startswith("apexfx")]
    assert "saved with torch='2.9.0' (now " in record.message and "threads=64 (now " in record.message
    with pytest.raises(ValueError, match="slices.updates=-1, expected a whole number"):
        make("heads").load_state_dict({**state, "slices": {"updates": -1}})
    with caplog.at_level(logging.WARNING, "apexfx"):
        make("heads").load_state_dict({name: held for name, held in state.items() if name != "slices"})
    assert "nothing of slices=, whose random numbers begin at update 0; step.state_dict() has it" in caplog.text


class Keeps(nn.Linear):
    """Keeps a count in Python, which no graph shows."""

    def __init__(self, counts):
        super().__init__(5, 3)
        self.counts, self.calls = counts, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += self.counts
        self.seen += 1
        return F.dropout(super().forward(x), 0.1) * (1 + self.calls)


@pytest.mark.long
@pytest.mark.parametrize("counts", [0, 1])
def test_check_splits_finds_what_a_forward_keeps_elsewhere(counts):
    step = step_of(Keeps(counts))
    (x, t), = batches(1)
    global_batch = x.float()[:1].repeat(8, 1), t[:1].repeat(8)
    before = step.digest()
    bits = apexfx.check_splits(step, *global_batch, ranks=(1, 2, 4), bits=True)
    assert step.digest() == before and [row.ranks for row in bits.rows] == [1, 2, 4]
    if counts:
        assert [row.where for row in bits.rows] == ["", "slice 2 parts at the gradient of weight",
                                                    "slice 1 parts at the gradient of weight"]
        assert "the forward keeps something from call to call" in str(bits)
    assert bits.is_right == (not counts) == (len({row.digest for row in bits.rows}) == 1)
    with pytest.raises(ValueError, match="has 6 examples, expected a multiple of slices=4"):
        apexfx.check_splits(step, x, t, bits=True)
    with pytest.raises(ValueError, match="is of a step with slices="):
        apexfx.check_splits(step_of(net(), slices=None), x, t, bits=True)


@pytest.mark.long
def test_check_loop_compares_with_a_loop_that_accumulates():
    def update(model, optimizer, batches):
        optimizer.zero_grad()
        for x, t in batches:
            (F.cross_entropy(model(x), t) / len(batches)).backward()
        optimizer.step()

    assert apexfx.check_loop(step_of(net()), update, batches(2 * SLICES)).is_right
