"""Optimizers in the shape of those of other packages: what they keep, and how they count, is as there."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer


class Foreign(Optimizer):
    """Has `update(p, g, state, group)` for each parameter that has a gradient, and `init(p, state)` where there is no state."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, **others):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **others})

    def init(self, p, state):
        state["exp_avg"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    self.init(p, state)
                self.update(p, p.grad, state, group)

    def begin(self, group):
        pass


class Lion(Foreign):
    def update(self, p, g, state, group):
        beta1, beta2 = group["betas"]
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(state["exp_avg"].clone().mul_(beta1).add(g, alpha=1 - beta1).sign_(), alpha=-group["lr"])
        state["exp_avg"].mul_(beta2).add_(g, alpha=1 - beta2)


class Signum(Foreign):
    def update(self, p, g, state, group):
        if group["weight_decay"] != 0:
            g = g.add(p, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(g, 1 - group["betas"][0])
        p.data = p.data - group["lr"] * torch.sign(state["exp_avg"])


class LARS(Foreign):
    def update(self, p, g, state, group):
        p_norm, g_norm = torch.norm(p), torch.norm(g)
        trust = torch.where(p_norm > 0, torch.where(g_norm > 0, 0.01 * p_norm / g_norm, 1.0), 1.0)
        state["exp_avg"].mul_(group["betas"][0]).add_(g.add(p, alpha=group["weight_decay"]).mul(trust))
        p.add_(state["exp_avg"], alpha=-group["lr"])


class OwnRates(Foreign):
    """Keeps a number of each parameter: they are equal at first, and not behind a step."""

    def init(self, p, state):
        state["norm"] = torch.zeros(())

    def update(self, p, g, state, group):
        state["norm"].lerp_(g.norm(), 0.25)
        p.sub_(g * (group["lr"] / (1e-3 + state["norm"])))


class KellersMuon(Foreign):
    def update(self, p, g, state, group):
        state["exp_avg"].lerp_(g, 1 - group["betas"][0])
        x = g.lerp_(state["exp_avg"], group["betas"][0]).bfloat16()
        x = x.mT if x.size(-2) > x.size(-1) else x
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(3):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.mT if p.size(-2) > p.size(-1) else x
        p.add_(x.reshape(p.shape).to(p.dtype), alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)


class Shampoo(Foreign):
    def init(self, p, state):
        state["preconditioners"] = [torch.eye(size) * 1e-3 for size in p.shape]

    def update(self, p, g, state, group):
        direction = g
        for dim, preconditioner in enumerate(state["preconditioners"]):
            rows = g.transpose(0, dim).reshape(g.shape[dim], -1)
            preconditioner.add_(rows @ rows.t())
            values, vectors = torch.linalg.eigh(preconditioner)
            root = vectors @ values.clamp_min(1e-12).pow(-0.25).diag() @ vectors.t()
            direction = root @ direction if dim == 0 else direction @ root
        p.sub_(group["lr"] * direction)


class Clipped(Foreign):
    """Reads a norm by `.item()`, and branches by it."""

    def update(self, p, g, state, group):
        norm = g.norm().item()
        if norm > 0.3:
            g.mul_(0.3 / norm)
        p.sub_(g * min(group["lr"], 1.0 / (1e-3 + norm)))


class OfParameter(Foreign):
    """Keeps what it makes of the first values of a parameter: copies, as schedule-free and Prodigy do, and others."""

    def init(self, p, state):
        state.update(first=p.clone(), double=p.detach().double(), mask=p > -0.1, norm=p.norm(), zeros=torch.zeros_like(p))

    def update(self, p, g, state, group):
        state["double"].sub_(g * state["mask"], alpha=group["lr"])
        p.copy_(state["double"].to(p.dtype).lerp(state["first"], 0.1) * (1 - group["lr"] * state["norm"]) + state["zeros"])


# ---- what no graph holds ----------------------------------------------------------------------------------------------------


class Host(Foreign):
    def update(self, p, g, state, group):
        p.add_(g, alpha=-float(g.norm()))


class Noise(Foreign):
    def update(self, p, g, state, group):
        p.add_(g + torch.randn_like(g), alpha=-group["lr"])


class OfItself(Foreign):
    def begin(self, group):
        self.calls = getattr(self, "calls", 0) + 1

    def update(self, p, g, state, group):
        p.add_(g, alpha=-group["lr"] / math.sqrt(self.calls))


class Lazy(Foreign):
    """Does not update in its first step."""

    def init(self, p, state):
        state["exp_avg"] = p.grad.clone()

    def update(self, p, g, state, group):
        if state["exp_avg"].data_ptr() == g.data_ptr():
            return
        state["exp_avg"].lerp_(g, 0.1)
        p.add_(state["exp_avg"], alpha=-group["lr"])
