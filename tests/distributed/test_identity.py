"""A gradient is averaged because its parameter is the model's, wherever the program reached it from."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import apexfx
from apexfx.errors import RankFailureError
from tests.distributed.launch import run_ranks
from tests.tables import table


class Listed(nn.Module):
    """Registered layers of equal and different shapes, reached through a plain list, a helper and a local variable."""

    class Helper:
        def __init__(self, layer):
            self.layer = layer

    def __init__(self):
        super().__init__()
        self.stages = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6)]
        for name, layer in zip("abc", self.stages):
            self.add_module(name, layer)
        self.add_module("weight", nn.Linear(6, 6, bias=False))
        self.helper = self.Helper(self.weight)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.stages:
            x = torch.tanh(layer(x))
        layer = self.helper.layer
        torch._dynamo.graph_break()
        x = layer(x)
        layer = self.last
        torch._dynamo.graph_break()
        return layer(x)


class Elsewhere(Listed):
    """A part of a layer's gradient comes from a frame that Dynamo leaves to eager."""

    @torch._dynamo.disable
    def left_to_eager(self, x):
        return self.a(x)

    def forward(self, x):
        return self.left_to_eager(x) + super().forward(x).sum()


class Unregistered(Listed):
    def __init__(self):
        super().__init__()
        self.loose = [nn.Parameter(torch.ones(2))]

    def forward(self, x):
        return super().forward(x) * self.loose[0]


def square(model, x):
    return model(x).square().mean()


def with_decay(model, x):
    return square(model, x) + sum(p.square().sum() for p in model.parameters())


def with_a_layer_of_its_own(model, x):
    return square(model, x) + (x @ model.a.weight).square().mean() + (x @ model.b.weight).square().mean()


def two_forwards(model, x):
    return square(model, x) + square(model, x - 1)


def two_forwards_and_more(model, x):
    return two_forwards(model, x) + (x @ model.a.weight).square().mean()


LOSSES = (square, with_decay, with_a_layer_of_its_own, two_forwards, two_forwards_and_more)


def transformed(source, **options):
    return apexfx.transform(source, opt_level="O0", ddp=True, **options)


def wrapped(source, **options):
    return apexfx.parallel.DistributedDataParallel(apexfx.transform(source, opt_level="O0", **options))


EXECUTORS = (transformed, wrapped)


def pair(kind=Listed, ddp=True):
    """Return a transformed model, and a plain one with its parameters."""
    model, reference = apexfx.transform(kind(), opt_level="O0", inner="eager", ddp=ddp), kind()
    reference.load_state_dict(model.state_dict())
    return model, reference


def drawn(seed):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def check_gradients(model, reference, factor, said=""):
    """Compare `.grad` with the sums over the ranks of those of `reference`, times a factor."""
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            dist.all_reduce(q.grad)
            torch.testing.assert_close(p.grad.detach(), q.grad * factor, rtol=1e-5, atol=1e-6, msg=f"{name}{said}")


def check(model, reference, loss_of, rank, world_size, steps=3):
    for step in range(steps):
        x = drawn(10 * step + rank)
        model.zero_grad()
        reference.zero_grad()
        loss_of(getattr(model, "module", model), x).backward()
        loss_of(reference, x).backward()
        check_gradients(model, reference, 1 / world_size, f", step {step}")


def gradients(rank, world_size, executors, losses, inner):
    for make in executors:
        for loss_of in losses:
            torch._dynamo.reset()
            torch.manual_seed(0)
            source = Listed()
            reference = copy.deepcopy(source)
            check(make(source, inner=inner), reference, loss_of, rank, world_size)
            dist.barrier()


def errors(rank, world_size):
    x = torch.full((5, 4), rank + 1.0)
    model, reference = pair(Elsewhere)
    check(model, reference, square, rank, world_size)  # averaged once more
    assert any("'a.weight', 'a.bias' has a share from outside" in note for note in model.report.notes)
    with pytest.raises(apexfx.UnsynchronizedGradientError, match="forward uses L\\['self'\\].loose\\[0\\]"):
        transformed(Unregistered(), inner="eager")(x)
    model = apexfx.transform(Listed(), opt_level="O0", inner="eager", ddp=apexfx.BucketConfig(gradient_average=False))
    square(model, x).backward()
    with pytest.raises(apexfx.UnsynchronizedGradientError, match="(?s)'a.weight'.* has a share from outside.*gradient_average"):
        with_a_layer_of_its_own(model, x).backward()


def local_shares(rank, world_size):
    """Inside no_sync() a share from outside stays local, and is averaged with the rest."""
    model, reference = pair()
    x = drawn(rank)
    early = square(model, x)
    with model.no_sync():
        (early + with_a_layer_of_its_own(model, x)).backward()
    square(model, x).backward()
    (2 * square(reference, x) + with_a_layer_of_its_own(reference, x)).backward()
    check_gradients(model, reference, 1 / world_size)


