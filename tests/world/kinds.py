"""Kinds of programs that are known from public reports to train wrongly, or not at all, where a compiler takes them."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import orthogonal

from tests.world.script import Script, Update, program

WIDTH = 8


class Net(nn.Module):
    """Two layers with something in between: `between(net, h)`."""

    factor, seen_by_class = 1.0, []

    def __init__(self, between, rest=None):
        super().__init__()
        self.a, self.b, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), between
        self.rest = rest
        self.register_buffer("seen", torch.zeros(4, WIDTH))

    def forward(self, x):
        return self.b(self.between(self, self.a(x)))


def script(between, *, after=lambda model, step: None, around=contextlib.nullcontext, rest=None):
    model = Net(between, rest)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def objective(model, x, y):
        return F.mse_loss(model(x), y)

    return Script(model, [Update(objective, optimizer, around=around)],
                  lambda step, carried: (torch.randn(6, WIDTH), torch.randn(6, 1)), after=after)


@program(transform="works on a nested tensor", train_step="works on a nested tensor")
def rows_of_a_nested_tensor():
    def between(net, h):
        rows = torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 2, 6]))
        return (rows * 2.0).values()

    return script(between)


@program(transform="share other memory", train_step="share other memory")
def a_view_of_a_buffer_moved_between_calls():
    def between(net, h):
        with torch.no_grad():
            net.current.copy_(h.mean(0))
        return h + net.seen.sum(0)

    def move(model, step):
        model.current = model.seen[(step + 1) % 4]

    made = script(between, after=move)
    move(made.model, -1)
    return made


@program()
def a_number_of_the_class():
    def change(model, step):
        Net.factor = 1.0 + step if step < 4 else 1.0

    return script(lambda net, h: h * Net.factor, after=change)


@program()
def a_list_of_the_class():
    def between(net, h):
        Net.seen_by_class.append(h.detach())
        return h

    def read(model, step):
        model.seen += sum(h.float().sum() for h in Net.seen_by_class)
        Net.seen_by_class.clear()

    return script(between, after=read)


@program()
def gradients_of_the_last_round_alone():
    def between(net, h):
        for i in range(3):
            with torch.set_grad_enabled(i == 2):
                h = torch.tanh(net.rest(h))
        return h

    return script(between, rest=nn.Linear(WIDTH, WIDTH))


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


@program()
def a_function_with_its_own_backward():
    return script(lambda net, h: Product.apply(h, net.rest.weight), rest=nn.Linear(WIDTH, WIDTH, bias=False))


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


@program()
def a_function_that_views_what_was_written():
    return script(lambda net, h: Reversal.apply(F.relu_(h)))


@program(train_step="has a backward hook")
def a_backward_hook_put_on_later():
    def put(model, step):
        if step == 1:
            model.rest.register_full_backward_pre_hook(lambda module, grads: tuple(2 * g for g in grads))

    return script(lambda net, h: net.rest(h), after=put, rest=nn.Linear(WIDTH, WIDTH))


@program(train_step="saved_tensors_hooks")
def hooks_on_what_is_saved():
    return script(lambda net, h: h * h.tanh(), around=lambda: saved_tensors_hooks(lambda x: x, lambda x: 2 * x))


@program(train_step="retain_grad.*fallback='transform'")
def the_gradient_of_an_activation():
    kept = []

    def between(net, h):
        h = h.tanh()
        h.retain_grad()
        kept.append(h)
        return h * 1.0

    def read(model, step):
        model.seen += kept.pop().grad.float().abs().sum() * 100

    return script(between, after=read)


@program()
def a_hook_on_an_activation():
    def between(net, h):
        h = h.tanh()
        h.register_hook(lambda grad: grad * 0.5)
        return h

    return script(between)


@program()
def a_detached_alias_before_a_write():
    def between(net, h):
        h = h * 1.0
        alias = h.detach()
        h.mul_(2.0)
        return h + alias

    return script(between)


@program(train_step="Parameter.*fallback='transform'", transform=r"writes memory that another tensor lies in")
def a_parameter_made_of_an_activation():
    def between(net, h):
        made = nn.Parameter(h)
        with torch.no_grad():
            made.mul_(1.1)
        return h * 1.0

    return script(between)


@program()
def dropout_after_a_relu_in_place():
    return script(lambda net, h: F.dropout(F.relu_(h), 0.5, net.training))


@program()
def a_forward_replaced_on_an_instance():
    def replace(model, step):
        if step == 1:
            model.rest.forward = lambda h: 3.0 * h

    return script(lambda net, h: net.rest(h), after=replace, rest=nn.Linear(WIDTH, WIDTH))


@program()
def a_layer_without_autocast():
    def between(net, h):
        with torch.autocast("cpu", enabled=False):
            return net.rest(h.float() * 300) / 300

    return script(between, rest=nn.Linear(WIDTH, WIDTH))


@program()
def a_complex_layer():
    return script(lambda net, h: torch.fft.fft(torch.complex(h, h.flip(1)), norm="ortho").abs())


@program()
def a_cumulative_batch_norm():
    return script(lambda net, h: net.rest(h), rest=nn.BatchNorm1d(WIDTH, momentum=None))


@program(transform="and its graphs have one backward")
def a_gradient_by_an_activation():
    def between(net, h):
        h = h.detach().requires_grad_()
        return torch.autograd.grad(net.rest(h).tanh().sum(), h, create_graph=True)[0] + h

    return script(between, rest=nn.Linear(WIDTH, WIDTH))


@program()
def orthogonal_weights():
    return script(lambda net, h: net.rest(h), rest=orthogonal(nn.Linear(WIDTH, WIDTH)))


@program()
def a_gradient_of_writes_to_one_slice():
    def energy(h):
        out = torch.zeros_like(h)
        out[:, 0] += h[:, 2].abs()
        out[:, 0] += h[:, 2].abs()
        return out.sum()

    return script(lambda net, h: h + torch.func.grad(energy)(h))


@program()
def a_branch_by_identity():
    def swap(model, step):
        model.current = model.rest if step % 2 == 0 else model.a

    made = script(lambda net, h: net.current(h) if net.current is net.rest else -net.current(h), after=swap,
                  rest=nn.Linear(WIDTH, WIDTH))
    swap(made.model, 0)
    return made
