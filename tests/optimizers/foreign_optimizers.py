"""Optimizers in the shape of those of other packages: what they keep, and how they count, is as there."""

from __future__ import annotations

import collections
import functools
import math
import random

import numpy
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


class Sophia(Foreign):
    def init(self, p, state):
        state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), hessian=torch.zeros_like(p))

    def update(self, p, g, state, group):
        state["step"] += 1
        state["exp_avg"].mul_(0.9).add_(g, alpha=0.1)
        state["hessian"].mul_(0.99).addcmul_(g, g, value=0.01)
        ratio = (state["exp_avg"].abs() / (0.2 * state["hessian"] + 1e-15)).clamp(None, 1)
        p.mul_(1 - group["lr"] * group["weight_decay"]).addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class AdaBelief(Foreign):
    def init(self, p, state):
        state.update(step=torch.tensor(0), exp_avg=torch.zeros_like(p), exp_avg_var=torch.zeros_like(p))

    def update(self, p, g, state, group):
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].mul_(beta1).add_(g, alpha=1 - beta1)
        residual = g - state["exp_avg"]
        state["exp_avg_var"].mul_(beta2).addcmul_(residual, residual, value=1 - beta2).add_(1e-16)
        step = state["step"].item()
        p.addcdiv_(state["exp_avg"], state["exp_avg_var"].sqrt().div_(math.sqrt(1 - beta2**step)).add_(1e-8),
                   value=-group["lr"] / (1 - beta1**step))


class Lookahead(Foreign):
    """Goes back to slow weights each third step, by a count that is a tensor."""

    def init(self, p, state):
        state.update(step=torch.zeros(1), exp_avg=torch.zeros_like(p), slow=p.detach().clone())

    def update(self, p, g, state, group):
        state["step"] += 1
        p.add_(state["exp_avg"].lerp_(g, 0.1), alpha=-group["lr"])
        if state["step"].item() % 3 == 0:
            p.copy_(state["slow"].add_(p - state["slow"], alpha=0.5))


class Adafactor(Foreign):
    def init(self, p, state):
        state.update(step=torch.tensor(0.0), RMS=torch.tensor(0.0), row=torch.zeros(p.shape[:-1]),
                     col=torch.zeros(p.shape[:-2] + p.shape[-1:]))

    def update(self, p, g, state, group):
        state["step"] += 1
        state["RMS"] = p.norm(2) / p.numel() ** 0.5
        step = state["step"].item()
        beta2 = 1 - step**-0.8
        state["row"].mul_(beta2).add_((g**2 + 1e-30).mean(-1), alpha=1 - beta2)
        state["col"].mul_(beta2).add_((g**2 + 1e-30).mean(-2), alpha=1 - beta2)
        update = (state["row"] / state["row"].mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1) * state["col"].rsqrt() * g
        update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
        p.add_(-update * state["RMS"].clamp(min=1e-3) * min(group["lr"], 1 / math.sqrt(step)))


class Tiger(Foreign):
    def update(self, p, g, state, group):
        update = torch.sign(state["exp_avg"].mul_(0.9).add_(g, alpha=0.1))
        p.data.add_(update.add(p.data, alpha=group["weight_decay"]), alpha=-group["lr"])


class Masked(Foreign):
    """Has state that torch casts where it is loaded, and swaps two of its tensors."""

    def init(self, p, state):
        state.update(mask=p > 0, a=torch.zeros_like(p), b=torch.ones_like(p))

    def update(self, p, g, state, group):
        state["a"], state["b"] = state["b"], state["a"]
        state["a"].lerp_(g, 0.1)
        p.add_((state["a"] + state["b"]) * state["mask"], alpha=-group["lr"])


class Previous(Foreign):
    """Keeps what the parameter was before, and goes on in the direction in which it went."""

    def init(self, p, state):
        state["previous"] = p.detach().clone()

    def update(self, p, g, state, group):
        went = p - state["previous"]
        state["previous"] = p.detach().clone()
        p.add_(went, alpha=0.5).sub_(g, alpha=group["lr"])


