"""What layer_norm and rms_norm share: argument checks, reference, fakes and derivative.

RMS norm is layer norm without a mean and a bias, and the arguments of both come in one order:

    forward    x, *parameters, num_dims, eps, dtype, memory_efficient                          -> y, *statistics
    backward   grad, saved, *statistics, *parameters, num_dims, eps, from_output, input_dtype  -> dx, *dparameters

where the parameters are weight and bias, or weight alone, and the statistics mean and rstd, or rstd alone. What is saved is
x, or with `memory_efficient` y (`from_output`). `<name>_backward_input` returns dx alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import functorch_is_active
from ._arguments import FLOATING, accumulation, check_floating, check_tensor
from ._define import LIBRARY, implement


class Norm:
    """One of the two norms.

    Args:
        name: of the op, which its file has defined.
        centered: whether the mean is subtracted, and a bias added: layer norm.
    """

    def __init__(self, name: str, *, centered: bool) -> None:
        self.name = name
        self.centered = centered
        self.parameter_names = ("weight", "bias") if centered else ("weight",)
        self.statistic_names = ("mean", "rstd") if centered else ("rstd",)

    def register(self) -> None:
        """Register references, fakes and the derivative."""
        for suffix, reference, fake in (
            ("", self.reference, self._fake),
            ("_backward_input", self.reference_backward_input, self._fake_backward_input),
            ("_backward", self.reference_backward, self._fake_backward),
        ):
            implement(self.name + suffix, reference, fake)
        torch.library.register_autograd(f"apexfx::{self.name}", self._backward, setup_context=self._setup_context, lib=LIBRARY)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run the forward: the op, or its reference under torch.func, whose jvp of an op is 0."""
        if not torch.compiler.is_compiling() and functorch_is_active():
            return self.reference(*arguments)
        return self._op("")(*arguments)

    def _op(self, suffix: str) -> Any:
        return getattr(torch.ops.apexfx, self.name + suffix).default

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(
        self, op: str, x: Tensor, parameters: Sequence[Tensor | None], num_dims: int, eps: float, dtype: torch.dtype | None
    ) -> None:
        """Raise ValueError or TypeError, naming the op and the argument, for anything a forward cannot compute."""
        check_floating(op, "x", x)
        if not 1 <= num_dims <= x.dim():
            raise ValueError(f"apexfx::{op}: num_dims={num_dims}, but x has shape {list(x.shape)}; "
                             f"give the number of trailing dims to normalize over, from 1 to {x.dim()}")
        if not (eps >= 0 and math.isfinite(eps)):
            raise ValueError(f"apexfx::{op}: eps={eps}; expected a finite number that is not negative")
        normalized_shape = x.shape[x.dim() - num_dims :]
        present = {name: p for name, p in zip(self.parameter_names, parameters) if p is not None}
        for name, parameter in present.items():
            check_floating(op, name, parameter, x)
            if parameter.shape != normalized_shape:
                raise ValueError(f"apexfx::{op}: {name} has shape {list(parameter.shape)}, "
                                 f"expected the normalized shape {list(normalized_shape)}")
            if (parameter.dtype == torch.float64) != (x.dtype == torch.float64):
                raise TypeError(f"apexfx::{op}: {name} is {parameter.dtype} and x {x.dtype}; "
                                "float64 mixes with no other dtype, cast one of them")
        if len({parameter.dtype for parameter in present.values()}) > 1:
            weight, bias = present.values()
            raise TypeError(f"apexfx::{op}: weight is {weight.dtype} and bias {bias.dtype}; give both in one dtype")
        allowed = {x.dtype, *(parameter.dtype for parameter in present.values())}
        if dtype is not None and dtype not in allowed:
            raise TypeError(f"apexfx::{op}: dtype={dtype}; expected x's dtype or the parameters' "
                            f"({', '.join(sorted(map(str, allowed)))})")

    def _check_backward(self, op, grad, saved, statistics, parameters, num_dims, eps, from_output, input_dtype) -> None:
        """Raise ValueError or TypeError for tensors that cannot come from one forward."""
        self.check(op, saved, parameters, num_dims, eps, None)
        check_floating(op, "grad", grad, saved, "saved")
        if grad.shape != saved.shape:
            raise ValueError(f"apexfx::{op}: grad has shape {list(grad.shape)}, expected saved's, {list(saved.shape)}")
        if (grad.dtype == torch.float64) != (saved.dtype == torch.float64):
            raise TypeError(f"apexfx::{op}: grad is {grad.dtype} and saved {saved.dtype}; float64 mixes with nothing else")
        if input_dtype not in FLOATING or (input_dtype == torch.float64) != (saved.dtype == torch.float64):
            raise TypeError(f"apexfx::{op}: input_dtype={input_dtype} does not go with saved, which is {saved.dtype}")
        leading, expected = saved.shape[: saved.dim() - num_dims], accumulation(saved.dtype)
        for name, value in zip(self.statistic_names, statistics):
            if name == "mean" and value is None:
                if not from_output:
                    raise ValueError(f"apexfx::{op}: mean is None; only a backward from the output (from_output=True) "
                                     "needs none")
                continue
            check_tensor(op, name, value, saved, "saved")
            if value.shape != leading or value.dtype != expected:
                raise ValueError(f"apexfx::{op}: {name} is {value.dtype}{list(value.shape)}, expected "
                                 f"{expected}{list(leading)} as the forward returned it")

    # ---- references: oracle of the tests, and what runs where no kernel is compiled ---------------------------------

    def reference(self, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Return (y, *statistics)."""
        parameters, num_dims, eps, dtype = self._forward_arguments(x, *arguments)
        normalized, *statistics = self._normalize(x, num_dims, eps)
        y, leading = normalized, x.shape[: x.dim() - num_dims]
        for parameter, apply in zip(parameters, (torch.mul, torch.add)):
            if parameter is not None:
                y = apply(y, parameter)
        return y.to(dtype or x.dtype).contiguous(), *(value.reshape(leading).contiguous() for value in statistics)

    def _forward_arguments(self, x: Tensor, *arguments: Any) -> tuple[Any, ...]:
        """Return (parameters, num_dims, eps, dtype) of a forward, checked; the dispatcher leaves trailing defaults out."""
        count = len(self.parameter_names)
        split = arguments[:count], *(*arguments[count:], None)[:3]
        self.check(self.name, x, *split)
        return split

    def _normalize(self, x: Tensor, num_dims: int, eps: float) -> tuple[Tensor, ...]:
        """Return (normalized x, *statistics) in the accumulation dtype, the statistics with `num_dims` unit dims."""
        dims, x = tuple(range(-num_dims, 0)), x.to(accumulation(x.dtype))
        means = [x.mean(dims, keepdim=True)] if self.centered else []
        for mean in means:
            x = x - mean
        rstd = (x.square().mean(dims, keepdim=True) + eps).rsqrt()
        return x * rstd, *means, rstd

    def _input_gradient(self, grad, normalized, rstd, weight, num_dims, input_dtype) -> Tensor:
        dims, grad = tuple(range(-num_dims, 0)), grad.to(normalized.dtype)
        if weight is not None:
            grad = grad * weight
        projection = normalized * (grad * normalized).mean(dims, keepdim=True)
        if self.centered:
            projection = grad.mean(dims, keepdim=True) + projection
        return ((grad - projection) * rstd).to(input_dtype).contiguous()

    def reference_backward_input(self, *arguments: Any) -> Tensor:
        """Return the gradient of x."""
        return self._reference_gradients("_backward_input", *arguments)[0]

    def reference_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the gradients of x and the parameters; an empty tensor for a parameter that is not there."""
        return self._reference_gradients("_backward", *arguments)

    def _reference_gradients(self, suffix: str, *arguments: Any) -> tuple[Tensor, ...]:
        grad, saved, statistics, parameters, *options = self._backward_arguments(suffix, *arguments)
        num_dims, eps, from_output, input_dtype = options
        (*mean, rstd), (weight, *bias) = statistics, parameters
        rstd = rstd.reshape(rstd.shape + (1,) * num_dims)
        normalized = saved.to(accumulation(saved.dtype))
        for subtracted in bias if from_output else mean:
            if subtracted is not None:
                normalized = normalized - (subtracted if from_output else subtracted.reshape(rstd.shape))
        if not from_output:
            normalized = normalized * rstd
        elif weight is not None:
            normalized = normalized / _clamp_by_magnitude(weight.to(normalized.dtype), eps)
        dx = self._input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype)
        if suffix == "_backward_input":
            return (dx,)
        return dx, *(_sum_rows(value, p) for value, p in zip(_per_parameter(grad, normalized), parameters))

    def _backward_arguments(self, suffix: str, grad: Tensor, saved: Tensor, *arguments: Any) -> tuple[Any, ...]:
        """Return the arguments of a backward, checked, with the statistics and the parameters each in a tuple."""
        count = len(self.parameter_names)
        statistics, parameters, options = arguments[:count], arguments[count : 2 * count], arguments[2 * count :]
        self._check_backward(self.name + suffix, grad, saved, statistics, parameters, *options)
        return grad, saved, statistics, parameters, *options

    # ---- fakes: shapes and dtypes only ------------------------------------------------------------------------------

    def _fake(self, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        _, num_dims, _, dtype = self._forward_arguments(x, *arguments)
        leading, wide = x.shape[: x.dim() - num_dims], accumulation(x.dtype)
        return x.new_empty(x.shape, dtype=dtype or x.dtype), *(x.new_empty(leading, dtype=wide) for _ in self.statistic_names)

    def _fake_backward_input(self, *arguments: Any) -> Tensor:
        _, saved, *_, input_dtype = self._backward_arguments("_backward_input", *arguments)
        return saved.new_empty(saved.shape, dtype=input_dtype)

    def _fake_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        _, saved, (*_, rstd), parameters, *_, input_dtype = self._backward_arguments("_backward", *arguments)
        gradients = (rstd.new_empty(0) if p is None else p.new_empty(p.shape) for p in parameters)
        return saved.new_empty(saved.shape, dtype=input_dtype), *gradients

    # ---- derivative -------------------------------------------------------------------------------------------------

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, *parameters, num_dims, eps, _, memory_efficient = inputs
        y, *mean, rstd = output
        ctx.mark_non_differentiable(*mean, rstd)
        ctx.set_materialize_grads(False)
        if memory_efficient:
            mean = [None for _ in mean]
        ctx.save_for_backward(y if memory_efficient else x, *mean, rstd, *parameters)
        ctx.options = num_dims, eps, memory_efficient, x.dtype

    def _backward(self, ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        gradients: tuple[Tensor | None, ...] = ()
        if grad is not None and torch.is_grad_enabled():  # the caller asked for create_graph=True
            gradients = self._differentiable_gradients(ctx, grad)
        elif grad is not None and any(needed[1:]):
            gradients = self._op("_backward")(grad, *ctx.saved_tensors, *ctx.options)
        elif grad is not None and needed[0]:
            gradients = (self._op("_backward_input")(grad, *ctx.saved_tensors, *ctx.options),)
        gradients = tuple(value if wanted else None for wanted, value in zip(needed, gradients))
        return *gradients, *(None,) * (len(needed) - len(gradients))

    def _differentiable_gradients(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and the parameters from plain torch ops on x, which autograd can differentiate again."""
        num_dims, eps, memory_efficient, input_dtype = ctx.options
        if memory_efficient:
            raise RuntimeError(f"apexfx::{self.name}: a second derivative needs x, which memory_efficient=True does not keep; "
                               "use memory_efficient=False")
        x, *rest = ctx.saved_tensors
        parameters = rest[len(self.statistic_names) :]
        normalized, *_, rstd = self._normalize(x, num_dims, eps)
        dx = self._input_gradient(grad, normalized, rstd, parameters[0], num_dims, input_dtype)
        return dx, *(
            None if p is None else _sum_rows(value, p) for value, p in zip(_per_parameter(grad, normalized), parameters)
        )


def _per_parameter(grad: Tensor, normalized: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is summed over the rows for the gradients of weight and bias."""
    grad = grad.to(normalized.dtype)
    return grad * normalized, grad


def _clamp_by_magnitude(weight: Tensor, eps: float) -> Tensor:
    """Return `weight` with every |value| < eps replaced by eps, with its sign (zero counts as positive)."""
    return torch.where(weight < 0, weight.clamp(max=-eps), weight.clamp(min=eps))


def _sum_rows(values: Tensor, parameter: Tensor | None) -> Tensor:
    """Sum over all but the parameter's dims, into its dtype; a parameter that is not there gets an empty tensor."""
    if parameter is None:
        return values.new_empty(0)
    leading = tuple(range(values.dim() - parameter.dim()))
    return (values.sum(leading) if leading else values).to(parameter.dtype).contiguous()
