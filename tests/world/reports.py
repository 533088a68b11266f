"""Programs of public bug reports about training that a compiler, a precision or an accumulation made wrong without a word."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.world.kinds import WIDTH, script
from tests.world.script import program


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b + a + b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * (b + 1), grad * (a + 1)


@program(train_step="duplicate tensor input")
def a_function_of_one_tensor_twice():  # pytorch/pytorch#183604
    return script(lambda net, h: Twice.apply(h, h))


class WritesInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        out = x * 1.0
        out += 1.0
        out.addmm_(x, w.t().to(x.dtype))
        return out

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad + grad @ w.to(grad.dtype), grad.t() @ x.to(grad.dtype)


@program()
def a_function_that_writes_in_its_forward():  # pytorch/pytorch#180642, pytorch/pytorch#184113
    return script(lambda net, h: WritesInForward.apply(h, net.rest.weight), rest=nn.Linear(WIDTH, WIDTH, bias=False))


class OfConstant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x @ torch.full_like(x, 0.1).t()

    @staticmethod
    def backward(ctx, grad):
        return F.pad(grad, (0, WIDTH - grad.shape[1]))


@program()
def a_function_of_a_product_with_constants():  # pytorch/pytorch#160901
    def between(net, h):
        y = OfConstant.apply(h)[torch.tensor([5, 0, 3, 1, 4, 2])]
        return F.pad(y, (0, WIDTH - y.shape[1])) + h

    return script(between)


@program()
def a_detach_in_place():  # pytorch/pytorch#176854
    def between(net, h):
        y = h * 2.0
        y.detach_()
        return h.tanh() * y + float(y.requires_grad)

    return script(between)


@program()
def layers_frozen_in_turns():  # pytorch/pytorch#139476
    def freeze(model, step):
        model.rest.requires_grad_(step % 2 == 1)
        model.rest.zero_grad()

    return script(lambda net, h: net.rest(h + net.a.bias), after=freeze, rest=nn.Linear(WIDTH, WIDTH))


@program()
def a_view_by_strides_after_a_write():  # pytorch/pytorch#133512
    def between(net, h):
        rows = net.seen[:, ::2]
        with torch.no_grad():
            rows.add_(1.0)
            y = torch.as_strided_copy(rows, (3,), (2,))
        return h * y.sum()

    return script(between)


@program(transform="mutation on a view chain", train_step="mutation on a view chain")
def a_write_by_strides_through_a_diagonal():  # pytorch/pytorch#104505
    def between(net, h):
        h = h * 1.0
        h.diagonal().as_strided((2,), (1,), 0).add_(1.0)
        return h

    return script(between)


@program()
def a_sum_over_a_slice_that_was_replaced():  # pytorch/pytorch#180164
    def between(net, h):
        x = h[:, None].expand(-1, 5, -1).tanh()
        return torch.slice_scatter(x, torch.zeros_like(x[:, :3]), 1, 0, 3).sum(1)

    return script(between)


@program()
def a_logarithm_of_a_softmax():  # NVIDIA/apex#379
    return script(lambda net, h: h + torch.log(torch.softmax(h * 4, 1)) * 0.1)


@program()
def a_row_that_is_masked_altogether():  # huggingface/transformers#31038
    """The least float32 is minus infinity in bfloat16: a row of it has no softmax."""
    def between(net, h):
        mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(), torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask[None].to(h.dtype))[0]

    return script(between)


@program()
def a_buffer_bound_anew():  # pytorch/pytorch#63916
    def between(net, h):
        net.seen = net.seen * 0.9 + h.detach().float()[:4]
        return h + net.seen.mean(0)

    return script(between)
