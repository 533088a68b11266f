"""train_step(ddp=True) on real gloo ranks, against torch DDP and synchronized batch norm over the same batches."""

from __future__ import annotations

import contextlib
import copy
import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import apexfx
from apexfx.errors import RankFailureError, RankMismatchError
from apexfx.optimizers import FusedAdam, FusedSGD
from apexfx.parallel import convert_syncbn_model
from tests.distributed.launch import on_ranks, run_ranks
from tests.own_optimizers import RMSprop
from tests.small_models import take_step, train_on
from tests.tables import table
from tests.train_step import test_other_leaves as leaves
from tests.train_step import test_parts as parts


def net(sync_bn=False):
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(4)] if sync_bn else []
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(),
                         nn.Linear(16, 3))


def batches(rank, count):
    generator = torch.Generator().manual_seed(rank + 1)
    return [(torch.randn(6, 2, 6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(count)]


def step_of(model, loss_fn=F.mse_loss, optimizer=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return apexfx.train_step(model, loss_fn, optimizer, **{"opt_level": "O0", "inner": "eager", "ddp": True, **options})


def compare(rank, make=net, *, accumulate=1, max_grad_norm=None, sync_bn=False, **options):
    """Train by train_step and by torch DDP, flushing at the end; the parameters come out as equal as rounding leaves them."""
    model = make(sync_bn)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + rank)  # rank 0's values are what counts
    reference = convert_syncbn_model(make(sync_bn))
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    wrapped = nn.parallel.DistributedDataParallel(reference, find_unused_parameters=make is not net)
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.01), accumulate=accumulate,
                             max_grad_norm=max_grad_norm, sync_bn=sync_bn,
                             **{"opt_level": "O0", "ddp": True, "inner": "eager", **options})
    for place, (inputs, targets) in enumerate(batches(rank, 6), 1):
        step(inputs, targets)
        last = place % accumulate == 0 or place == 6
        if place == 6:
            step.flush()
        num_calls = accumulate if place <= 6 - 6 % accumulate else 6 % accumulate
        with contextlib.nullcontext() if last else wrapped.no_sync():
            (F.cross_entropy(wrapped(inputs), targets) / num_calls).backward()
        if last:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm)
            theirs.step()
            theirs.zero_grad()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)
    return step


@pytest.mark.long
@on_ranks(2)
def test_half_gradients_are_averaged_in_float32_as_by_ddp_under_autocast(rank, world_size):
    [(x, y)] = batches(rank, 1)
    for half, ddp in ((torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, apexfx.BucketConfig(layout="ddp"))):
        options = {"opt_level": "O1", "dtype": half, "ddp": ddp, "inner": "eager"}
        of_step, model, reference = net(), net(), nn.parallel.DistributedDataParallel(net())
        step_of(of_step, F.cross_entropy, keep_grads=True, loss_scale=1.0, **options)(x, y)
        F.cross_entropy(apexfx.transform(model, **options)(x).float(), y).backward()
        with torch.autocast("cpu", half):
            F.cross_entropy(reference(x), y).backward()
        for ours, also, theirs in zip(of_step.parameters(), model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad) and torch.equal(also.grad, theirs.grad)


@on_ranks(3)
def test_a_step_is_that_of_torch_ddp(rank, world_size):
    step = compare(rank)
    assert "all_reduce_" in step.report.code(stage="step") and len(step.report.graphs) == 1
    compare(rank, accumulate=4, max_grad_norm=0.05, sync_bn=True)


@pytest.mark.long
@on_ranks(2)
def test_a_flush_of_other_numbers_of_calls_is_told(rank, world_size):
    model = net()
    step = step_of(model, F.cross_entropy, accumulate=3)
    train_on(step, batches(rank, 1 + rank))
    with pytest.raises(apexfx.RankMismatchError, match=r"calls that flush\(\) applies"):
        step.flush()


@pytest.mark.long
@on_ranks(2)
def test_a_flush_where_one_rank_or_none_has_gathered_gradients(rank, world_size):
    model = net()
    step = step_of(model, None, objective=lambda m, x, t, own: x.square().mean() if own else F.cross_entropy(m(x), t),
                   accumulate=3)
    [(inputs, targets)], before = batches(rank, 1), model[0].weight.detach().clone()
    for own, updated in ((True, False), (rank == 0, True)):
        step(inputs.clone().requires_grad_(), targets, own)
        step.flush()
        assert bool(step.updated) is updated and torch.equal(model[0].weight, before) is not updated
    assert same_on_all(world_size, list(model.parameters()))


