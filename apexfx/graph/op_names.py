"""One name an op, however it is spelled: `torch.add`, `operator.iadd`, `Tensor.__radd__`, `aten.add.Tensor`, "add".

The names are those of the rule table: a plain torch name, with a trailing underscore where the op writes its first
argument. Functions that are not torch's keep their module ("mypackage.ops.roi_align"), so that no rule meant for torch
can fall on them by accident.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .._torch import OpOverload, OpOverloadPacket

# Another spelling of the same op -> its name in the table.
ALIASES = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "neg": "neg",
    "negative": "neg", "rsub": "sub", "rdiv": "div", "rtruediv": "div", "radd": "add", "rmul": "mul", "rpow": "pow",
    "rmatmul": "matmul", "absolute": "abs", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "not_equal": "ne", "floordiv": "floor_divide", "rfloordiv": "floor_divide", "mod": "remainder", "rmod": "remainder",
    "arccos": "acos", "arcsin": "asin", "arccosh": "acosh", "arctan2": "atan2", "ger": "outer", "swapaxes": "transpose",
    "concat": "cat", "concatenate": "cat", "clip": "clamp", "moveaxis": "movedim", "fix": "trunc",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp",
    "special_expm1": "expm1", "special_erfinv": "erfinv", "special_expit": "sigmoid", "special_log1p": "log1p",
    "special_exp2": "exp2", "special_xlogy": "xlogy", "special_gammaln": "lgamma", "special_digamma": "digamma",
    "_softmax": "softmax", "_log_softmax": "log_softmax", "convolution": "conv", "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm", "native_batch_norm": "batch_norm", "upsample": "interpolate",
    "upsample_nearest": "interpolate", "upsample_bilinear": "interpolate", "fused_rms_norm": "rms_norm",
    "linalg_matmul": "matmul", "log_sigmoid": "logsigmoid", "numpy_T": "T", "matrix_H": "mH",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not",
    "and_": "bitwise_and", "or_": "bitwise_or", "not_": "bitwise_not", "inv": "bitwise_not", "invert": "bitwise_not",
    "__get__": "attribute", "__set__": "attribute", "index": "getitem", "index_put_impl_": "index_put_",
}  # fmt: skip

# operator's and Python's in-place spellings: "iadd" and "__iadd__" are "add_".
_IN_PLACE = ("add", "sub", "mul", "div", "truediv", "pow", "matmul", "floordiv", "mod", "and", "or", "xor", "lshift",
             "rshift")

_TORCH_MODULES = ("torch", "_operator", "operator", "builtins")  # x.mT is captured as getattr(x, "mT"), by 2.15 as aten.mT


def canonical_name(func: Callable[..., Any] | str) -> str:
    """Return the table's name of `func`: a function, a method of Tensor, an OpOverload, or a method's name.

    >>> [canonical_name(f) for f in (torch.add, "__radd__", torch.ops.aten.add_.Tensor, torch.nn.functional.linear)]
    ['add', 'add', 'add_', 'linear']
    """
    if isinstance(func, str):
        return _plain(func)
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return _of_op(func)
    name = getattr(func, "__name__", None) or type(func).__name__
    module = getattr(func, "__module__", None) or "torch"  # the methods of Tensor that are written in C have none
    if module.split(".")[0] not in _TORCH_MODULES or module.startswith("torch._dynamo.variables"):  # that of nonstrict_trace
        return f"{module}.{getattr(func, '__qualname__', name)}"
    if name == "fn" and "boolean_dispatch" in getattr(func, "__qualname__", ""):
        name = "pooling"  # F.max_pool2d and its kind: one wrapper that chooses by return_indices
    return _plain(name, operator="operator" in module)


@functools.cache
def _of_op(op: OpOverload | OpOverloadPacket) -> str:
    namespace, name = str(op).split(".")[:2]
    return _plain(name) if namespace in ("aten", "prims") else f"{namespace}.{name}"


@functools.cache
def _plain(name: str, *, operator: bool = False) -> str:
    if name in ALIASES:
        return ALIASES[name]
    dunder = name.startswith("__") and name.endswith("__")
    if dunder:
        name = name[2:-2]
    if (dunder or operator) and name.startswith("i") and name[1:] in _IN_PLACE:
        return ALIASES.get(name[1:], name[1:]) + "_"
    if name in ALIASES:
        return ALIASES[name]
    if name.endswith("_") and name[:-1] in ALIASES and not operator:
        return ALIASES[name[:-1]] + "_"
    return name


def is_foreign(name: str) -> bool:
    """Return whether `name` is a function that is not torch's, whose demands on dtypes are unknown."""
    return "." in name
