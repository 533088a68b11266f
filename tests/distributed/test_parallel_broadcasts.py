"""What DistributedDataParallel copies from rank 0, and when; copies of the wrapper itself."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist

from apexfx.distributed.broadcast import broadcast_from_first
from apexfx.parallel import DistributedDataParallel
from tests.distributed.collectives import recorded
from tests.distributed.launch import run_ranks
from tests.distributed.wrapped import SIZES, Net, backward, check_mean, data, wrapped


def _broadcasts(rank):
    for policy, at_start, each in (("start", True, 0), (True, True, 1), (False, False, 0)):
        net = Net()
        with torch.no_grad():
            net.seen += rank
            net.a.weight += rank
        with recorded() as calls:
            model = DistributedDataParallel(net, broadcast_buffers=policy)
        assert [c.numel for c in calls if c.name == "broadcast"] == [4 * sum(SIZES)] + [4 * 2] * at_start  # bytes
        assert net.seen.tolist() == [0.0 if at_start else rank] * 2
        assert torch.equal(net.a.weight, Net().a.weight)
        net.seen += 1 + rank
        with recorded() as calls:
            model(data(rank))
            model.eval()
            model(data(rank))
            with torch.no_grad():
                model(data(rank))
            model.train()
        assert [c.numel for c in calls] == [4 * 2] * each
        assert net.seen[0] == (1 if each else 1 + rank + (0 if at_start else rank))


def _broadcasts_of_every_dtype(rank):
    def tensors(k):
        dtypes = (torch.int8, torch.float64, torch.bool, torch.complex64, torch.bfloat16, torch.complex128, torch.int64,
                  torch.float32)
        vectors = [torch.full((n,), k).to(dtype) for n, dtype in enumerate(dtypes)]
        return [*vectors, torch.full((2, 3), k).half().t(), torch.tensor(k)]

    given = tensors(1 - rank)
    with recorded() as calls:
        broadcast_from_first(given, dist.group.WORLD)
    assert [c.name for c in calls] == ["broadcast"]
    assert all(map(torch.equal, given, tensors(1)))


def _broadcasts_in_parts(rank):
    given = [torch.full((2**23,), 1.0 - rank) for _ in range(5)]  # 32 MiB each
    with recorded() as calls:
        broadcast_from_first(given, dist.group.WORLD)
    assert [c.numel for c in calls] == [2**26, 2**26, 2**25]  # in bytes
    assert all(bool((t == 1).all()) for t in given)


def _copies(rank):
    model, twin, x = wrapped(rank, message_size=30)
    assert list(model.state_dict()) == ["module." + n for n in twin.state_dict()]
    with pytest.raises(AttributeError):
        model.a  # noqa: B018  attributes are not forwarded
    alone = copy.deepcopy(model) if rank == 0 else None  # on one rank: an average of the weights
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        backward(other, x)
        backward(other, x)
        check_mean(other, twin, x)
        assert other.module.a.weight is not model.module.a.weight
    del alone
    backward(model, x)
    check_mean(model, twin, x)


CASES = (_broadcasts, _broadcasts_of_every_dtype, _broadcasts_in_parts, _copies)


def every_broadcast(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_every_broadcast():
    run_ranks(every_broadcast, 2)
