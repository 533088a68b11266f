"""Every kind of batch norm module under transform(sync_bn=True), on uneven and empty ranks, against one full batch in float64."""

from __future__ import annotations

import copy
import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.parallel import convert_syncbn_model
from apexfx.testing import assert_close
from tests.distributed.launch import on_ranks


class Scaled(nn.BatchNorm2d):
    """A user's subclass with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


def stack(norm, last=None):
    """A batch norm on the data itself, so that a mean of 1000 reaches it without a rounding before, and one further in."""
    return nn.Sequential(norm(3), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), (last or norm)(4))


class Fused(nn.Module):
    """Every fusion that the pass knows, and one batch norm in a checkpoint."""

    rematerialize = True

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).sin()
        x = F.relu(self.bn2(self.conv2(x)) + x)
        return checkpoint(self.tail, x, use_reentrant=False) if self.rematerialize else self.tail(x)

    def tail(self, x):
        return F.relu(self.bn3(x.sin()))


MODELS = {
    "BatchNorm2d": lambda: stack(nn.BatchNorm2d),
    "SyncBatchNorm": lambda: stack(nn.SyncBatchNorm),
    "cumulative": lambda: stack(lambda c: nn.BatchNorm2d(c, momentum=None)),
    "not tracking": lambda: stack(lambda c: nn.BatchNorm2d(c, track_running_stats=False, affine=False)),
    "subclass": lambda: stack(Scaled, nn.SyncBatchNorm),
    "fused": Fused,
}


def batch(world_size, offset):
    """Return the whole batch and how many rows each rank takes; the last rank takes none when there are three."""
    rows = [5, 2, 0][:world_size]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(rows), 3, 5, 5, generator=generator) + offset, rows


def full_batch(model, x):
    """Return outputs and leave gradients in a float64 copy in which all batch norms see the whole batch at once."""
    model = copy.deepcopy(model).double()
    model.rematerialize = False  # in eager it updates the running statistics once more
    for name, module in list(model.named_children()):
        if isinstance(module, nn.SyncBatchNorm):  # on one process and the CPU torch has no such thing
            plain = nn.BatchNorm2d(module.num_features, momentum=module.momentum).double()
            plain.load_state_dict(module.state_dict())
            setattr(model, name, plain)
    x = x.double().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return model, x, y


@pytest.mark.long
@on_ranks(3)
def test_matches_full_batch(rank, world_size):
    for offset in (0.0, 1000.0):
        whole, rows = batch(world_size, offset)
        start = sum(rows[:rank])
        mine = slice(start, start + rows[rank])
        for name, make in MODELS.items():
            if offset and name != "BatchNorm2d" or world_size == 3 and name not in ("BatchNorm2d", "SyncBatchNorm", "fused"):
                continue  # every kind on two ranks; the empty rank and the shifted data for those that differ in kind
            torch.manual_seed(3)
            torch._dynamo.reset()
            source = make()
            reference, x_full, y_full = full_batch(source, whole)
            model = apexfx.transform(source, opt_level="O0", sync_bn=True, inner="eager", fullgraph=True)
            x = whole[mine].clone().requires_grad_()
            y = model(x)
            weights = torch.linspace(-1, 1, y_full.numel()).view_as(y_full)[mine]
            (y * weights).sum().backward()
            assert_close(y, y_full[mine])
            assert_close(x.grad, x_full.grad[mine], scale=5)  # through both layers and a convolution
            for p, q in zip(model.parameters(), reference.parameters()):
                dist.all_reduce(p.grad)  # the gradients of weights are each rank's own share
                # A sum over 175 positions whose terms are as large as the largest gradient, and which cancel in front of a norm.
                assert_close(p.grad, q.grad, scale=30 * max(1.0, float(q.grad.abs().max())))
            for buffer, other in zip(model.buffers(), reference.buffers()):
                assert_close(buffer, other, dtype=torch.float32, scale=5)  # of data that went through a layer and a convolution
            texts = (model.print_readable(after="lowered", print_output=False),
                     model.print_readable(stage="backward", print_output=False))
            # One a layer each way; a layer in a checkpoint sums its statistics once more in the backward pass.
            expected = [3, 4] if name == "fused" else [2, 2]
            assert [text.count("_c10d_functional.all_reduce") for text in texts] == expected, (name, texts)


@pytest.mark.long
@on_ranks(2)
def test_every_kind_matches_full_batch(rank, world_size):
    test_matches_full_batch.case(rank, world_size)


@pytest.mark.long
@on_ranks(2)
def test_left_to_eager(rank, world_size):
    class Broken(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.linear, self.bn = nn.Linear(4, 4), norm(4)

        @torch._dynamo.disable
        def hidden(self, x):
            return self.bn(x)

        def forward(self, x):
            return self.hidden(self.linear(x))

    torch.manual_seed(0)
    source = Broken(nn.BatchNorm1d)
    reference = copy.deepcopy(source).double()
    whole = torch.randn(3 * world_size, 4)
    model = apexfx.transform(source, opt_level="O0", sync_bn=True, inner="eager")
    y = model(whole[3 * rank:3 * rank + 3])
    assert_close(y, reference(whole.double())[3 * rank:3 * rank + 3])  # synchronized all the same
    assert any("batch norm 'bn' was left to eager" in note for note in model.report.notes)

    class Odd(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(RuntimeError, match=r"batch norm, Odd\(4, .* was left to eager .*statistics of this rank alone"):
        apexfx.transform(Broken(Odd), opt_level="O0", sync_bn=True, inner="eager")(torch.randn(3, 4))

    class Recomputed(Broken):
        @torch._dynamo.disable
        def hidden(self, x):
            return checkpoint(self.bn, x, use_reentrant=reentrant)

    for reentrant, said in ((True, "'bn' was left to eager .*, under no_grad"), (False, "different metadata|tensors was saved")):
        with pytest.raises(RuntimeError, match=said):
            apexfx.transform(Recomputed(nn.BatchNorm1d), opt_level="O0", sync_bn=True, inner="eager")(whole).sum().backward()


@on_ranks(2)
def test_sync_batch_norm_modules_stay_synchronized_unasked(rank, world_size):
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    reference.load_state_dict(source.state_dict())
    whole = torch.randn(3 * world_size, 4)
    model = apexfx.transform(source, opt_level="O0", inner="eager", fullgraph=True)
    assert_close(model(whole[3 * rank:3 * rank + 3]), reference(whole.double())[3 * rank:3 * rank + 3])


@pytest.mark.long
@on_ranks(2)
def test_one_value_of_one_rank_under_the_backend(rank, world_size):
    """Torch checks its module before there is a graph; the other rank is told within the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = torch.compile(nn.BatchNorm1d(4), backend="apex", options={
        "opt_level": "O0", "sync_bn": True, "inner": "eager", "process_group": group})
    error, match = (Exception, "more than 1 value") if rank == 1 else (apexfx.RankFailureError, "gave up the comparison")
    with pytest.raises(error, match=match):
        model(torch.randn(3 - 2 * rank, 4))


