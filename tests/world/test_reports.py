"""Public bug reports about accumulation, schedules, states and ranks: a step does what the loop of eager torch should."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.optimizers import FusedAdam
from tests.distributed.launch import on_ranks
from tests.small_models import Model, take_step, train_on
from tests.tables import table


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 3))


def data(count, rows=8):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)) for _ in range(count)]


def make(model, optimizer, level="O0", **options):
    options = {"inner": "eager", "opt_level": level, **({} if level == "O0" else {"dtype": torch.bfloat16}), **options}
    return apexfx.train_step(model, F.cross_entropy, optimizer, **options)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.3, "momentum": 0.9, **options})


def update(model, optimizer, batches, max_grad_norm=None):
    """Update by the mean over batches."""
    optimizer.zero_grad()
    losses = [F.cross_entropy(model(x), y) / len(batches) for x, y in batches]
    for loss in losses:
        loss.backward()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return sum(losses).detach()


def bounds(level):
    return {"rtol": 1e-5, "atol": 1e-6} if level == "O0" else {"rtol": 0.05, "atol": 0.02}


LEVELS = table(1, "level", ["O0", "O1", "O2"])


@LEVELS
def test_what_is_clipped_is_what_was_accumulated(level):  # huggingface/accelerate#641
    model, expected, batches = net(), net(), data(6)
    step, optimizer = make(model, sgd(model), level, accumulate=3, max_grad_norm=0.05), sgd(expected)
    for i in range(0, 6, 3):
        update(expected, optimizer, batches[i:i + 3], 0.05)
    train_on(step, batches)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), **bounds(level))


@LEVELS
def test_an_epoch_may_end_within_an_accumulation(level):  # Lightning-AI/pytorch-lightning#19987
    model, expected, batches = net(), net(), data(5)
    step, optimizer = make(model, sgd(model), level, accumulate=3), sgd(expected)
    for epoch in (batches[:3], batches[3:]):
        update(expected, optimizer, epoch)
    train_on(step, batches)
    step.flush()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), **bounds(level))


def mean(model, x, y):
    return apexfx.Mean(F.cross_entropy(model(x), y, reduction="sum"), len(y))


# Of how many calls; where they are fewer than `accumulate`, flush() applies them.
SUMS = {"a scalar": (400, {}), "flushed": (399, {}),
        "a mean, flushed": (399, {"objective": mean}), "a mean": (400, {"objective": mean}),
        "in pieces": (400, {"objective": lambda model, x, y: F.cross_entropy(model(x), y) if float(x[0, 0]) else None,
                            "fallback": "transform"})}


@pytest.mark.long
@pytest.mark.parametrize("form", SUMS)
def test_many_half_gradients_are_summed_in_float32(form):  # deepspeedai/DeepSpeed#1800
    """A sum in bfloat16 stands still at 256 of one number."""
    calls, options = SUMS[form]
    once, often, (batch,) = net(), net(), data(1)
    make(once, sgd(once, lr=1.0), "O3")(*batch)
    options = options if "objective" in options else {"loss_fn": F.cross_entropy}
    step = apexfx.train_step(often, optimizer=sgd(often, lr=1.0), accumulate=400, inner="eager", opt_level="O3",
                             dtype=torch.bfloat16, **options)
    for _ in range(calls):
        step(*batch)
    step.flush()
    torch.testing.assert_close(often.state_dict(), once.state_dict(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("way", ["transform", "step"])
def test_a_batch_norm_in_a_checkpoint_counts_a_batch_once(way):  # pytorch/pytorch#96136, pytorch/pytorch#62471
    """Eager torch computes the forward twice, and updates running statistics by both."""
    (batch,), models = data(1), []
    for kind in ("eager", way):
        model = Model(lambda m, x: checkpoint(m.body, x, use_reentrant=False) if m.again else m.body(x), again=kind == way,
                      body=net(nn.BatchNorm1d(8)))
        optimizer = sgd(model)
        run = make(model, optimizer) if kind == "step" else None
        called = apexfx.transform(model, opt_level="O0", inner="eager") if kind == "transform" else model
        for _ in range(3):
            run(*batch) if run else update(called, optimizer, [batch])
        models.append(model.state_dict())
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tensor", [True, False])
@pytest.mark.parametrize("way", ["transform", "step"])
def test_a_plateau_lowers_the_rate(way, tensor):  # pytorch/pytorch#163093
    (batch,), rates, models = data(1), [], []
    for kind in ("eager", way):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1) if tensor else 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        run = make(model, optimizer) if kind == "step" else None
        called = apexfx.transform(model, opt_level="O0", inner="eager") if kind == "transform" else model
        for _ in range(5):
            run(*batch) if run else update(called, optimizer, [batch])
            schedule.step(1.0)
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        models.append(model.state_dict())
    assert rates[0] == pytest.approx(rates[1]) and rates[0][0] < 1e-3
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_what_is_computed_again_drops_the_same(level):  # pytorch/pytorch#190758
    results = []
    for budget in (None, 1):
        model = net(nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.5))
        step = make(model, sgd(model), level, memory_budget=budget)
        torch.manual_seed(5)
        results.append(([float(step(*batch)) for batch in data(4)], model.state_dict()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("way", ["transform", "step"])
def test_masters_of_bfloat16_parameters(way):  # NVIDIA/apex#1728
    """A rate of 1e-4 moves no bfloat16 near one; 100 of them are 0.01."""
    model = nn.Linear(6, 3).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = FusedAdam(model.parameters(), lr=1e-4, master_weights=True)
    x, y = torch.ones(4, 6, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16)
    step = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O3", dtype=torch.bfloat16, inner="eager")
    called = apexfx.transform(model, opt_level="O3", dtype=torch.bfloat16, inner="eager") if way == "transform" else None
    for _ in range(100):
        step(x, y) if way == "step" else take_step(optimizer, F.mse_loss(called(x).float(), y.float()))
    torch.testing.assert_close(model.weight.float(), torch.full((3, 6), 0.99), rtol=0, atol=0.004)


@pytest.mark.long
def test_a_scale_goes_on_where_it_was():  # facebookresearch/fairseq2#1346, allenai/tango#154
    batches, curves = data(6), []
    for stops in (False, True):
        model = net()
        step = make(model, sgd(model), "O2", dtype=torch.float16, loss_scale="dynamic", max_grad_norm=1.0)
        losses = []
        for i, (x, y) in enumerate(batches):
            if stops and i == 2:  # before any call of the new step, and the first of them overflows
                state, weights = copy.deepcopy(step.state_dict()), copy.deepcopy(model.state_dict())
                model = net()
                step = make(model, sgd(model), "O2", dtype=torch.float16, loss_scale="dynamic", max_grad_norm=1.0)
                model.load_state_dict(weights)
                step.load_state_dict(state)
            losses.append(float(step(x * 1e30 if i in (1, 2) else x, y)))
        curves.append((losses, float(step.loss_scale), int(step.skipped), model.state_dict()))
    assert curves[0][1] == 65536 / 4 and curves[0][2] == 2
    torch.testing.assert_close(*curves, equal_nan=True)


class Normalized(nn.Module):
    """Batch norm over a channel that permutations bring to its place, and back."""

    def __init__(self):
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(self.before(x).transpose(1, 2)).transpose(1, 2)
        return self.after(x).mean(1)


@pytest.mark.long
@on_ranks(2)
def test_statistics_of_transposed_and_uneven_batches(rank, world_size):  # pytorch/pytorch#64039, #62967, #22192, NVIDIA/apex#387
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(8, 5, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    rows = [slice(0, 2), slice(2, 8)]
    torch.manual_seed(0)
    start = Normalized().double()
    expected = copy.deepcopy(start)
    optimizer = sgd(expected)
    for _ in range(3):
        update(expected, optimizer, [(x.double(), y)])

    def objective(model, x, y):
        return apexfx.Mean(F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y)))

    for level in ("O0", "O1"):
        model = copy.deepcopy(start).float()
        step = apexfx.train_step(model, objective=objective, optimizer=sgd(model), ddp=True, sync_bn=True, inner="eager",
                                 opt_level=level, **({} if level == "O0" else {"dtype": torch.bfloat16}))
        for _ in range(3):
            step(x[rows[rank]], y[rows[rank]])
        torch.testing.assert_close(model.double().state_dict(), expected.state_dict(), **bounds(level))


@pytest.mark.long
@on_ranks(2)
def test_a_penalty_on_gradients_through_synchronized_statistics(rank, world_size):  # pytorch/pytorch#61222
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 6, generator=generator)

    def objective(model, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].square().mean()

    expected = net(nn.BatchNorm1d(8))
    optimizer = sgd(expected)
    for _ in range(2):
        take_step(optimizer, objective(expected, x))
    model = net(nn.BatchNorm1d(8))
    step = apexfx.train_step(model, objective=objective, optimizer=sgd(model), ddp=True, sync_bn=True, inner="eager",
                             opt_level="O0")
    for _ in range(2):
        step(x[4 * rank:4 * rank + 4])
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@on_ranks(2)
def test_tied_weights_over_ranks_and_calls(rank, world_size):  # NVIDIA/Megatron-LM#844, deepspeedai/DeepSpeed#7985
    def tied():
        torch.manual_seed(0)
        model = Model(lambda m, ids: m.out(m.table(ids)).flatten(0, 1), table=nn.Embedding(7, 5), out=nn.Linear(5, 7, bias=False))
        model.out.weight = model.table.weight
        return model

    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(7, (2, 4), generator=generator) for _ in range(12)]
    for level in ("O0", "O3"):
        expected, model = tied(), tied()
        optimizer = sgd(expected)
        step = make(model, sgd(model), level, ddp=True, accumulate=3)
        for i in range(0, 12, 6):
            update(expected, optimizer, [(each, each.flatten()) for each in ids[i:i + 6]])
            for each in ids[i + 3 * rank:i + 3 * rank + 3]:
                step(each, each.flatten())
        torch.testing.assert_close(model.float().state_dict(), expected.state_dict(), **bounds(level))
        theirs = model.table.weight.detach().clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(theirs, model.table.weight)
