"""What an error says to write on several ranks is run: gradients, or parameters, are those of the program that was refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import apexfx
from apexfx.parallel import DistributedDataParallel
from tests.distributed.launch import on_ranks
from tests.small_models import take_step


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(rank, number=0):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def square(model, x):
    return model(x).square().sum()


def refused(said, error=apexfx.UnsynchronizedGradientError):
    return pytest.raises(error, match=f"(?s){said}")


def transformed(**options):
    return apexfx.transform(net(), opt_level="O0", inner="eager", ddp=apexfx.BucketConfig(**options))


def check_gradients(model, loss, rank, world_size, factor=1.0):
    """Compare `.grad` with the average over the ranks of the gradients of `loss(a model of eager)`."""
    reference = net()
    loss(reference).backward()
    for (name, p), own in zip(reference.named_parameters(), model.parameters(), strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(own.grad, p.grad * factor / world_size, rtol=1e-5, atol=1e-6, msg=f"{name} differs")


def a_forward_inside_of_no_sync_and_one_outside(rank, world_size):
    x, model = batch(rank), transformed()
    for cured in (False, True):
        model.zero_grad()
        with model.no_sync():
            inside = square(model, x)
        outside = square(model, 2 * x)
        if not cured:
            with refused("Run them in backwards of their own"):
                (inside + outside).backward()
            continue
        inside.backward()
        outside.backward()
    check_gradients(model, lambda model: square(model, x) + square(model, 2 * x), rank, world_size)
    model.zero_grad()  # or both forwards on the same side
    (square(model, x) + square(model, 2 * x)).backward()
    check_gradients(model, lambda model: square(model, x) + square(model, 2 * x), rank, world_size)


def check_sums_of_local_gradients(model, x, rank, world_size):
    model.zero_grad()
    with model.no_sync():
        square(model, x).backward()
    square(model, x).backward()
    check_gradients(model, lambda model: 2 * square(model, x), rank, world_size, factor=world_size)


def sums_and_local_gradients(rank, world_size):
    x, model = batch(rank), transformed(gradient_average=False)
    square(model, x).backward()
    with model.no_sync(), refused("Call zero_grad.. before no_sync"):
        square(model, x).backward()
    check_sums_of_local_gradients(model, x, rank, world_size)


def autograd_grad_behind_no_sync(rank, world_size):
    x, model = batch(rank), transformed()
    with model.no_sync():
        square(model, x).backward()
    with refused("Call backward"):
        torch.autograd.grad(square(model, x), [*model.parameters()])
    model.zero_grad()
    with model.no_sync():
        square(model, x).backward()
    square(model, x).backward()
    check_gradients(model, lambda model: 2 * square(model, x), rank, world_size)


def a_weight_that_the_loss_uses(rank, world_size):
    x, model = batch(rank), transformed()
    loss = lambda model: square(model, x) + (rank + 1) * model[0].weight.square().sum()  # noqa: E731
    with refused("Call backward.., which averages it"):
        torch.autograd.grad(loss(model), [*model.parameters()])
    model.zero_grad()
    loss(model).backward()
    check_gradients(model, loss, rank, world_size)


def a_hook_that_uses_the_gradient(rank, world_size):
    x, model = batch(rank), transformed()
    loss = lambda model: square(model, x) + model[0].weight.square().sum()  # noqa: E731
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    square(model, x).backward()
    with refused("Step the optimizer after backward"):
        loss(model).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    loss(model).backward()
    check_gradients(model, loss, rank, world_size)


def the_module_that_was_transformed(rank, world_size):
    x, source = batch(rank), net()
    model = apexfx.transform(source, opt_level="O0", inner="eager", ddp=True)
    square(model, x).backward()
    model.zero_grad()
    with refused("call the model that.* returned, not the module it was made from"):
        square(source, x).backward()
    model.zero_grad()
    square(model, x).backward()
    check_gradients(model, lambda model: square(model, x), rank, world_size)


def two_backwards_of_a_wrapper(rank, world_size):
    x, model = batch(rank), DistributedDataParallel(net(), gradient_average=False)
    loss = square(model, x)
    loss.backward(retain_graph=True)
    model.zero_grad()
    with refused("Call the wrapper before each backward"):
        loss.backward()
    model.zero_grad()
    square(model, x).backward()
    check_gradients(model, lambda model: square(model, x), rank, world_size, factor=world_size)
    with refused("keep what is to be one sum local by no_sync"):
        square(model, x).backward()
    check_sums_of_local_gradients(model, x, rank, world_size)


def a_parameter_without_a_gradient(rank, world_size):
    x = batch(rank)

    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, whole):
            return self.net(x) if whole else self.net[0](x)

    for options in ({}, {"find_unused_parameters": True}, {"delay_allreduce": True}):
        model = DistributedDataParallel(Switched(), **options)
        for whole in (True, True, False):
            model.zero_grad()
            if not options and not whole:
                with refused("Pass find_unused_parameters=True, or delay_allreduce=True"):
                    model(x, whole).square().sum().backward()
                continue
            model(x, whole).square().sum().backward()
        if options:
            reference = net()
            reference[0](x).square().sum().backward()
            dist.all_reduce(reference[0].weight.grad)
            torch.testing.assert_close(model.module.net[0].weight.grad, reference[0].weight.grad / world_size)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = net(), nn.Linear(2, 3)

    def forward(self, x, both):
        h = self.net(x)
        return h, self.head(h) if both else None


def a_layer_that_one_rank_does_not_use(rank, world_size):
    x, uses = batch(rank), rank == 0

    def loss(model, x, cured):
        h, head = model(x, uses or cured)
        return h.square().sum() + (0 if head is None else head.square().sum() if uses else 0 * head.sum())

    def trained(way, cured):
        """Return the model after a step of 0.1 * the gradient."""
        model = TwoHeads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way == "step":
            apexfx.train_step(model, objective=loss, optimizer=optimizer, ddp=True, opt_level="O0", inner="eager")(x, cured)
            return model
        wrapped = (apexfx.transform(model, ddp=True, opt_level="O0", inner="eager") if way == "transform" else
                   DistributedDataParallel(model, find_unused_parameters=True))
        loss(wrapped, x, cured).backward()
        optimizer.step()
        return model

    for way in ("step", "transform"):
        with refused(r"\.\n  head.weight, head.bias are trained on rank 0 and not on rank 1\n.*add 0 \* its output.sum.* to the "
                     "loss; or .*DistributedDataParallel.model, find_unused_parameters=True", apexfx.RankMismatchError) as error:
            trained(way, False)
        assert len(str(error.value)) < 500
    torch.manual_seed(0)
    reference = TwoHeads()
    loss(reference, x, True).backward()
    for way, cured in (("step", True), ("transform", True), ("DistributedDataParallel", False)):
        torch.manual_seed(0)
        model = trained(way, cured)
        for p, own in zip(reference.parameters(), model.parameters(), strict=True):
            dist.all_reduce(gradient := p.grad.clone())
            torch.testing.assert_close(own, p - 0.1 * gradient / world_size, rtol=1e-5, atol=1e-6)


def whole(p):
    return p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach().clone()


def a_divisor_of_fully_shard(rank, world_size):
    x, trained = batch(rank), {}
    for way in ("fsdp2", "refused", "cured"):
        model = net()
        fully_shard(model)
        if way != "cured":
            model.set_gradient_divide_factor(0.5)
            model.set_force_sum_reduction_for_comms(way == "fsdp2")  # gloo knows no weighted sum
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if way == "fsdp2":
            for _ in range(2):
                take_step(optimizer, square(model, x))
        else:
            make = lambda: apexfx.train_step(  # noqa: E731
                model, objective=lambda model, x: square(model, x) * (world_size / 0.5), optimizer=optimizer, opt_level="O0",
                inner="eager")
            if way == "refused":
                with refused("multiply the loss by the number of ranks / factor", ValueError):
                    make()(x)
                continue
            step = make()
            for _ in range(2):
                step(x)
        trained[way] = [whole(p) for p in model.parameters()]
    torch.testing.assert_close(trained["cured"], trained["fsdp2"], rtol=1e-5, atol=1e-6)


class Complex(nn.Module):
    def __init__(self, parts):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(4, 4, dtype=torch.complex64)
        names = {"weight": weight} if not parts else {"real": weight.real.clone(), "imag": weight.imag.clone()}
        for name, value in names.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        weight = torch.complex(self.real, self.imag) if hasattr(self, "real") else self.weight
        return (x.to(weight.dtype) @ weight).abs()


def a_complex_parameter(rank, world_size):
    x, reference = batch(rank), Complex(False)
    square(reference, x).backward()
    dist.all_reduce(gradient := torch.view_as_real(reference.weight.grad).clone())
    expected = reference.weight.detach() - 0.01 * torch.view_as_complex(gradient) / world_size
    for way in ("fully_shard", "shard"):
        for parts in (False, True):
            model = Complex(parts)
            if way == "fully_shard":
                fully_shard(model)
            options = {"ddp": True, "shard": "optimizer"} if way == "shard" else {}
            make = lambda: apexfx.train_step(  # noqa: E731
                model, objective=square, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), opt_level="O0", inner="eager",
                **options)
            if not parts:
                with refused(r"hold two real parameters, and make one of them in the forward \(torch.complex\)", ValueError):
                    make()(x)
                continue
            make()(x)
            torch.testing.assert_close(torch.complex(*map(whole, (model.real, model.imag))), expected, rtol=1e-5, atol=1e-6)


def a_mean_whose_backward_communicates(rank, world_size):
    """Two calls on two ranks are one batch of eager's."""
    x = [batch(rank, number) for number in range(2)]

    def step(model, **options):
        return apexfx.train_step(model, objective=lambda model, x: apexfx.Mean(model(x).sigmoid().square().sum(), len(x)),
                                 optimizer=torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                                 accumulate=2, sync_bn=True, **options)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with refused("give ddp=True, or leave accumulate out", ValueError):
        step(copy.deepcopy(model))(x[0])
    reference = copy.deepcopy(model).double()
    made = step(model, ddp=True)
    for each in x:
        made(each)
    batches = [torch.cat([batch(other, number) for other in range(world_size)]).double() for number in range(2)]
    sum(reference(each).sigmoid().square().sum() for each in batches).div(2 * 6 * world_size).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close([p.detach() for p in model.parameters()], [p.detach().float() for p in reference.parameters()],
                               rtol=1e-5, atol=1e-6)