def frozen_behind_local_gradients(rank, world_size):
    """What is frozen between no_sync() and the backward that averages has its average."""
    for average in (True, False):
        model, reference = pair(ddp=apexfx.BucketConfig(gradient_average=average))
        x = drawn(rank)
        for _ in range(2):
            for each, context in ((model, model.no_sync()), (reference, contextlib.nullcontext())):
                each.zero_grad()
                with context:
                    square(each, x).backward()
                each.a.weight.requires_grad_(False)
                square(each, x).backward()
                each.a.weight.requires_grad_(True)
            check_gradients(model, reference, 1 / world_size if average else 1.0)


class Switching(Listed):
    """A frame that begins without gradients and goes on with them."""

    def forward(self, x):
        with torch.no_grad():
            torch._dynamo.graph_break()
            scale = self.b(x).mean()
        return super().forward(x) * scale


class Detached(Listed):
    """A layer in the graph that no gradient reaches."""

    def forward(self, x):
        with torch.no_grad():
            scale = self.unused(x)
        return super().forward(x) * scale.mean()

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)


def gradients_switched_on_inside(rank, world_size):
    for kind in (Switching, Detached):
        check(*pair(kind), square, rank, world_size)


class LastInEager(Listed):
    @torch._dynamo.disable
    def forward_last(self, x):
        return self.last(x)

    def forward(self, x):
        return self.forward_last(self.weight(self.c(self.b(self.a(x)))))


def unfrozen_in_eager(rank, world_size):
    """What no graph holds compiles nothing anew when it is unfrozen, replaced or added."""
    x = torch.full((5, 4), rank + 1.0)
    model = LastInEager()
    model.last.requires_grad_(False)
    model = transformed(model, inner="eager")
    square(model, x).backward()
    model.last.requires_grad_(True)
    with pytest.raises(apexfx.UnsynchronizedGradientError, match="No captured graph holds 'last.weight', 'last.bias'"):
        square(model, x).backward()
    model.last = nn.Linear(6, 3)
    with pytest.raises(apexfx.UnsynchronizedGradientError, match="No captured graph holds 'last.weight', 'last.bias'"):
        square(model, x).backward()


def a_sum_that_comes_after_local_gradients(rank, world_size):
    x = torch.full((5, 4), rank + 1.0)
    model = apexfx.transform(Listed(), opt_level="O0", inner="eager", ddp=apexfx.BucketConfig(gradient_average=False))
    early = square(model, x)
    with model.no_sync():
        square(model, x).backward()
    with pytest.raises(apexfx.UnsynchronizedGradientError, match="those sums would be summed once more"):
        early.backward()


class Batch:
    def __init__(self, x):
        self.x = x


class OfObjects(Listed):
    def forward(self, batch):
        return super().forward(batch.x)


def an_argument_that_holds_tensors(rank, world_size):
    batch = Batch(torch.full((5, 4), rank + 1.0, requires_grad=True))
    square(transformed(OfObjects(), inner="eager"), batch).backward()
    assert batch.x.grad is not None


class InPlace(Listed):
    """A frame whose only effect is what it writes into a tensor of the frame before."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        x.mul_(self.scale)
        torch._dynamo.graph_break()
        x[1].mul_(self.scale.exp())
        torch._dynamo.graph_break()
        return super().forward(x)


def written_in_place(rank, world_size):
    check(*pair(InPlace), square, rank, world_size)


def asked_for_with_autograd_grad(rank, world_size):
    (model, reference), x = pair(), drawn(rank)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(square(reference, x), list(reference.parameters()))
    for gradient, local in zip(torch.autograd.grad(square(model, x), parameters), wanted):
        dist.all_reduce(local)
        torch.testing.assert_close(gradient, local / world_size, rtol=1e-5, atol=1e-6)
    with model.no_sync():
        square(model, x).backward()
        torch.autograd.grad(square(model, x), parameters)  # local, as what else is inside


def others_in_the_place_of_parameters(rank, world_size):
    """functional_call() registers what it is given under the names of the model's own, for the time of the call."""
    (model, reference), x = pair(), drawn(rank)
    others = {name: nn.Parameter(p.detach() + 1) for name, p in model.named_parameters()}
    for each, block in ((model, model.no_sync()), (reference, contextlib.nullcontext())):
        with block:
            square(each, x).backward()
    torch.func.functional_call(model, others, (x,)).square().mean().backward()
    given = {name: nn.Parameter(p.detach() + 1) for name, p in reference.named_parameters()}
    torch.func.functional_call(reference, given, (x,)).square().mean().backward()
    local = [*(p.grad for p in reference.parameters()), *(p.grad for p in given.values())]
    for p, gradient in zip([*model.parameters(), *others.values()], local):
        dist.all_reduce(gradient)
        torch.testing.assert_close(p.grad, gradient / world_size, rtol=1e-5, atol=1e-6)
    doubled = {name: 2 * p for name, p in model.named_parameters()}
    with pytest.raises(apexfx.UnsynchronizedGradientError, match="'a.weight', .* was computed outside of the transformed"):
        torch.func.functional_call(model, doubled, (x,)).square().mean().backward()


