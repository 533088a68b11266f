"""Rows of the optimizer, clipping and norm ops, for `ops.py`, on parameter lists shaped like ResNet-50 and GPT-2."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from op_row import Row
from torch import Tensor

from apexfx.ops import multi_tensor
from apexfx.ops.checksum import checksum
from apexfx.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD, clip_grad_norm_


def resnet50_shapes() -> list[tuple[int, ...]]:
    """161 tensors, 25.6 M parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for conv in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [conv, (conv[0],), (conv[0],)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_shapes(layers: int = 12, width: int = 768) -> list[tuple[int, ...]]:
    """148 tensors, 124 M parameters."""
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


def parameters(shapes, device: str, dtype=torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    """Return seeded parameters with gradients."""
    torch.manual_seed(seed)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype))
        param.grad = torch.randn(shape, device=device).mul_(0.01).to(dtype)
        params.append(param)
    return params


class ForeachLamb:
    """LAMB with torch._foreach ops: what one writes without a kernel."""

    def __init__(self, params: list[Tensor]):
        self.params, self.grads, self.t = params, [p.grad for p in params], 0
        self.m, self.v = ([torch.zeros_like(p) for p in params] for _ in range(2))

    @torch.no_grad()
    def step(self, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, decay=0.01, max_norm=1.0) -> None:
        self.t += 1
        norm = torch.stack(torch._foreach_norm(self.grads)).norm()
        grads = torch._foreach_mul(self.grads, (max_norm / norm).clamp(max=1.0))
        torch._foreach_lerp_(self.m, grads, 1 - beta1)
        torch._foreach_mul_(self.v, beta2)
        torch._foreach_addcmul_(self.v, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(self.v)
        torch._foreach_div_(denominator, math.sqrt(1 - beta2**self.t))
        torch._foreach_add_(denominator, eps)
        direction = torch._foreach_div(self.m, 1 - beta1**self.t)
        torch._foreach_div_(direction, denominator)
        torch._foreach_add_(direction, self.params, alpha=decay)
        p_norm, d_norm = torch._foreach_norm(self.params), torch._foreach_norm(direction)
        ratio = [torch.where((p > 0) & (d > 0), -lr * p / d, -lr) for p, d in zip(p_norm, d_norm)]
        torch._foreach_mul_(direction, ratio)
        torch._foreach_add_(self.params, direction)


class ForeachNovograd:
    """NovoGrad with torch._foreach ops."""

    def __init__(self, params: list[Tensor]):
        self.params, self.grads, self.t = params, [p.grad for p in params], 0
        self.m, self.n = [torch.zeros_like(p) for p in params], None

    @torch.no_grad()
    def step(self, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.01) -> None:
        self.t += 1
        norms = torch.stack(torch._foreach_norm(self.grads))
        self.n = norms if self.n is None else (beta2 * self.n.square() + (1 - beta2) * norms.square()).sqrt()
        torch._foreach_lerp_(self.m, self.grads, 1 - beta1)
        denominator = self.n / math.sqrt(1 - beta2**self.t) + eps
        direction = torch._foreach_div(self.m, list((denominator * (1 - beta1**self.t)).unbind()))
        torch._foreach_add_(direction, self.params, alpha=decay)
        torch._foreach_add_(self.params, direction, alpha=-lr)


def _bytes(shapes, words: int) -> int:
    return sum(math.prod(s) for s in shapes) * 4 * words


def rows(device: str) -> Iterator[Row]:
    """Yield the rows; each builds its tensors when it is reached, and drops them before the next."""
    for model, shapes in (("resnet50", resnet50_shapes()), ("gpt2", gpt2_shapes())):
        yield from _plain_rows(model, shapes, device)
        yield _scaled_row(model, shapes, device)
    # ResNet-50's parameters hardly exceed the cache of a large GPU.
    model, shapes = ("gpt2", gpt2_shapes()) if device == "cuda" else ("resnet50", resnet50_shapes())
    for name, ours, foreach, words in (
        ("lamb", lambda p: FusedLAMB(p), ForeachLamb, 11),  # g once more for the norm, then p, g, m, v; m, v; p, m, v; p
        ("novograd", lambda p: FusedNovoGrad(p, weight_decay=0.01), ForeachNovograd, 6),
    ):
        fused, other = ours(parameters(shapes, device)), foreach(parameters(shapes, device))
        yield Row(f"{name} {model}", fused.step, {"foreach": other.step}, _bytes(shapes, words), 2.0)
    fused = FusedAdagrad(parameters(shapes, device))
    foreach = torch.optim.Adagrad(parameters(shapes, device), foreach=True)
    yield Row(f"adagrad {model}", fused.step, {"torch foreach": foreach.step}, _bytes(shapes, 5))
    yield from _other_rows(model, shapes, device)


def _plain_rows(model: str, shapes, device: str) -> Iterator[Row]:
    settings = {
        "adamw": (lambda p: FusedAdam(p, weight_decay=0.01), torch.optim.AdamW, {}, 7),
        "adam": (lambda p: FusedAdam(p, adam_w_mode=False, weight_decay=0.01), torch.optim.Adam, {"weight_decay": 0.01}, 7),
        "sgd": (lambda p: FusedSGD(p, lr=1e-3, momentum=0.9), torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, 5),
    }
    for name, (ours, torch_cls, keywords, words) in settings.items():
        if model == "gpt2" and name == "adam":
            continue
        fused = ours(parameters(shapes, device))
        others = {"torch fused": torch_cls(parameters(shapes, device), fused=True, **keywords).step}
        if model == "resnet50":
            others["torch foreach"] = torch_cls(parameters(shapes, device), foreach=True, **keywords).step
        yield Row(f"{name} {model}", fused.step, others, _bytes(shapes, words), 1.0)


def _scaled_row(model: str, shapes, device: str) -> Row:
    ours = FusedAdam(parameters(shapes, device), weight_decay=0.01, max_grad_norm=1e6)
    ours.grad_scale = torch.ones((), device=device)
    params = parameters(shapes, device)
    theirs = torch.optim.AdamW(params, fused=True)
    # The gradient is read twice, for the norm and for the update, and written once, unscaled as torch leaves it.
    # A scale of 1 and a clip that does not bite: the gradients survive being unscaled in place again and again.
    scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.zeros((), device=device))

    def unscale_clip_step() -> None:
        scaler.unscale_(theirs)
        torch.nn.utils.clip_grad_norm_(params, 1e6)
        scaler.step(theirs)
        scaler.update()

    return Row(f"unscale+clip+adamw {model}", ours.step, {"GradScaler + clip + fused": unscale_clip_step}, _bytes(shapes, 9), 1.4)