class OneVector(Foreign):
    """Has its moments in one vector, and updates views."""

    def init(self, p, state):
        state["moments"] = torch.zeros(p.numel() * 2)

    def update(self, p, g, state, group):
        first, second = state["moments"].chunk(2)
        first.mul_(0.9).add_(g.flatten(), alpha=0.1)
        second.mul_(0.9).addcmul_(g.flatten(), g.flatten(), value=0.1)
        p.view(-1).addcdiv_(first, second.sqrt().add_(1e-8), value=-group["lr"])


class Nested(Foreign):
    def init(self, p, state):
        state.update(moments={"first": torch.zeros_like(p), "second": torch.zeros_like(p)}, beta=0.9)

    def update(self, p, g, state, group):
        moments = state["moments"]
        moments["first"].lerp_(g, 1 - state["beta"])
        moments["second"].addcmul_(g, g)
        p.addcdiv_(moments["first"], moments["second"].sqrt() + 1e-8, value=-group["lr"])


class OfAllNorms(Foreign):
    """Divides by the norm of all gradients, of one element, which the host reads."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.zeros(1)
        params = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, p in params:
            norm.add_(p.grad.pow(2).sum())
        norm = torch.sqrt(norm).item()
        for group, p in params:
            p.sub_(group["lr"] * (p.grad / norm if norm > 0.1 else p.grad))


class Foreach(Foreign):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            for p, state in zip(params, states):
                state.setdefault("exp_avg", torch.zeros_like(p))
                state.setdefault("step", torch.zeros(()))
            torch._foreach_add_([state["step"] for state in states], 1)
            torch._foreach_lerp_([state["exp_avg"] for state in states], [p.grad for p in params], 0.1)
            updates = torch._foreach_sign([state["exp_avg"] for state in states])
            torch._foreach_div_(updates, [1 - 0.9 ** state["step"].item() for state in states])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])


class Cautious(torch.optim.AdamW):
    """A subclass that writes gradients in front of the step that it has from torch."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-0.1, 0.1)
                    p.grad = p.grad * 2
        return super().step()


class Scaled(Foreign):
    def update(self, p, g, state, group):
        p.sub_(g * group["scale"], alpha=group["lr"])


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


class Once(Foreign):
    """Has an attribute until its first step is done."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.first = True

    def step(self, closure=None):
        super().step()
        vars(self).pop("first", None)

    def update(self, p, g, state, group):
        p.add_(g, alpha=-group["lr"] * (10.0 if hasattr(self, "first") else 1.0))


class OnceOfGroup(Foreign):
    """Has an option in a group until its first step is done."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.param_groups[0]["first"] = True

    def step(self, closure=None):
        super().step()
        self.param_groups[0].pop("first", None)

    def update(self, p, g, state, group):
        p.add_(g, alpha=-group["lr"] * (10.0 if "first" in group else 1.0))


class OfPlace(Foreign):
    """Updates each parameter of a group by less than the one before."""

    def begin(self, group):
        for place, p in enumerate(group["params"]):
            self.state[p].setdefault("rate", 0.5**place)

    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"] * state["rate"])


class Lazy(Foreign):
    """Does not update in its first step."""

    def init(self, p, state):
        state["exp_avg"] = p.grad.clone()

    def update(self, p, g, state, group):
        if state["exp_avg"].data_ptr() == g.data_ptr():
            return
        state["exp_avg"].lerp_(g, 0.1)
        p.add_(state["exp_avg"], alpha=-group["lr"])


class Int(Foreign):
    """Counts as most packages do: RAdam, AdaBelief, Adafactor of transformers, CAME, LAMB."""

    def init(self, p, state):
        state["step"] = 0

    def update(self, p, g, state, group):
        state["step"] += 1
        p.sub_(group["lr"] * g / math.sqrt(state["step"]))


