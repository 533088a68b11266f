"""A call of a custom op that records its derivative at once, without torch.library's Python dispatch.

`torch.library.register_autograd` costs some 20 us a call, which is what a small norm takes in all. Where nothing looks
at the call (no compiler, no mode, no tensor subclass, no functorch transform) a Function records the same formula
instead; everywhere else the op is called, and its registered derivative used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from .._torch import below_autograd, dispatch_mode_depth, functorch_is_active


def is_direct(arguments: tuple[Any, ...]) -> bool:
    """Tell whether nothing looks at a call with these arguments."""
    # Under AOTAutograd is_compiling() is False on 2.11; its modes are on.
    return not (torch.compiler.is_compiling() or dispatch_mode_depth() or functorch_is_active() or has_torch_function(arguments))


def with_direct_autograd(
    op: Callable[..., tuple[Tensor, ...]],
    setup_context: Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None],
    backward: Callable[..., tuple[Tensor | None, ...]],
    elsewhere: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function like `op`, an overload registered with this `setup_context` and `backward`.

    `elsewhere` is called instead of `op` where something looks at the call: for an `op` that is registered otherwise.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            with below_autograd():
                output = op(*arguments)
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return backward(ctx, *grads)

    def call(*arguments: Any) -> tuple[Tensor, ...]:
        return Direct.apply(*arguments) if is_direct(arguments) else (elsewhere or op)(*arguments)

    return call