class Doubled(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) * 2


@pytest.mark.long
@on_ranks(2)
def test_the_model_is_a_batch_norm(rank, world_size):
    whole = torch.randn(3 * world_size, 4, generator=torch.Generator().manual_seed(1))
    for rows, source in ((1, nn.BatchNorm1d(4)), (3, nn.BatchNorm1d(4, momentum=None)), (3, nn.SyncBatchNorm(4)),
                         (3, Doubled(4))):
        reference = nn.BatchNorm1d(4, momentum=source.momentum).double()
        model = apexfx.transform(source, opt_level="O0", sync_bn=True, inner="eager", fullgraph=True)
        y = reference(whole[:rows * world_size].double()) * (2 if isinstance(source, Doubled) else 1)
        assert_close(model(whole[rows * rank:rows * rank + rows]), y[rows * rank:rows * rank + rows])
        torch.testing.assert_close(source.running_var, reference.running_var.float())


@pytest.mark.long
@on_ranks(2)
def test_after_a_graph_break(rank, world_size):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.linear(x)
            torch._dynamo.graph_break()
            return self.bn(x)

    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("apexfx").addHandler(handler)
    model = apexfx.transform(Broken(), opt_level="O0", sync_bn=True, inner="eager")
    model(torch.randn(3, 4))
    logging.getLogger("apexfx").removeHandler(handler)
    assert [len(g.forward.passes[0].matches) for g in model.report.graphs] == [0, 1]
    assert not any("rewrote nothing" in text for text in (*said, str(model.report)))


@pytest.mark.long
@on_ranks(2)
def test_evaluation_without_running_statistics_is_local(rank, world_size):
    for norm in (nn.BatchNorm1d, nn.SyncBatchNorm):
        source = nn.Sequential(norm(4, track_running_stats=False))
        model = apexfx.transform(source, opt_level="O0", sync_bn=True, inner="eager", fullgraph=True).eval()
        if rank == 0:  # a collective would hang here
            x = torch.randn(6, 4)
            assert_close(model(x), nn.functional.batch_norm(x.double(), None, None, training=True))


@pytest.mark.long
@on_ranks(2)
def test_ranks_that_recompile_at_other_steps(rank, world_size):
    """A rank compiles for a new batch size while the other has a graph, and they agree on every collective."""
    torch.manual_seed(0)
    source = stack(nn.BatchNorm2d)
    reference = copy.deepcopy(source)
    model = apexfx.transform(source, opt_level="O0", sync_bn=True, inner="eager", fullgraph=True)
    for rows in (2, 4, 3):  # of rank 1
        whole = torch.randn(2 + rows, 3, 4, 4)
        mine = slice(2) if rank == 0 else slice(2, 2 + rows)
        assert_close(model(whole[mine]), reference(whole)[mine], scale=8)


@pytest.mark.long
@on_ranks(2)
def test_several_buckets_of_the_wrapper_of_torch(rank, world_size):
    """Its DDPOptimizer cuts the graph, and runs each part on fake tensors to compile the next."""
    for sync_bn in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        source = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU())))
        reference = copy.deepcopy(source)
        models = (torch.compile(source, backend="apex", options={"opt_level": "O0", "inner": "eager", "sync_bn": sync_bn}),
                  convert_syncbn_model(reference) if sync_bn else reference)
        wrapped = [nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1.5) for model in models]
        for _ in range(2):
            x = torch.randn(6 + rank, 512) + rank
            for model in wrapped:
                model.zero_grad()
                model(x).square().mean().backward()
        assert len(apexfx.last_report().graphs) > 1
        torch.testing.assert_close([p.grad for p in source.parameters()], [p.grad for p in reference.parameters()])
        torch.testing.assert_close(source.state_dict(), reference.state_dict())