@pytest.mark.long
@on_ranks(2)
def test_a_call_that_accumulates_and_fails_on_one_rank_is_told_at_the_update(rank, world_size):
    model, [(x, y)] = net(), batches(rank, 1)
    step = step_of(model, F.cross_entropy, accumulate=2)
    if rank:
        with pytest.raises(IndexError):
            step(x, torch.full_like(y, 9))
    step(x, y)
    with pytest.raises(RankFailureError, match="rank 0: 2 training forwards(.|\n)*rank 1: 3 training forwards"):
        step(x, y)
    step(x, y)
    assert step.updated and same_on_all(world_size, list(model.parameters()))


class Broken(nn.Module):
    """A graph break between two layers; which head follows is up to the data."""

    def __init__(self, sync_bn=False, breaks=True):
        super().__init__()
        layers = net(sync_bn)
        self.body, self.heads, self.breaks = layers[:-1], nn.ModuleList([layers[-1], copy.deepcopy(layers[-1])]), breaks

    def forward(self, x):
        x = self.body(x)
        if self.breaks:
            torch._dynamo.graph_break()
            return self.heads[int(x[0, 0] > 0)](x)
        return self.heads[0](x)


FAILURES = {"label": lambda x, y: (x, torch.full_like(y, 9)), "shape": lambda x, y: (x[:, :1], y),
            "dtype": lambda x, y: (x, y.bool()), "exception": lambda x, y: (x, None)}


FAILING = {"plain": (net, {}), "synchronized": (lambda: net(True), {"sync_bn": True}),
           "in pieces": (Broken, {"fallback": "transform"})}


def fails_alone(rank, world_size, name):
    make, options = FAILING[name]
    model = make()
    step = step_of(model, None, objective=lambda m, x, y: F.cross_entropy(m(x), y), **options)
    for number, (kind, spoiled) in enumerate(FAILURES.items()):
        if kind in ("label", "dtype") and options.get("sync_bn"):  # found after batch norm has communicated
            continue
        [(x, y)] = batches(rank, 1)
        step(x, y)
        before = copy.deepcopy(dict(model.named_parameters()))
        if rank == number % 2:
            with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)):
                step(*spoiled(x, y))
        with pytest.raises(RankFailureError, match=rf"rank {number % 2}: \d+ training forwards or calls of a step so far"):
            step(x, y)
        torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0, msg=kind)
        step(x, y)
        assert same_on_all(world_size, list(model.parameters()))


@table(1, "name", FAILING)
def test_a_rank_that_fails_alone_is_told_to_the_one_that_waits_for_it(name):
    """It fails before it communicates; the other waits until it comes again, and both raise."""
    run_ranks(fails_alone, 2, name)