class ScheduleFree(Foreign):
    def begin(self, group):
        self.k = group["k"] = group.get("k", 0) + 1

    def init(self, p, state):
        state["z"] = p.clone()

    def update(self, p, g, state, group):
        p.lerp_(end=state["z"], weight=1 / group["k"]).add_(g, alpha=-group["lr"])
        state["z"].sub_(g, alpha=group["lr"])


class Prodigy(Foreign):
    def init(self, p, state):
        state["first"] = p.detach().clone()

    def update(self, p, g, state, group):
        group["d"] = max(group.get("d", 1e-3), (g * (state["first"] - p)).sum().item())
        p.sub_(g, alpha=group["lr"] * group["d"])


class LAMB(Foreign):
    """Branches by each parameter."""

    def update(self, p, g, state, group):
        p_norm, g_norm = p.pow(2).sum().sqrt(), g.pow(2).sum().sqrt()
        p.add_(g * (1 if p_norm == 0 or g_norm == 0 else p_norm / g_norm), alpha=-group["lr"])


class Wrapped(Foreign):
    """Has another optimizer that updates, as Lookahead of most packages."""

    def __init__(self, params, **others):
        super().__init__(params, **others)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.01)

    def step(self, closure=None):
        self.inner.step()


class OfGroup(Foreign):
    """Has a running norm in the group, which it writes in place."""

    def __init__(self, params, **others):
        super().__init__(params, **others)
        for group in self.param_groups:
            group["norm"] = torch.zeros(())

    def begin(self, group):
        group["norm"].mul_(0.9).add_(torch.stack([p.grad.norm() for p in group["params"]]).norm())

    def update(self, p, g, state, group):
        p.sub_(group["lr"] * g / group["norm"])


class OfNone(Foreign):
    """Has a count in its state that is of no parameter."""

    def begin(self, group):
        if "n" not in self.state:
            self.state["n"] = torch.zeros(())
        self.state["n"].add_(1)

    def update(self, p, g, state, group):
        p.sub_(group["lr"] * g / self.state["n"].sqrt())


class Aliased(Foreign):
    """Makes one of two tensors of its state."""

    def init(self, p, state):
        state.update(a=torch.zeros_like(p), b=torch.zeros_like(p))

    def update(self, p, g, state, group):
        state["a"].add_(g)
        p.sub_(group["lr"] * (state["a"] + state["b"]))
        state["b"] = state["a"].view_as(p)


class OfParameterAlias(Foreign):
    def update(self, p, g, state, group):
        p.data = state["exp_avg"].sub_(g, alpha=group["lr"])


class OfPython(Foreign):
    def update(self, p, g, state, group):
        p.sub_(group["lr"] * g * random.random())


