"""adam_, lamb_, sgd_, adagrad_, novograd_: a whole optimizer step over a list of parameters, in place.

Each reads the gradient once and, in that pass, unscales it (`/ grad_scale`), clips it (`* clip_coefficient`), updates
the state and the parameter, and writes the low-precision `model_params` (a list that matches `params`, or empty).
Where `found_inf` is not zero nothing is written and the step is not counted. `step` (float32, how many updates were
made before) is counted up by the op. `lr_tensor`, where given, takes the place of `lr`. All scalars stay on the device.
The overload `unscale` also leaves the gradients divided by `grad_scale` (but not clipped), as torch's fused optimizers do. A
graph that does not ask for unscaled gradients has the other one, which writes none.

Parameters and gradients may be float32, float16 or bfloat16 in any mix, with float32 state; or float64 throughout.
Formulas: the references below, and csrc/optimizer_math.h. A sign of `norms[i] < 0` marks a NovoGrad norm not yet set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._arguments import accumulation
from ._define import LIBRARY, implement
from ._tensor_lists import check_decay_rates, check_lists, check_not_negative, check_scalar

_SCALARS = "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? clip_coefficient=None"
_MOMENTS = (
    "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] model_params, Tensor(e!) step, float lr, float beta1, "
    "float beta2, float eps, float weight_decay, bool decoupled, bool bias_correction"
)
_ADAM = f"{_MOMENTS}, {_SCALARS}"
_LAMB = f"{_MOMENTS}, bool grad_averaging, bool use_nvlamb, {_SCALARS}"
_SGD = (
    "Tensor(b!)[] momentum_buffers, Tensor(c!)[] model_params, float lr, float momentum, float dampening, "
    f"float weight_decay, bool nesterov, bool wd_after_momentum, bool first_run, {_SCALARS}"
)
_ADAGRAD = (
    "Tensor(b!)[] sums, Tensor(c!)[] model_params, float lr, float eps, float weight_decay, bool decoupled, "
    f"{_SCALARS}"
)
_NOVOGRAD = (
    "Tensor(b!)[] exp_avgs, Tensor(c!)[] norms, Tensor(d!)[] model_params, Tensor(e!) step, float lr, float beta1, "
    "float beta2, float eps, float weight_decay, bool bias_correction, bool grad_averaging, bool reg_inside_moment, "
    f"int norm_type, {_SCALARS}"
)
LIBRARY.define(f"adam_(Tensor(a!)[] params, Tensor[] grads, {_ADAM}) -> ()")
LIBRARY.define(f"lamb_(Tensor(a!)[] params, Tensor[] grads, {_LAMB}) -> ()")
LIBRARY.define(f"sgd_(Tensor(a!)[] params, Tensor[] grads, {_SGD}) -> ()")
LIBRARY.define(f"adagrad_(Tensor(a!)[] params, Tensor[] grads, {_ADAGRAD}) -> ()")
LIBRARY.define(f"novograd_(Tensor(a!)[] params, Tensor[] grads, {_NOVOGRAD}) -> ()")
LIBRARY.define(f"adam_.unscale(Tensor(a!)[] params, Tensor(f!)[] grads, {_ADAM}) -> ()")
LIBRARY.define(f"lamb_.unscale(Tensor(a!)[] params, Tensor(f!)[] grads, {_LAMB}) -> ()")
LIBRARY.define(f"sgd_.unscale(Tensor(a!)[] params, Tensor(f!)[] grads, {_SGD}) -> ()")
LIBRARY.define(f"adagrad_.unscale(Tensor(a!)[] params, Tensor(f!)[] grads, {_ADAGRAD}) -> ()")
LIBRARY.define(f"novograd_.unscale(Tensor(a!)[] params, Tensor(f!)[] grads, {_NOVOGRAD}) -> ()")

# ---- references -----------------------------------------------------------------------------------------------------


class _Scalars:
    """The device scalars of a step, in float64 so that one rounding remains."""

    def __init__(self, op, like, step, lr, lr_tensor, grad_scale, found_inf, clip_coefficient):
        if op not in ("sgd_", "adagrad_"):
            check_scalar(op, "step", step, like)
        names = ("lr_tensor", "grad_scale", "found_inf", "clip_coefficient")
        for name, tensor in zip(names, (lr_tensor, grad_scale, found_inf, clip_coefficient)):
            if tensor is not None:
                check_scalar(op, name, tensor, like)
        self.lr = lr if lr_tensor is None else lr_tensor.reshape(()).double()
        clip = 1.0 if clip_coefficient is None else clip_coefficient.reshape(()).double()
        self.multiplier = clip if grad_scale is None else clip / grad_scale.reshape(()).double()
        self.skip = None if found_inf is None else found_inf.reshape(()) != 0
        self.step = step
        self.t = None if step is None else step.reshape(()).double() + 1.0

    def correction(self, beta: float, enabled: bool) -> Tensor | float:
        """1 - beta^t, or 1."""
        return 1.0 - beta**self.t if enabled else 1.0

    def keep(self, old: Tensor, new: Tensor) -> None:
        """Write `new` to `old` unless the step is skipped."""
        old.copy_(new if self.skip is None else torch.where(self.skip, old, new.to(old.dtype)))

    def count(self) -> None:
        """Count the step unless it is skipped."""
        self.step.add_(1.0 if self.skip is None else (~self.skip).to(self.step.dtype))


def _cast(value: Tensor | float, wide: torch.dtype) -> Tensor | float:
    return value.to(wide) if isinstance(value, Tensor) else value


def _finish(scalars: _Scalars, param: Tensor, new: Tensor, model_params: Sequence[Tensor], i: int) -> None:
    scalars.keep(param, new)
    if model_params:
        scalars.keep(model_params[i], new)


def _lists(op, params, grads, model_params, **states):
    optional = {"model_params": model_params} if model_params else {}
    check_lists(op, tuple(states), params=params, grads=grads, **states, **optional)


def _adam_moments(i, params, grads, exp_avgs, exp_avg_sqs, s, beta1, beta2, eps, weight_decay, decoupled, beta3, corrections):
    """Return (p, m, v, direction) of one tensor, in the accumulation dtype."""
    wide = accumulation(params[i].dtype)
    p, m, v = params[i].to(wide), exp_avgs[i], exp_avg_sqs[i]
    g = grads[i].to(wide) * _cast(s.multiplier, wide)
    if not decoupled:
        g = g + weight_decay * p
    m = beta1 * m + beta3 * g
    v = beta2 * v + (1.0 - beta2) * (g * g)
    c1, c2 = (_cast(c, wide) for c in corrections)
    direction = (m / c1) / ((v / c2).sqrt() + eps)
    return p, m, v, direction + weight_decay * p if decoupled else direction


def _check_adam(op, lr, beta1, beta2, eps, weight_decay):
    check_not_negative(op, lr=lr, eps=eps, weight_decay=weight_decay)
    check_decay_rates(op, beta1=beta1, beta2=beta2)


def _adam_reference(
    params, grads, exp_avgs, exp_avg_sqs, model_params, step, lr, beta1, beta2, eps, weight_decay, decoupled,
    bias_correction, lr_tensor=None, grad_scale=None, found_inf=None, clip_coefficient=None,
):  # fmt: skip
    _check_adam("adam_", lr, beta1, beta2, eps, weight_decay)
    _lists("adam_", params, grads, model_params, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if not params:
        return
    s = _Scalars("adam_", params[0], step, lr, lr_tensor, grad_scale, found_inf, clip_coefficient)
    corrections = [s.correction(beta, bias_correction) for beta in (beta1, beta2)]
    for i, param in enumerate(params):
        p, m, v, direction = _adam_moments(
            i, params, grads, exp_avgs, exp_avg_sqs, s, beta1, beta2, eps, weight_decay, decoupled, 1.0 - beta1, corrections
        )
        s.keep(exp_avgs[i], m)
        s.keep(exp_avg_sqs[i], v)
        _finish(s, param, p - _cast(s.lr, p.dtype) * direction, model_params, i)
    s.count()


def _lamb_reference(
    params, grads, exp_avgs, exp_avg_sqs, model_params, step, lr, beta1, beta2, eps, weight_decay, decoupled,
    bias_correction, grad_averaging, use_nvlamb, lr_tensor=None, grad_scale=None, found_inf=None, clip_coefficient=None,
):  # fmt: skip
    _check_adam("lamb_", lr, beta1, beta2, eps, weight_decay)
    _lists("lamb_", params, grads, model_params, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if not params:
        return
    s = _Scalars("lamb_", params[0], step, lr, lr_tensor, grad_scale, found_inf, clip_coefficient)
    corrections = [s.correction(beta, bias_correction) for beta in (beta1, beta2)]
    beta3 = 1.0 - beta1 if grad_averaging else 1.0
    for i, param in enumerate(params):
        p, m, v, direction = _adam_moments(
            i, params, grads, exp_avgs, exp_avg_sqs, s, beta1, beta2, eps, weight_decay, decoupled, beta3, corrections
        )
        s.keep(exp_avgs[i], m)
        s.keep(exp_avg_sqs[i], v)
        rate = _cast(s.lr, p.dtype)
        if use_nvlamb or weight_decay != 0.0:
            p_norm, d_norm = p.double().norm(), direction.double().norm()
            ratio = torch.where((p_norm > 0) & (d_norm > 0), p_norm / d_norm, torch.ones_like(p_norm))
            rate = (ratio * s.lr).to(p.dtype)
        _finish(s, param, p - rate * direction, model_params, i)
    s.count()


def _sgd_reference(
    params, grads, momentum_buffers, model_params, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum,
    first_run, lr_tensor=None, grad_scale=None, found_inf=None, clip_coefficient=None,
):  # fmt: skip
    check_not_negative("sgd_", lr=lr, momentum=momentum, weight_decay=weight_decay, dampening_magnitude=abs(dampening))
    states = {"momentum_buffers": momentum_buffers} if momentum_buffers or momentum != 0.0 else {}
    _lists("sgd_", params, grads, model_params, **states)
    if not params:
        return
    s = _Scalars("sgd_", params[0], None, lr, lr_tensor, grad_scale, found_inf, clip_coefficient)
    for i, param in enumerate(params):
        wide = accumulation(param.dtype)
        p = param.to(wide)
        d = grads[i].to(wide) * _cast(s.multiplier, wide)
        if not wd_after_momentum:
            d = d + weight_decay * p
        if momentum != 0.0:
            buffer = d if first_run else momentum * momentum_buffers[i] + (1.0 - dampening) * d
            s.keep(momentum_buffers[i], buffer)
            d = d + momentum * buffer if nesterov else buffer
        if wd_after_momentum:
            d = d + weight_decay * p
        _finish(s, param, p - _cast(s.lr, wide) * d, model_params, i)


def _adagrad_reference(
    params, grads, sums, model_params, lr, eps, weight_decay, decoupled, lr_tensor=None, grad_scale=None, found_inf=None,
    clip_coefficient=None,
):  # fmt: skip
    check_not_negative("adagrad_", lr=lr, eps=eps, weight_decay=weight_decay)
    _lists("adagrad_", params, grads, model_params, sums=sums)
    if not params:
        return
    s = _Scalars("adagrad_", params[0], None, lr, lr_tensor, grad_scale, found_inf, clip_coefficient)
    for i, param in enumerate(params):
        wide = accumulation(param.dtype)
        p = param.to(wide)
        g = grads[i].to(wide) * _cast(s.multiplier, wide)
        if not decoupled:
            g = g + weight_decay * p
        h = sums[i] + g * g
        direction = g / (h.sqrt() + eps)
        if decoupled:
            direction = direction + weight_decay * p
        s.keep(sums[i], h)
        _finish(s, param, p - _cast(s.lr, wide) * direction, model_params, i)


def _novograd_reference(
    params, grads, exp_avgs, norms, model_params, step, lr, beta1, beta2, eps, weight_decay, bias_correction,
    grad_averaging, reg_inside_moment, norm_type, lr_tensor=None, grad_scale=None, found_inf=None, clip_coefficient=None,
):  # fmt: skip
    _check_adam("novograd_", lr, beta1, beta2, eps, weight_decay)
    if norm_type not in (0, 2):
        raise ValueError(f"apexfx::novograd_: norm_type is {norm_type}; expected 2, or 0 for the max norm")
    _lists("novograd_", params, grads, model_params, exp_avgs=exp_avgs)
    if len(norms) != len(params):
        raise ValueError(f"apexfx::novograd_: norms has {len(norms)} tensors, params has {len(params)}")
    if not params:
        return
    for norm in norms:
        check_scalar("novograd_", "a tensor of norms", norm, params[0])
    s = _Scalars("novograd_", params[0], step, lr, lr_tensor, grad_scale, found_inf, clip_coefficient)
    c1, c2 = s.correction(beta1, bias_correction), s.correction(beta2, bias_correction) ** 0.5
    beta3 = 1.0 - beta1 if grad_averaging else 1.0
    for i, param in enumerate(params):
        wide = accumulation(param.dtype)
        p, g = param.to(wide), grads[i].to(wide) * _cast(s.multiplier, wide)
        n = _novograd_norm(norms[i].reshape(()).double(), g.double(), beta2, norm_type).float()
        denominator = (n.double() / c2 + eps).to(wide)
        if reg_inside_moment:
            m = beta1 * exp_avgs[i] + beta3 * (g / denominator + weight_decay * p)
            direction = m / _cast(c1, wide)
        else:
            m = beta1 * exp_avgs[i] + beta3 * g
            direction = (m / _cast(c1, wide)) / denominator + weight_decay * p
        s.keep(norms[i], n.reshape(norms[i].shape))
        s.keep(exp_avgs[i], m)
        _finish(s, param, p - _cast(s.lr, wide) * direction, model_params, i)
    s.count()


def _novograd_norm(n: Tensor, g: Tensor, beta2: float, norm_type: int) -> Tensor:
    if norm_type == 2:
        norm = g.norm()
        blended = (beta2 * n * n + (1.0 - beta2) * norm * norm).sqrt()
    else:
        norm = g.abs().amax() if g.numel() else g.new_zeros(())
        blended = beta2 * n + (1.0 - beta2) * norm
    return torch.where(n < 0, norm, blended)


# ---- fakes and registration; a step is not differentiable -----------------------------------------------------------


def _fake(*arguments, **keywords):
    return None


def _unscaling(reference: Callable[..., None]) -> Callable[..., None]:
    """Return the reference of the overload that writes the gradients too."""
    signature = inspect.signature(reference)

    def call(*arguments, **keywords):
        reference(*arguments, **keywords)
        named = signature.bind(*arguments, **keywords).arguments
        scale, found_inf = named.get("grad_scale"), named.get("found_inf")
        if scale is not None:
            kept = scale if found_inf is None else torch.where(found_inf != 0, 1.0, scale)
            for grad in named["grads"]:
                grad.mul_(kept.reshape(()).double().reciprocal().to(accumulation(grad.dtype)))

    return call


for _name, _reference in (("adam_", _adam_reference), ("lamb_", _lamb_reference), ("sgd_", _sgd_reference),
                          ("adagrad_", _adagrad_reference), ("novograd_", _novograd_reference)):  # fmt: skip
    implement(_name, _reference, _fake)
    implement(f"{_name}.unscale", _unscaling(_reference), _fake)
