"""An op in one place: its schema, its checks, and a reference in plain torch that is oracle, fallback and documentation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

LIBRARY = torch.library.Library("apexfx", "FRAGMENT")  # of every op

# Ops on activations take any strides: Inductor need not bring its own back to those of the traced graph.
ANY_STRIDES = (torch.Tag.flexible_layout,)


def define(
    schema: str, *, check: Callable[..., object], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for the reference of an op, in whose place it puts a function that calls the op.

    The reference itself, behind `check`, is the attribute `reference` of that function.

    Args:
        schema: "name(arguments) -> results".
        check: takes the op's arguments; raises ValueError or TypeError for what the op cannot compute.
        fake: takes checked arguments; returns empty results.
    """

    def decorate(reference: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=tags)
        implement(name, behind(check, reference), behind(check, fake))
        overload = getattr(torch.ops.apexfx, name).default

        @functools.wraps(reference)
        def call(*arguments: Any, **keywords: Any) -> Any:
            return overload(*arguments, **keywords)

        call.reference = behind(check, reference)
        return call

    return decorate


def implement(name: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register the reference and the fake of an op, both of which check its arguments, behind a schema that is defined."""
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"apexfx::{name}", fake, lib=LIBRARY)


def behind(check: Callable[..., object], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` behind `check`, which takes the same arguments."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        check(*arguments, **keywords)
        return function(*arguments, **keywords)

    return call
