"""multi_tensor_scale, multi_tensor_axpby, multi_tensor_l2norm: one op over a whole list of tensors.

Every op reports infinities and NaNs through a one-element float32 tensor on the device; nothing waits for the host.
Arithmetic is in float32 (float64 for float64 tensors), whatever the dtypes of inputs and outputs, which may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._arguments import accumulation
from ._define import LIBRARY, implement
from ._tensor_lists import check_lists, check_not_empty, check_scalar

LIBRARY.define(
    "multi_tensor_scale(Tensor[] inputs, Tensor(a!)[] outputs, Tensor(b!) found_inf, float scale=1.0, "
    "Tensor? scale_tensor=None) -> ()"
)
LIBRARY.define(
    "multi_tensor_axpby(Tensor[] x, Tensor[] y, Tensor(a!)[] outputs, Tensor(b!) found_inf, float a, float b, "
    "int arg_to_check=-1) -> ()"
)
LIBRARY.define(
    "multi_tensor_l2norm(Tensor[] tensors, Tensor? inv_scale=None, bool per_tensor=False)"
    " -> (Tensor norm, Tensor norms, Tensor found_inf)"
)


def multi_tensor_scale(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    found_inf: Tensor,
    scale: float = 1.0,
    scale_tensor: Tensor | None = None,
) -> None:
    """Write `inputs[i] * scale * scale_tensor` to `outputs[i]`; set `found_inf` to 1 where an input is not finite.

    Everything is written also then; `found_inf` is never cleared. `outputs` may be `inputs`.
    """
    torch.ops.apexfx.multi_tensor_scale.default(list(inputs), list(outputs), found_inf, scale, scale_tensor)
    _written(outputs)


def multi_tensor_axpby(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    outputs: Sequence[Tensor],
    found_inf: Tensor,
    a: float,
    b: float,
    arg_to_check: int = -1,
) -> None:
    """Write `a * x[i] + b * y[i]` to `outputs[i]`; `found_inf` looks at x (0), y (1) or both (-1)."""
    torch.ops.apexfx.multi_tensor_axpby.default(list(x), list(y), list(outputs), found_inf, a, b, arg_to_check)
    _written(outputs)


def multi_tensor_l2norm(
    tensors: Sequence[Tensor], inv_scale: Tensor | None = None, per_tensor: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(norm, norms, found_inf)` of `tensors * inv_scale`, each read once and none written.

    `norm` is the 2-norm of all elements together, `norms` of each tensor (empty unless `per_tensor`), `found_inf` is 1
    where an element is infinite or NaN; all float32, on the tensors' device.
    """
    return torch.ops.apexfx.multi_tensor_l2norm.default(list(tensors), inv_scale, per_tensor)


def by_device(*lists: Sequence[Tensor]) -> dict[torch.device, tuple[list[Tensor], ...]]:
    """Return the tensors of parallel lists by the device of the first list's: one op call takes those of one device."""
    devices = {tensor.device for tensor in lists[0]}
    if len(devices) == 1:
        return {devices.pop(): tuple(map(list, lists))}
    grouped: dict[torch.device, tuple[list[Tensor], ...]] = {}
    for row in zip(*lists):
        for on_device, tensor in zip(grouped.setdefault(row[0].device, tuple([] for _ in lists)), row):
            on_device.append(tensor)
    return grouped


def _written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that the tensors changed: an op without an autograd kernel does not bump their versions."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(list(tensors))


# ---- references -----------------------------------------------------------------------------------------------------


def _flag(found_inf: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        found_inf.masked_fill_(~tensor.isfinite().all(), 1.0)


def _scale_reference(inputs, outputs, found_inf, scale=1.0, scale_tensor=None):
    check_lists("multi_tensor_scale", inputs=inputs, outputs=outputs)
    check_scalar("multi_tensor_scale", "found_inf", found_inf, inputs[0] if inputs else found_inf)
    if scale_tensor is not None:
        check_scalar("multi_tensor_scale", "scale_tensor", scale_tensor, found_inf)
    _flag(found_inf, inputs)
    factor = scale if scale_tensor is None else scale * scale_tensor.reshape(()).double()
    for x, out in zip(inputs, outputs):
        wide = accumulation(x.dtype)
        out.copy_(x.to(wide) * (factor if scale_tensor is None else factor.to(wide)))


def _axpby_reference(x, y, outputs, found_inf, a, b, arg_to_check=-1):
    check_lists("multi_tensor_axpby", x=x, y=y, outputs=outputs)
    check_scalar("multi_tensor_axpby", "found_inf", found_inf, x[0] if x else found_inf)
    if arg_to_check not in (-1, 0, 1):
        raise ValueError(f"apexfx::multi_tensor_axpby: arg_to_check is {arg_to_check}; expected -1, 0 or 1")
    _flag(found_inf, [*(x if arg_to_check != 1 else ()), *(y if arg_to_check != 0 else ())])
    for x_i, y_i, out in zip(x, y, outputs):
        out.copy_(a * x_i.to(accumulation(x_i.dtype)) + b * y_i.to(accumulation(y_i.dtype)))


def _l2norm_reference(tensors, inv_scale=None, per_tensor=False):
    check_not_empty("multi_tensor_l2norm", tensors)
    check_lists("multi_tensor_l2norm", tensors=tensors)
    if inv_scale is not None:
        check_scalar("multi_tensor_l2norm", "inv_scale", inv_scale, tensors[0])
    squares = torch.stack([t.double().square().sum() for t in tensors])
    multiplier = 1.0 if inv_scale is None else inv_scale.reshape(()).double().abs()
    found_inf = (~squares.isfinite().all()).float()
    norms = (squares.sqrt() * multiplier).float() if per_tensor else squares.new_empty(0, dtype=torch.float32)
    return (squares.sum().sqrt() * multiplier).float(), norms, found_inf


# ---- fakes and registration; nothing here is differentiable ---------------------------------------------------------


def _writes_fake(*arguments, **keywords):
    return None


def _l2norm_fake(tensors, inv_scale=None, per_tensor=False):
    check_not_empty("multi_tensor_l2norm", tensors)
    shapes = ((), (len(tensors) if per_tensor else 0,), ())
    return tuple(tensors[0].new_empty(shape, dtype=torch.float32) for shape in shapes)


implement("multi_tensor_scale", _scale_reference, _writes_fake)
implement("multi_tensor_axpby", _axpby_reference, _writes_fake)
implement("multi_tensor_l2norm", _l2norm_reference, _l2norm_fake)