def _other_rows(model: str, shapes, device: str) -> Iterator[Row]:
    params, others = parameters(shapes, device), parameters(shapes, device)
    grads, found_inf = [p.grad for p in params], torch.zeros((), device=device)
    outputs, more = ([torch.empty_like(g) for g in grads] for _ in range(2))
    yield Row(f"scale {model}", lambda: multi_tensor.multi_tensor_scale(grads, outputs, found_inf, 0.5),
              {"_foreach_mul": lambda: torch._foreach_mul(grads, 0.5)}, _bytes(shapes, 2))  # fmt: skip
    yield Row(f"axpby {model}", lambda: multi_tensor.multi_tensor_axpby(grads, outputs, more, found_inf, 0.5, 2.0),
              {"_foreach_add": lambda: torch._foreach_add(grads, outputs, alpha=2.0)}, _bytes(shapes, 3))  # fmt: skip
    yield Row(f"l2norm {model}", lambda: multi_tensor.multi_tensor_l2norm(grads),
              {"_foreach_norm": lambda: torch.stack(torch._foreach_norm(grads)).norm()}, _bytes(shapes, 1))  # fmt: skip
    yield Row(f"checksum {model}", lambda: checksum(grads),
              {"_foreach_norm": lambda: torch.stack(torch._foreach_norm(grads)).norm()}, _bytes(shapes, 1))  # fmt: skip
    yield Row(f"clip_grad_norm_ {model}", lambda: clip_grad_norm_(params, 1e6),
              {"torch": lambda: torch.nn.utils.clip_grad_norm_(others, 1e6)}, _bytes(shapes, 3))  # fmt: skip
    ours = FusedAdam(parameters(shapes, device, torch.bfloat16), master_weights=True)
    theirs = torch.optim.AdamW(parameters(shapes, device), fused=True)
    models = [torch.empty_like(p, dtype=torch.bfloat16) for p in theirs.param_groups[0]["params"]]
    wide = [p.grad for p in theirs.param_groups[0]["params"]]
    low = [g.bfloat16() for g in wide]

    def upcast_step_copy() -> None:
        torch._foreach_copy_(wide, low)
        theirs.step()
        torch._foreach_copy_(models, [p.detach() for p in theirs.param_groups[0]["params"]])

    ours.step()  # makes the masters, which the other way has from the beginning
    upcast_step_copy()
    yield Row("adamw, bf16 model, fp32 masters", ours.step, {"cast + fused + copy": upcast_step_copy}, _bytes(shapes, 7))