@pytest.mark.long
@on_ranks(2)
def test_two_steps_in_another_order_are_told(rank, world_size):
    """Also of models that are alike, whose gradients would fit each other, and of a step that is made meanwhile."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 4)]
    steps, batch = [step_of(model) for model in models], (torch.ones(4, 3), torch.ones(4, 2))
    for others in ((0, 1), (1, 2), (2, 0), (0, None)):
        for step in steps:
            step(batch[0], torch.ones(4, step.model.out_features))
        before = copy.deepcopy([model.state_dict() for model in models])
        with pytest.raises(RankMismatchError, match="model, in the order they were made: rank 0 has"):
            if (mine := others[rank]) is None:
                step_of(nn.Linear(3, 2))
            else:
                steps[mine](batch[0], torch.ones(4, models[mine].out_features))
        torch.testing.assert_close([model.state_dict() for model in models], before, rtol=0, atol=0)


@pytest.mark.long
@on_ranks(2)
def test_what_is_said_where_a_rank_does_not_come_or_a_group_is_gone(rank, world_size):
    """A rank that steps, or makes a step, alone gives up within the timeout; then the group is of no use, and another one is."""
    step = step_of(nn.Linear(3, 2), process_group=dist.new_group())
    step(torch.ones(4, 3), torch.ones(4, 2))
    step._components.agreement._timeout_s = 1.0
    alone = {"collectives of graph 0 of the step": lambda group: step(torch.ones(4, 3), torch.ones(4, 2)),
             "options of the training step": lambda group: step_of(nn.Linear(3, 2), process_group=group),
             "parameters": lambda group: apexfx.transform(nn.Linear(3, 2), ddp=True, process_group=group)}
    for what, does in alone.items():
        group = dist.new_group(timeout=timedelta(seconds=1))
        if rank == 0:
            for _ in range(2):
                with pytest.raises(RankFailureError, match=rf"rank 0 of 2 gave up the comparison of the {what}(.|\n)*limit of 1 s"
                                                           r"(.|\n)*make a new one"):
                    does(group)
    group = dist.new_group()
    step = step_of(nn.Linear(3, 2), process_group=group)
    step(torch.ones(4, 3), torch.ones(4, 2))
    assert same_on_all(world_size, list(step.model.parameters()))
    model = apexfx.transform(nn.Linear(3, 2), ddp=True, process_group=group)
    dist.destroy_process_group(group)
    for run in (lambda: step(torch.ones(4, 3), torch.ones(4, 2)), lambda: model(torch.ones(4, 3))):
        with pytest.raises(RankFailureError, match="is destroyed") as caught:
            run()
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.long
@on_ranks(2)
def test_under_inductor(rank, world_size):
    compare(rank, inner="inductor", max_grad_norm=0.05, sync_bn=True, loss_scale=1024.0)


@pytest.mark.long
@on_ranks(2)
def test_an_overflow_of_one_rank_skips_the_step_of_all(rank, world_size):
    model = net()
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.01), opt_level="O2",
                             dtype="float16", ddp=True, inner="eager")
    data = batches(rank, 3)
    step(*data[0])
    before = copy.deepcopy(model.state_dict())
    if rank == 1:
        data[1][0][0, 0, 0, 0] = float("inf")
    step(*data[1])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert step.skipped == 1 and step.loss_scale == 2.0**15
    step(*data[2])
    every = [None] * world_size
    dist.all_gather_object(every, [p.tolist() for p in model.parameters()])
    assert every[0] == every[1] and every[0] != [p.tolist() for p in before.values()]


@on_ranks(2)
def test_ranks_with_other_models_or_graphs_are_told(rank, world_size):
    with pytest.raises(apexfx.RankMismatchError, match="parameters and buffers of the model"):
        model = nn.Linear(3 + rank, 2)
        apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), ddp=True)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    for own, said in (({"opt_level": ("O1", "O2")[rank]}, "opt_level: rank 0 has O1, rank 1 has O2"),
                      ({"sync_bn": rank == 0}, "sync_bn: rank 0 has True, rank 1 has False")):
        with pytest.raises(apexfx.RankMismatchError, match=f"options of the training step and its optimizer.\n  {said}\nEvery"):
            apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), ddp=True, **own)
        transformed = apexfx.transform(copy.deepcopy(model), ddp=True, inner="eager", **own)
        with pytest.raises(apexfx.RankMismatchError, match=f"collectives of graph 0.\n  {said}\nEvery"):
            transformed(torch.ones(4, 3)).sum().backward()


@pytest.mark.long
@on_ranks(2)
def test_ranks_that_would_update_otherwise_are_told(rank, world_size):
    norm, calls, rate = (1.0, 0.1)[rank], 1 + rank, (0.1, 0.01)[rank]
    for own, lr, name in (({"max_grad_norm": norm}, 0.1, "max_grad_norm"), ({"accumulate": calls}, 0.1, "accumulate"),
                          ({}, rate, "  lr: rank 0 has 0.1, rank 1 has 0.01\nEvery"),
                          ({}, torch.tensor(1.0 + rank), "  lr: rank 0 has 1.0, rank 1 has 2.0\nEvery")):
        model = nn.Linear(3, 2)
        with pytest.raises(apexfx.RankMismatchError, match=f"agree on the options of the training step.*\n.*{name}"):
            apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=lr), ddp=True, **own)
    with pytest.raises(apexfx.RankMismatchError, match="clipping"):
        apexfx.train_step(model, F.mse_loss, FusedAdam(model.parameters(), max_grad_norm=norm), ddp=True)
    model, batch = nn.Linear(3, 2), (torch.ones(4, 3), torch.ones(4, 2))
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), ddp=True, inner="eager",
                             shard="optimizer")
    for name, value in (("lr", 0.2), ("weight_decay", 0.5), ("maximize", True)):  # one rank changes it later
        step(*batch)
        group, before = step.optimizer.param_groups[0], copy.deepcopy(model.state_dict())
        group[name] = value if rank else group[name]
        with pytest.raises(apexfx.RankMismatchError, match=f"(?s){name}.*: rank 0 has .*, rank 1 has {float(value)}.*A schedule"):
            step(*batch)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        group[name] = value


def hooked(params, lr):
    optimizer = torch.optim.SGD(params, lr=lr)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def branching(model, x, y):
    return F.mse_loss(model(x) if x.sum() > 0 else -model(x), y)


# Who updates -> (optimizer, options of the step): an op, a graph of its own step(), that step() outside of the graph.
UPDATES = {
    "outside": (hooked, {}), "op": (torch.optim.SGD, {}), "op of rows": (torch.optim.AdamW, {"shard": "optimizer"}),
    "traced": (torch.optim.RMSprop, {}), "in pieces": (torch.optim.SGD, {"fallback": "transform"}),
    "flushed": (torch.optim.SGD, {"accumulate": 3}),
}


def number_of_one_rank(rank, world_size, names):
    """A number, or a tensor on the CPU, that one rank puts in the place of another or writes is told, and nothing is updated."""
    batch = torch.ones(4, 3), torch.ones(4, 2)
    for name in names:
        optimizer, options = UPDATES[name]
        for first, change in ((0.1, None), (torch.tensor(0.1), None), (torch.tensor(0.1), torch.Tensor.fill_)):
            model = nn.Linear(3, 2)
            step = step_of(model, None, optimizer=optimizer(model.parameters(), lr=first),
                           objective=branching if name == "in pieces" else lambda m, x, y: F.mse_loss(m(x), y), **options)
            step(*batch)
            group, before = step.optimizer.param_groups[0], copy.deepcopy(model.state_dict())
            if rank and change is not None:
                change(group["lr"], 0.5)
            elif rank:
                group["lr"] = torch.tensor(0.5) if isinstance(first, torch.Tensor) else 0.5
            with pytest.raises(apexfx.RankMismatchError, match=r"lr\S*( of group 0 of \w+)?: rank 0 has 0.1\d*, rank 1 has 0.5"):
                step.flush() if name == "flushed" else step(*batch)
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", list(UPDATES))
def test_a_number_that_one_rank_changes_is_told(name):
    run_ranks(number_of_one_rank, 2, [name])


class Heads(nn.Module):
    """Which of the heads, all of one shape, is used is an argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](self.body(x))


