"""What goes wrong in data parallel training, and what every rank is told, how fast. Run with -s to read the messages."""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apexfx import RankMismatchError
from apexfx.parallel import DistributedDataParallel, RankFailureError
from tests.distributed.faults import Net, explode, raises, run_faults, train, train_past_a_nan, wait_until


def _another_model(rank, world_size, report):
    with raises("another model", report, rank, RankMismatchError, r'rank 0 has \["module|rank 0 has \["a.weight", \[4, 3\]', 20):
        DistributedDataParallel(Net(5 if rank == 1 else 4), timeout_s=15)
    with raises("another option", report, rank, RankMismatchError, "options of DistributedDataParallel", 20):
        DistributedDataParallel(Net(), message_size=10 + rank, timeout_s=15)


def _skipped_backward(rank, world_size, report):
    model = DistributedDataParallel(Net(), timeout_s=15)
    train(model, rank, 2)
    if rank == 1:
        model(torch.ones(2, 3))  # and no backward: the loss was not finite, say
    with raises("skipped backward", report, rank, RankFailureError, "rank 1: 4 forwards so far\n.*A rank skipped|rank 1: 4", 20):
        train(model, rank)
    train(model, rank, 2)  # the ranks are in step again
    assert (model.module.b.bias.grad == 2).all()


def _failed_backward(rank, world_size, report):
    model = DistributedDataParallel(Net(), message_size=1, timeout_s=15)
    train(model, rank)
    x = torch.ones(2, 3, requires_grad=True)
    hidden = model.module.a.register_forward_hook(lambda _m, _i, out: out.register_hook(explode) and None) if rank == 0 else None
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        hidden.remove()
    with raises("failed backward", report, rank, RankFailureError, "rank 0: failed: an exception ended the backward", 20):
        train(model, rank)
    assert time.monotonic() - begin < 20
    train(model, rank, 2)
    assert (model.module.b.bias.grad == 2).all()


def _not_a_number(rank, world_size, report):
    train_past_a_nan(DistributedDataParallel(Net()), rank)


def _bypassed(rank, world_size, report):
    model = DistributedDataParallel(Net(), timeout_s=15)
    train(model, rank)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.module(torch.full((2, 3), rank + 1.0)).sum().backward()
    Path(report, f"bypassed forward.{rank}").write_text(f"0.00 s  {said[0].category.__name__}: {said[0].message}")
    mean = sum(range(1, world_size + 1)) / world_size
    assert torch.allclose(model.module.a.weight.grad, model.module.b.weight.sum(0)[:, None].expand(4, 3) * 2 * mean)
    model.module.late = nn.Linear(2, 2)  # added, and never seen by the wrapper's forward
    with raises("bypassed, new parameter", report, rank, RankFailureError, "'late.weight' has a gradient, but was added", 20):
        model.module.late(model.module(torch.ones(2, 3))).sum().backward()
    model.module.late = None
    train(model, rank)


def _late_parameters(rank, world_size, report):
    model = DistributedDataParallel(Net(), timeout_s=15)
    train(model, rank)
    model.module.a.weight.requires_grad_(False)
    train(model, rank)
    assert model.module.a.weight.grad is None and model.bucket_plan.parameters[-1] == "a.bias"
    model.module.a.weight.requires_grad_(True)
    model.module.b = nn.Sequential(model.module.b, nn.Linear(2, 2))
    train(model, rank, 2)
    assert len(model.bucket_plan.parameters) == 6 and (model.module.b[1].bias.grad == 2).all()


def _gan(rank, world_size, report):
    """Two networks, one trained against the other, several backwards a forward, a gradient penalty."""
    torch.manual_seed(1)
    maker, judge = DistributedDataParallel(Net(3), timeout_s=15), DistributedDataParallel(nn.Linear(2, 1), timeout_s=15)
    x = torch.full((2, 3), rank + 1.0)
    for _ in range(2):
        judge.zero_grad()
        fake = maker(x)
        inner = fake.detach().requires_grad_()
        out = judge(inner).sum()
        [slope] = torch.autograd.grad(out, inner, create_graph=True)  # through the judge, for no parameter of it
        (slope.square().sum() + out).backward(retain_graph=True)
        out.backward()  # a second backward through the same forward
        expected = slope.detach().sum(0) * 2 + 2 * inner.detach().sum(0)
        dist.all_reduce(expected)
        assert torch.allclose(judge.module.weight.grad[0], expected / world_size, rtol=1e-5)
        for p in judge.parameters():
            p.requires_grad_(False)
        maker.zero_grad()
        judge(fake).sum().backward()
        assert maker.module.b.bias.grad is not None
        for p in judge.parameters():
            p.requires_grad_(True)