class Bare(Foreign):
    """Keeps a tensor for a parameter, and no dict."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = self.state[p] if p in self.state.keys() else torch.zeros_like(p)
            p.sub_(self.state[p].add_(p.grad))


class Quantile(Foreign):
    """Calls an op that is made of ops that write."""

    def update(self, p, g, state, group):
        bound = torch.quantile(g.abs().flatten(), 0.9)
        p.sub_(group["lr"] * g.clamp(-bound, bound))


class DecaysAll(Foreign):
    """Decays parameters that have no gradient, too."""

    def begin(self, group):
        for p in group["params"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])

    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"])


class OfAllValues(Foreign):
    """Has the norm of all parameters of a group in its rate."""

    def begin(self, group):
        self.norm = torch.stack([p.norm() for p in group["params"]]).norm()

    def update(self, p, g, state, group):
        p.sub_(group["lr"] * self.norm * g)


class OfAttributes(Foreign):
    """Reads what parameters are, and what was set on them."""

    def __init__(self, params, **others):
        super().__init__(params, **others)
        for place, p in enumerate(p for group in self.param_groups for p in group["params"]):
            p.rate = 1.0 + place

    def update(self, p, g, state, group):
        rate = getattr(p, "rate", 1.0) * (2.0 if isinstance(p, torch.nn.Parameter) and p.requires_grad else 1.0)
        p.sub_(state["exp_avg"].lerp_(g, 0.1), alpha=group["lr"] * rate)


class OfOne(Foreign):
    """Knows one of its parameters, by which it is."""

    def __init__(self, params, **others):
        super().__init__(params, **others)
        self.one = self.known(next(p for group in self.param_groups for p in group["params"]))

    def known(self, p):
        return [id(p)]

    def is_one(self, p, group):
        return id(p) in self.one

    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"] * (3.0 if self.is_one(p, group) else 1.0))


class OfText(OfOne):
    def is_one(self, p, group):
        return str(group["lr"]) == "0.01"


class OfKeys(OfOne):
    def known(self, p):
        return {p: 3.0}

    def is_one(self, p, group):
        return self.one.get(p) is not None


class OfMembers(OfOne):
    def known(self, p):
        self.param_groups[0]["one"] = [p]

    def is_one(self, p, group):
        return any(p is each for each in group.get("one", ()))


class OfObject(OfOne):
    def known(self, p):
        self.param_groups[0]["rate"] = numpy.ones(1)

    def is_one(self, p, group):
        return "rate" in group and group["rate"][0] == 1


class RandomStart(Foreign):
    def init(self, p, state):
        state["projection"] = torch.rand_like(p)

    def update(self, p, g, state, group):
        p.sub_(g * state["projection"], alpha=group["lr"])


class OfSizes(Foreign):
    """Keeps what a parameter was like before the first step: of several that is the same."""

    def init(self, p, state):
        state["largest"], state["rate"] = p.abs().max(), 2.0 if p.norm() > 1 else 1.0

    def update(self, p, g, state, group):
        p.sub_(g * state["largest"], alpha=group["lr"] * state["rate"])


class OfDepth(Foreign):
    """Counts in a dictionary of a dictionary."""

    def __init__(self, params, **others):
        super().__init__(params, **others)
        self.counts = collections.Counter(all={"calls": 0})

    def begin(self, group):
        self.counts["all"]["calls"] += 1

    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"] / self.counts["all"]["calls"])


class OfMarks(Foreign):
    """Counts on its parameters."""

    def update(self, p, g, state, group):
        p.calls = getattr(p, "calls", 0) + 1
        p.sub_(g, alpha=group["lr"] / p.calls)


class OfOptions(Foreign):
    """Reads what it keeps beside its groups, in them, and on its parameters."""

    def __init__(self, params, **others):
        super().__init__(params, options={"rate": 1.0}, **others)
        self._rate, self.rates, self.by_name, self.stopped = 1.0, [1.0], {"rate": 1.0}, {1}
        for group in self.param_groups:
            group["initial_lr"] = 1.0

    def update(self, p, g, state, group):
        rates = self._rate, self.rates[0], self.by_name["rate"], group["options"]["rate"], group["initial_lr"]
        of_p = getattr(p, "rate", 1.0) if 2 not in self.stopped else 0.0
        p.sub_(g, alpha=group["lr"] * math.prod(rates) * self.defaults["options"]["rate"] * of_p)


class UpTo(Foreign):
    """Updates as long as its rate is small, and where a parameter has no gradient only if it is smaller still."""

    def update(self, p, g, state, group):
        partly = any(each.grad is None for each in group["params"]) and group["lr"] < group["weight_decay"] / 10
        p.sub_(g, alpha=group["lr"] * (not partly and group["lr"] < group["weight_decay"]))


class SomeCounted(Foreign):
    """Counts no updates of the first parameter."""

    def init(self, p, state):
        state["step"] = torch.zeros(())

    def update(self, p, g, state, group):
        if p is not group["params"][0]:
            state["step"] += 1
        p.sub_(g * (group["lr"] / (1 + state["step"])))


class AllCounted(Foreign):
    """Counts calls of each parameter, also of those in which it has no gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                state["step"] += 1
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / state["step"]))