def refuses_other_heads(rank, world_size, heads, message):
    """Train with each of the heads, then call with those that every rank names in `heads`, and go on with one for all."""
    model, other = Heads(), nn.Linear(3, 2)
    step, of_other = step_of(model), step_of(other)
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    for head in (0, 1, 2, 0, 0, 1, 1):  # all graphs are compiled and agreed on
        step((x, head), y)
    before = copy.deepcopy(model.state_dict())
    step((x[:2], 1), y[:2])  # another batch size is another graph, and the same gradients
    assert not torch.equal(model.heads[1].weight, before["heads.1.weight"])
    before = copy.deepcopy(step.state_dict())
    for _ in range(2):
        with pytest.raises(apexfx.RankMismatchError, match=message):
            step((x, heads[rank]), y)
        torch.testing.assert_close(model.state_dict(), before["model"], rtol=0, atol=0)
        of_other(x * rank, y)
        step((x * rank, 1), y)
        assert same_on_all(world_size, [*model.parameters(), *other.parameters()])
        step.load_state_dict(before)


@pytest.mark.long
@on_ranks(3)
def test_a_rank_that_changes_to_another_part_of_a_model_alone_is_told_and_so_are_the_others(rank, world_size):
    refuses_other_heads(rank, world_size, (0, 1, 1), r"heads\.0\.weight.*heads\.1\.weight")


@pytest.mark.long
@on_ranks(2)
def test_each_bucket_is_waited_for_and_applied_while_the_next_one_travels(rank, world_size):
    def deep():
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512, bias=False), nn.Tanh())))

    model, reference = deep(), deep()
    step = step_of(model, ddp=apexfx.BucketConfig(message_size=2 * 512 * 512))
    wrapped = nn.parallel.DistributedDataParallel(reference)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = torch.randn(4, 512, generator=generator), torch.randn(4, 512, generator=generator)
        step(x, y)
        take_step(theirs, F.mse_loss(wrapped(x), y))
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-6, atol=1e-7)
    words = [word for line in step.report.code(stage="step").splitlines()
             for word in ("all_reduce_", "wait_tensor", "sgd_") if f".{word}" in line]
    assert words == ["all_reduce_", "all_reduce_", "wait_tensor", "sgd_", "all_reduce_", *["wait_tensor", "sgd_"] * 2]
    assert step.report.memory().largest("gradients") == 6 * 4 * 512 * 512  # two buckets, and what goes into the second
    assert [bucket.wait_before for bucket in step.report.buckets().buckets][0] != ""