def _sparse(rank, world_size, report):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)

        def forward(self, i):
            return self.out(self.words(i))

    model = DistributedDataParallel(Words(), timeout_s=15)
    with raises("sparse gradient", report, rank, RankFailureError, "'words.weight' is torch.sparse_coo.*sparse=False", 20):
        model(torch.tensor([1, 2])).sum().backward()


def _changed_parameter(rank, world_size, report):
    model = DistributedDataParallel(Net(), check_parameters_every=2)
    train(model, rank, 2)
    if rank == 1:
        with torch.no_grad():
            model.module.b.weight[0, 0] += 1e-3
    train(model, rank)
    with raises("changed parameter", report, rank, RankMismatchError, "parameter 'b.weight' .* no longer has the same value", 20):
        train(model, rank)


def _stuck(rank, world_size, report):
    model = DistributedDataParallel(Net(), process_group=dist.new_group(), timeout_s=3)
    train(model, rank)
    if rank == 1:
        wait_until(lambda: all(Path(report, f"stuck rank.{other}").exists() for other in (0, 2)))
        return
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("apexfx").addHandler(handler)
    with raises("stuck rank", report, rank, RankFailureError, r"rank [02] waited \d\.\d s for the allreduce of bucket 0", 8):
        train(model, rank)
    logging.getLogger("apexfx").removeHandler(handler)
    [line] = lines
    Path(report, f"stuck rank, log.{rank}").write_text(line)
    assert f"rank {rank} has waited 1 s for the allreduce of bucket 0 (b.bias ... a.weight) in backward 2" in line
    assert f"so does rank {2 - rank}" in line and "nothing was heard of rank 1." in line


def _no_sync_alone(rank, world_size, report):
    """One rank is inside no_sync(): who waits for it finds out, and so does it when it comes."""
    model = DistributedDataParallel(Net(), timeout_s=30)
    train(model, rank)
    for case in ("no_sync alone", "no_sync alone again"):
        if rank == 1:
            with model.no_sync():
                train(model, rank, 2)
            wait_until(lambda case=case: all(Path(report, f"{case}.{other}").exists() for other in (0, 2)))
            with raises(case, report, rank, RankFailureError, "rank 1: .*holds gradients from inside", 8):
                model(torch.ones(2, 3)).sum().backward()
        else:
            with raises(case, report, rank, RankFailureError, "rank 1 keeps the gradients of this", 8):
                train(model, rank)
        train(model, rank)
        assert (model.module.b.bias.grad == 2).all()


def _no_sync_alone_and_back(rank, world_size, report):
    """The same, too fast for anyone to wait."""
    model = DistributedDataParallel(Net(), timeout_s=30)
    train(model, rank, 2)
    if rank == 1:
        with model.no_sync():
            train(model, rank)
    with raises("no_sync alone, and back", report, rank, RankFailureError, "rank 1: .*holds gradients from", 8):
        model(torch.ones(2, 3)).sum().backward()
    for num_local, mean in ((1 + rank, 6), (0, 2)):  # as many as each rank likes, unless it is none
        model.zero_grad()
        for _ in range(num_local):
            with model.no_sync():
                model(torch.ones(2, 3)).sum().backward()
        model(torch.ones(2, 3)).sum().backward()
        assert (model.module.b.bias.grad == mean).all()


def _killed(rank, world_size, report):
    model = DistributedDataParallel(Net(), message_size=1, timeout_s=20)
    train(model, rank)
    if rank == 1:
        model.module.a.weight.register_hook(lambda _: os._exit(0))  # in the middle of backward, as by SIGKILL
        train(model, rank)
    with raises("killed rank", report, rank, RankFailureError, "another rank died", 20):
        train(model, rank)
    Path(report, f"done.{rank}").touch()
    os._exit(0)  # the group is broken: no barrier


CASES = (_another_model, _skipped_backward, _failed_backward, _not_a_number, _bypassed, _late_parameters, _gan, _sparse,
         _changed_parameter, _stuck, _no_sync_alone, _no_sync_alone_and_back, _killed)


def every_fault(rank, world_size, report):
    for case in CASES:
        case(rank, world_size, report)
        if case is not _killed:
            dist.barrier()


def test_every_fault(tmp_path):
    run_faults(every_fault, tmp_path)
    assert {"done.0", "done.2"} <= {path.name for path in tmp_path.iterdir()}
