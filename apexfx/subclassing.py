"""Subclasses made at run time: an object behaves otherwise, and still counts as one of the class that its user wrote.

`subclass` puts a mixin in front of a class and keeps its name, which libraries write into files. No such class can be
imported by name, so a pickle refers to the class that it was made from, and to what makes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def subclass(cls: type, mixin: type, **attributes: Any) -> type:
    """Return a new subclass of `mixin` and `cls`, named as `cls` is; callers keep it, so that there is one for a class."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, **attributes}
    return type(cls)(cls.__name__, (mixin, cls), names)


def source_class(cls: type, mixin: type) -> type:
    """Return the class that `mixin` was put in front of, also from subclasses of the result; `cls` where it was not."""
    return cls.__mro__[cls.__mro__.index(mixin) + 1] if issubclass(cls, mixin) else cls


def reduced(base: Any, obj: Any, mixin: type, make: Callable[[type], type], protocol: Any) -> tuple[Any, ...]:
    """Return what `obj.__reduce_ex__` is to return: as `base` says, of a class that is made again where it is loaded.

    Args:
        base: `super()` in the mixin.
        make: the importable function that makes the subclass of a class.
    """
    function, arguments, *rest = base.__reduce_ex__(protocol)
    cls = source_class(type(obj), mixin)
    return (_remade, (make, cls, function, tuple(cls if a is type(obj) else a for a in arguments)), *rest)


def _remade(make: Callable[[type], type], cls: type, function: Any, arguments: tuple[Any, ...]) -> Any:
    return function(*(make(cls) if a is cls else a for a in arguments))