def same_on_all(world_size, tensors):
    every = [None] * world_size
    dist.all_gather_object(every, [tensor.tolist() for tensor in tensors])
    return all(one == every[0] for one in every)


@pytest.mark.long
@on_ranks(2)
def test_half_parameters_with_masters_are_averaged(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    start = copy.deepcopy(model).bfloat16()
    step = step_of(model, optimizer=FusedSGD(model.parameters(), lr=0.5, master_weights=True), opt_level="O3", dtype="bfloat16")
    reference = copy.deepcopy(start)
    wrapped = nn.parallel.DistributedDataParallel(reference)
    theirs = FusedSGD(reference.parameters(), lr=0.5, master_weights=True)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)
        step(x, y)
        take_step(theirs, F.mse_loss(wrapped(x.bfloat16()).float(), y))
    masters = [step.optimizer.state[p]["master_param"] for p in model.parameters()]
    assert "all_reduce_" in step.report.code(stage="step") and same_on_all(world_size, masters)
    for p, q, first in zip(model.parameters(), reference.parameters(), start.parameters()):
        mine, wanted = step.optimizer.state[p]["master_param"], theirs.state[q]["master_param"]
        assert p.dtype == torch.bfloat16 and (mine - wanted).norm() < 0.05 * (wanted - first).norm()


@pytest.mark.long
@on_ranks(2)
def test_groups_share_buckets_and_unused_parameters_have_none(rank, world_size):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.unused, self.body, self.head = nn.Linear(2, 2), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.body(x).tanh())

    def groups(m):  # they alternate along the graph, in one bucket
        return [{"params": [m.unused.weight, m.head.weight, m.body.bias]},
                {"params": [m.body.weight, m.head.bias, m.unused.bias], "lr": 0.1, "weight_decay": 0.1}]

    for optimizer in (torch.optim.AdamW, RMSprop):
        model, reference = Partly(), Partly()
        step = step_of(model, optimizer=optimizer(groups(model), lr=0.01), keep_grads=True)
        wrapped = nn.parallel.DistributedDataParallel(reference, find_unused_parameters=True)
        theirs = optimizer(groups(reference), lr=0.01)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)
            step(x, y)
            take_step(theirs, F.mse_loss(wrapped(x), y))
        assert len(step.report.buckets().buckets) == 1 and model.unused.weight.grad is None
        torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)
        assert same_on_all(world_size, [p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.long
@on_ranks(2)
def test_skips_are_told_by_a_rank_that_waits_for_nobody(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8), nn.Linear(8, 4))
    step = step_of(model, loss_scale="dynamic")
    if rank == 1:  # which alone is told
        step._skips_teller.skips_to_tell = lambda: 0
    for _ in range(12):
        step(torch.full((4, 8), torch.inf if rank == 1 else 1.0), torch.ones(4, 4))
    assert step.skipped == 12


# ---- what a loss holds -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(2)
def test_parameters_of_a_loss_are_those_of_rank_0_and_stay_equal(rank, world_size):
    for kind, options in ((leaves.CountingTemperature, {}), (leaves.BreaksTheGraph, {"fallback": "transform"})):
        loss_fn, reference = kind(), kind()
        with torch.no_grad():
            loss_fn.log.add_(rank)
            loss_fn.calls.add_(rank)
        step, _ = leaves.with_loss(loss_fn=loss_fn, ddp=True, **options)
        assert loss_fn.calls == 0 and loss_fn.log == reference.log
        model = copy.deepcopy(step.model)
        theirs = torch.optim.AdamW([{"params": model.parameters()}, {"params": reference.parameters(), "lr": 0.1}], lr=0.01)
        for place in range(3):
            x, t = leaves.batch_of(place + 10 * rank)
            step(x, t)
            theirs.zero_grad()
            reference(model(x), t).backward()
            for p in (*model.parameters(), reference.log):
                dist.all_reduce(p.grad)
                p.grad /= world_size
            theirs.step()
        torch.testing.assert_close([*step.model.parameters(), loss_fn.log], [*model.parameters(), reference.log],
                                   rtol=1e-4, atol=1e-5)
        assert same_on_all(world_size, [*step.model.parameters(), loss_fn.log])
    with pytest.raises(apexfx.RankMismatchError, match="objective.loss_fn"):
        loss_fn = leaves.CountingTemperature()
        loss_fn.more = nn.Parameter(torch.ones(1 + rank))
        leaves.with_loss(loss_fn=loss_fn, ddp=True)


# ---- fallback="transform" ---------------------------------------------------------------------------------------------------


def compare_in_pieces(rank, world_size, **options):
    step = compare(rank, Broken, fallback="transform", **options)
    assert "in pieces" in str(step.report) and same_on_all(world_size, list(step.model.parameters()))


@pytest.mark.long
@on_ranks(2)
def test_a_step_in_pieces_is_that_of_torch_ddp_whatever_part_of_the_model_a_rank_uses(rank, world_size):
    compare_in_pieces(rank, world_size, max_grad_norm=0.05, loss_scale=1024.0, sync_bn=True, accumulate=2,
                      ddp=apexfx.BucketConfig(message_size=100))


@pytest.mark.long
@on_ranks(2)
def test_averages_are_those_of_averaged_model_on_every_rank(rank, world_size):
    model = net()
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.01), opt_level="O0", ddp=True,
                             inner="eager", safeguard=True, ema=apexfx.EMA(0.8))
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for place, (inputs, targets) in enumerate(batches(rank, 4)):
        step(inputs * float("nan") if place == rank else inputs, targets)
        if bool(step.updated):
            reference.update_parameters(model)
    assert step.skipped == 2
    torch.testing.assert_close(list(step.ema_model.parameters()), list(reference.module.parameters()), rtol=1e-5, atol=1e-6)
    assert same_on_all(world_size, list(step.ema_model.parameters()))
    with pytest.raises(apexfx.RankMismatchError, match="EMA"):
        apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), ddp=True, inner="eager",
                          ema=apexfx.EMA(0.8 + rank / 10))