def the_source_after_the_model(rank, world_size):
    source, reference = Listed(), Listed()
    model = transformed(source, inner="eager")
    reference.load_state_dict(model.state_dict())
    square(model, torch.full((5, 4), rank + 1.0)).backward()
    del model
    wrapper = TorchDDP(source)
    check(source, reference, lambda each, x: square(wrapper if each is source else each, x), rank, world_size)


class LooseTensor(Listed):
    def __init__(self):
        super().__init__()
        self.loose = [torch.ones(2, requires_grad=True)]

    def forward(self, x):
        loose = self.loose[0]
        torch._dynamo.graph_break()
        return super().forward(x) * loose


def a_leaf_in_a_local(rank, world_size):
    model = transformed(LooseTensor(), inner="eager")
    square(model, torch.full((5, 4), rank + 1.0)).backward()
    assert any("forward uses L['loose'], a leaf tensor of shape [2] that requires a gradient" in n for n in model.report.notes)


def found_by_one_rank(rank, world_size):
    """What only one rank finds raises on both: at once where they compare it, else within the timeout of the group."""
    alone = (apexfx.UnsynchronizedGradientError, "the gradient of 'a.weight'"), (RankFailureError, "gave up the comparison")
    compared = ((apexfx.RankMismatchError, r"rank 0 is at .* \(a.weight\), rank 1 at the coll"),) * 2
    for loss_of, raised in ((with_a_layer_of_its_own, compared), (lambda model, x: (x @ model.a.weight).mean(), alone)):
        group = dist.new_group(timeout=timedelta(seconds=8))
        model = apexfx.transform(Listed(), opt_level="O0", inner="eager", ddp=True, process_group=group)
        x = torch.full((5, 4), rank + 1.0)
        square(model, x).backward()
        begin = time.monotonic()
        error, text = raised[rank]
        with pytest.raises(error, match=text):
            for _ in range(1 if rank == 0 else 2):
                (loss_of if rank == 0 else square)(model, x).backward()
        assert time.monotonic() - begin < 20


def shares_that_come_late(rank, world_size):
    """A share from outside of the graphs is found in any backward, among the averages of any number of forwards."""
    for num_forwards, create_graph in ((1, False), (2, False), (3, False), (2, True)):
        (model, reference), x = pair(), drawn(rank)
        for step in range(5):
            for each in (model, reference):
                each.zero_grad()
                loss = sum(square(each, x - i) for i in range(num_forwards))
                if step > 3:
                    loss = loss + (x @ each.a.weight).square().mean() + (x @ each.a.weight).abs().mean()
                loss.backward(create_graph=create_graph and each is model)
            check_gradients(model, reference, 1 / world_size)
        model.zero_grad()  # a graph of a gradient holds its parameter


@pytest.mark.long
@pytest.mark.parametrize("executors,losses,inner", [
    ((transformed,), (with_a_layer_of_its_own, two_forwards_and_more), "eager"),
    ((wrapped,), (with_a_layer_of_its_own,), "eager"),
    pytest.param(EXECUTORS, LOSSES, "eager", marks=pytest.mark.long),
    pytest.param(EXECUTORS, LOSSES, "inductor", marks=pytest.mark.long),
], ids=["transform", "others", "all", "inductor"])  # fmt: skip
def test_every_gradient_is_the_mean(executors, losses, inner):
    run_ranks(gradients, 2, executors, losses, inner, timeout=400)


@table(0, "cases", [(errors, unfrozen_in_eager), (local_shares, asked_for_with_autograd_grad, frozen_behind_local_gradients)])
def test_what_is_not_averaged_is_said(cases):
    run_ranks(functools.partial(_each, cases), 2)


@pytest.mark.long
def test_what_reaches_a_parameter_another_way():
    run_ranks(functools.partial(_each, (
        shares_that_come_late, gradients_switched_on_inside, a_sum_that_comes_after_local_gradients, written_in_place,
        others_in_the_place_of_parameters, the_source_after_the_model,
        a_leaf_in_a_local, found_by_one_rank, an_argument_that_holds_tensors)), 2)


def _each(cases, rank, world_size):
    for case in cases:
        torch._dynamo.reset()
        torch.manual_seed(0)
        case(rank, world_size)
        dist.barrier()