class OneOfAll(Foreign):
    """Goes by how many of the gradients are long."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        long = [bool((p.grad.norm() > 1).item()) for p in every]
        for p in every:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * (0.1 if long.count(True) == 1 else 1.0))


class OfFloats(Foreign):
    """Asks whether a number is one."""

    def update(self, p, g, state, group):
        if isinstance(group["weight_decay"], (int, float)):
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(g, alpha=group["lr"])


class OfOtherDtypes(Foreign):
    """Adds what is of several dtypes, by a number."""

    def init(self, p, state):
        state.update(low=torch.zeros_like(p, dtype=torch.bfloat16), sum=torch.zeros_like(p), whole=torch.zeros_like(p, dtype=int))

    def update(self, p, g, state, group):
        low, rate = state["low"].copy_(g), group["weight_decay"]
        state["sum"].addcmul_(low, low, value=rate).addcdiv_(low, low.abs() + 1, value=rate)
        p.sub_(low.add(state["sum"], alpha=rate) + state["whole"].add_(1).add(g, alpha=rate), alpha=group["lr"])


RATE, RATES, CALLS, COUNTS = 1.0, {"rate": 1.0}, 0, {"calls": 0}
HELD = OF_PROPERTY = OF_STATIC = WITHIN = 1.0


def _rate():
    return RATE * RATES["rate"]


def _closed():
    rate, calls = 1.0, 0

    class OfProgram(Foreign):
        """Reads what its class, its module and a closure have."""

        rate = 1.0

        def __init__(self, params, lr=0.01):
            super().__init__(params, lr)
            self.held = lambda: HELD

        @property
        def by_property(self):
            return OF_PROPERTY

        @staticmethod
        def by_static():
            return OF_STATIC

        def update(self, p, g, state, group):
            [within] = [rate * each for each in (WITHIN for _ in range(1))]
            p.sub_(g, alpha=group["lr"] * self.rate * _rate() * within * self.held() * self.by_property * self.by_static())

    class CountsInClosure(Foreign):
        def update(self, p, g, state, group):
            nonlocal calls
            calls += 1
            p.sub_(g, alpha=group["lr"] / calls)

    def stop():
        nonlocal rate
        rate = 0.0

    return OfProgram, CountsInClosure, stop


OfProgram, CountsInClosure, stop_closure = _closed()


class CountsInModule(Foreign):
    def begin(self, group):
        global CALLS
        CALLS += 1

    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"] / CALLS)


class CountsInClass(Foreign):
    calls = 0

    def begin(self, group):
        CountsInClass.calls += 1

    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"] / self.calls)


class CountsInDictionary(Foreign):
    def begin(self, group):
        COUNTS["calls"] += 1

    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"] / COUNTS["calls"])


class CountsInDefault(Foreign):
    def update(self, p, g, state, group, calls=[0]):  # noqa: B006
        calls[0] += 1
        p.sub_(g, alpha=group["lr"] / calls[0])


class CountsOnFunction(Foreign):
    def update(self, p, g, state, group):
        _rate.calls = getattr(_rate, "calls", 0) + 1
        p.sub_(g, alpha=group["lr"] / _rate.calls)


class CountsWithin(Foreign):
    def update(self, p, g, state, group):
        def count():
            global CALLS
            CALLS += 1
            return CALLS

        p.sub_(g, alpha=group["lr"] / count())


def _counted(function):
    calls = 0

    @functools.wraps(function)
    def count(*args):
        nonlocal calls
        calls += 1
        args[1].mul_(1 - 0.1 / calls)
        return function(*args)

    return count


class CountsInDecorator(Foreign):
    @_counted
    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"])


class CountsInWhatItHolds(Foreign):
    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.scale = _counted(lambda _, p: p)

    def update(self, p, g, state, group):
        self.scale(self, p).sub_(g, alpha=group["lr"])


class OfSome(Foreign):
    """Reads a number on the host where a parameter has no gradient."""

    def update(self, p, g, state, group):
        scale = float(g.norm()) if any(each.grad is None for each in group["params"]) else 1.0
        p.sub_(g, alpha=group["lr"] * scale)
