"""FSDP, DTensors and wrappers that average, in, around and put on later: the same sentence on every rank, nobody waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import apexfx
from apexfx.parallel import DistributedDataParallel, Reducer
from tests.distributed.launch import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(self.a(x).relu())


def transformed(model=None, inner="eager", **options):
    return apexfx.transform(model or Net(), opt_level="O0", inner=inner, **options)


def compiled(model, **options):
    return torch.compile(model, backend="apex", options={"opt_level": "O0", "inner": "eager", **options})


def wrapped(model):
    return DistributedDataParallel(model, timeout_s=15)


def train(model, rank):
    model(torch.full((2, 4), rank + 1.0)).sum().backward()


def ran(model):
    train(model, dist.get_rank())
    model.zero_grad()
    return model


def fsdp1(model):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def tensor_parallel(model):
    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"a": ColwiseParallel(), "b": RowwiseParallel()})


def distributed(model):
    weight = distribute_tensor(model.a.weight, init_device_mesh("cpu", (2,)), [Shard(0)])
    model.a.weight = nn.Parameter(weight)
    return model


def part(shard, model):
    shard(model.a)
    return model


# Each gives a model whose making, or whose first training step, must raise.
WHOLE = "apexfx works on whole parameters"
SHARDED = {
    **{f"{name} in transform": (lambda shard=shard: transformed(shard(Net()))) for name, shard in
       (("fsdp1", fsdp1), ("fsdp2", fsdp2), ("tensor parallel", tensor_parallel), ("DTensor", distributed))},
    "fsdp2 in transform, ddp": lambda: transformed(fsdp2(Net()), ddp=True),
    "fsdp2 in transform, sync_bn": lambda: transformed(fsdp2(Net()), sync_bn=True),
    "fsdp2 of a part in transform": lambda: transformed(part(fsdp2, Net())),
    "fsdp1 around transform": lambda: fsdp1(transformed(ddp=True)),
    "fsdp2 around transform": lambda: fsdp2(transformed(ddp=True)),
    "fsdp2 around transform without ddp": lambda: fsdp2(transformed()),
    "fsdp2 later": lambda: fsdp2(ran(transformed(ddp=True))),
    "fsdp2 of a part later": lambda: part(fsdp2, ran(transformed(ddp=True))),
    "tensor parallel later": lambda: tensor_parallel(ran(transformed(ddp=True))),
    "fsdp1 in compile": lambda: compiled(fsdp1(Net())),
    "fsdp2 in compile": lambda: compiled(fsdp2(Net())),
    "tensor parallel in compile": lambda: compiled(tensor_parallel(Net())),
    "fsdp1 in eager": lambda: wrapped(fsdp1(Net())),
    "fsdp2 in eager": lambda: wrapped(fsdp2(Net())),
    "tensor parallel in eager": lambda: wrapped(tensor_parallel(Net())),
    "fsdp2 around eager": lambda: fsdp2(wrapped(Net())),
    "fsdp1 around eager, later": lambda: fsdp1(ran(wrapped(Net()))),
    "fsdp2 of a part in eager, later": lambda: (lambda model: (fsdp2(model.module.a), model)[1])(ran(wrapped(Net()))),
    "fsdp2 in Reducer": lambda: Reducer(fsdp2(Net())),
}
DDP, TWICE, WRAPPED = "wrapped in torch.nn.parallel", "with ddp already and averages its gradients", "is wrapped in Distributed"
AVERAGED = {
    "ddp in compile": (lambda: compiled(Net(), ddp=True), "ddp= belongs to apexfx.transform"),
    "torch DDP around transform": (lambda: TorchDDP(transformed(ddp=True)), DDP),
    "torch DDP later": (lambda: TorchDDP(ran(transformed(ddp=True))), DDP),
    "torch DDP, inductor from its cache": (lambda: TorchDDP(transformed(ddp=True, inner="inductor")), DDP),
    "torch DDP around a container": (lambda: TorchDDP(nn.Sequential(transformed(ddp=True))), DDP),
    "torch DDP in transform": (lambda: transformed(TorchDDP(Net()), ddp=True), WRAPPED),
    "eager in transform": (lambda: transformed(nn.Sequential(wrapped(Net())), ddp=True), WRAPPED),
    "torch DDP in eager": (lambda: wrapped(nn.Sequential(TorchDDP(Net()))), WRAPPED),
    "eager in eager": (lambda: wrapped(nn.Sequential(wrapped(Net()))), WRAPPED),
    "transform in eager": (lambda: wrapped(transformed(ddp=True)), TWICE),
    "transform in a container in eager": (lambda: wrapped(nn.Sequential(transformed(ddp=True))), TWICE),
    "transform in Reducer": (lambda: Reducer(transformed(ddp=True)), TWICE),
}


def _refusals(rank, world_size, every):
    for name, (make, message) in [*{**{name: (make, WHOLE) for name, make in SHARDED.items()}, **AVERAGED}.items()][::every]:
        torch.manual_seed(0)
        with pytest.raises(Exception, match=f"(?s)apexfx: .*{message}"):
            train(make(), rank)
            raise AssertionError(f"{name} trained without a word")
        torch._dynamo.reset()
        dist.barrier()


@pytest.mark.long
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_sharded_and_averaged_models_are_refused(every):
    run_ranks(_refusals, 2, every, timeout=300)


def _torch_ddp_without_ddp(rank, world_size):
    torch.manual_seed(0)
    source = Net()
    model = TorchDDP(transformed(source))
    for _ in range(2):
        model.zero_grad()
        train(model, rank)
    grads = {name: p.grad.clone() for name, p in source.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in source.named_parameters()}
    for other in range(world_size):
        source.zero_grad()
        Net.forward(source, torch.full((2, 4), other + 1.0)).sum().backward()
        for name, p in source.named_parameters():
            mean[name] += p.grad / world_size
    for name, grad in grads.items():
        torch.testing.assert_close(grad, mean[name])


def test_torch_ddp_around_a_transform_without_ddp_averages():
    run_ranks(_torch_ddp_without_ddp, 2)
