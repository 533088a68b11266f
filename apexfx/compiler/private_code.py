"""Functions with code of their own, which Dynamo tells from all others."""

from __future__ import annotations

import types
from typing import Any


def with_private_code(function: Any) -> types.FunctionType:
    """Return `function` with a code object of its own.

    Dynamo counts recompilations a code object; models of one class would use up each other's limit. What it does not
    trace as a root frame (torch's own modules, callables that are no functions) is called from a function that it does.
    """
    if isinstance(function, types.FunctionType) and not (function.__module__ or "").startswith("torch."):
        own = with_own_code(function)
        own.__qualname__ = function.__qualname__  # no __wrapped__: Dynamo would follow it to the shared code object
        return own

    def forward(module: Any, *inputs: Any, **named_inputs: Any) -> Any:
        return function(module, *inputs, **named_inputs)

    return with_own_code(forward)


def with_own_code(function: types.FunctionType) -> types.FunctionType:
    """Return a plain function with a code object of its own."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                             function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