def a_short_last_group(rank, world_size):
    model, reference = net(), net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = apexfx.train_step(model, objective=lambda model, x, weight: weight * model(x).square().mean(), ddp=True,
                             optimizer=torch.optim.SGD(model.parameters(), lr=0.1), accumulate=4, opt_level="O0", inner="eager")
    for number in range(1, 7):
        step(batch(rank, number), torch.tensor(1.0 if number <= 4 else 2 / 4))
        (reference(batch(rank, number)).square().mean() / 4).backward()
        if number in (4, 6):
            for p in reference.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world_size
            optimizer.step()
            optimizer.zero_grad()
    step.flush()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)


CASES = (a_forward_inside_of_no_sync_and_one_outside, sums_and_local_gradients, autograd_grad_behind_no_sync,
         a_weight_that_the_loss_uses, a_hook_that_uses_the_gradient, the_module_that_was_transformed, two_backwards_of_a_wrapper,
         a_parameter_without_a_gradient, a_layer_that_one_rank_does_not_use, a_divisor_of_fully_shard, a_complex_parameter,
         a_mean_whose_backward_communicates, a_short_last_group)


@pytest.mark.long
@on_ranks(2)
def test_a_cure_trains_what_the_program_trained(rank, world_size):
    for case in CASES:
        torch.compiler.reset()
        case(rank, world_size)
        dist.barrier()