@pytest.mark.long
@on_ranks(2)
def test_a_rank_that_runs_in_pieces_alone_is_told_and_so_is_the_other(rank, world_size):
    model, [batch] = Broken(breaks=rank == 1), batches(rank, 1)
    step = step_of(model, F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), fallback="transform")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(apexfx.RankMismatchError, match="in pieces, since it cannot be captured as one graph"):
        step(*batch)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.breaks = False  # and nobody is left waiting
    step(*batch)
    assert same_on_all(world_size, list(model.parameters()))


@pytest.mark.long
@on_ranks(2)
def test_a_rank_that_goes_over_to_pieces_alone_later_is_told_and_so_is_the_other(rank, world_size):
    model = Broken(breaks=False)
    step = step_of(model, F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), fallback="transform")
    data = batches(rank, 2)
    step(*data[0])
    model.breaks = rank == 1
    with pytest.raises(RankMismatchError, match="collectives of graph 1 of the step.*\n.*in pieces"):
        step(*data[1])


@pytest.mark.long
@on_ranks(2)
def test_ranks_with_other_memory_formats_are_refused(rank, world_size):
    model = net()
    if rank == 1:
        model.to(memory_format=torch.channels_last)
    step = step_of(model, F.cross_entropy)
    [batch] = batches(rank, 1)
    with pytest.raises(RankMismatchError, match="0.weight"):
        step(*batch)


def own_parts(rank, world_size, options):
    data = parts.batches(8)
    step, other = (parts.make(parts.two, ddp=True, **options) for _ in range(2))
    calls = [(torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])) for one, two in zip(data[::2], data[1::2])]
    for place, (inputs, targets) in enumerate(calls):
        step(*(half.chunk(2)[rank] for half in (inputs, targets)))
        if place == 1:
            other.load_state_dict(copy.deepcopy(step.state_dict()))
        elif place > 1:
            other(*(half.chunk(2)[rank] for half in (inputs, targets)))
    torch.testing.assert_close(other.state_dict(), step.state_dict(), rtol=0, atol=0)
    model, norms, _ = parts.loop(parts.two, calls, **options)
    parts.assert_close(dict(step.model.named_parameters()), dict(model.named_parameters()))
    parts.assert_close(step.slot("norms"), norms)
    if "safeguard" in options:
        before = copy.deepcopy(step.state_dict()["parts"])
        for _ in range(2):
            step(torch.full((5, 6), math.inf if rank else 1.0), torch.ones(5, 3))
        assert step.skipped == 1
        torch.testing.assert_close(step.state_dict()["parts"], before, rtol=0, atol=0)


@table(0, "options", [{"accumulate": 2, "loss_scale": "dynamic", "safeguard": apexfx.Safeguard(replica_check_interval=1)}, {}])
def test_parts_of_a_users_own_see_what_is_averaged(options):
    run_ranks(own_parts, 2, options)
