"""Which module's method a node was traced in, where Dynamo recorded no module.

Dynamo records a module where the module itself is called. Of `self.block.forward(x)` and `self.block.project(x)` it keeps the
frames alone, in the stack trace of each node: the function of a class says which modules may have been called.
"""

from __future__ import annotations

import inspect
import re
import types
import weakref
from collections.abc import Iterable

from torch import fx, nn

_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (\S+)$', re.MULTILINE)


class MethodFrames:
    """Finds the methods of a model's classes in stack traces.

    Args:
        modules: all modules of the model; those of torch's classes are left out, whose frames Dynamo does not keep.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        own = [module for module in modules if not _is_torchs(type(module))]
        self._modules = [weakref.ref(module) for module in own]
        self._methods: dict[tuple[str, str], list[tuple[range, type]]] = {}
        for cls in {base for module in own for base in type(module).__mro__ if not _is_torchs(base)}:
            for function in filter(inspect.isfunction, vars(cls).values()):
                code = inspect.unwrap(function).__code__
                self._methods.setdefault((code.co_filename, code.co_name), []).append((_lines(code), cls))

    def find(self, node: fx.Node, recorded: type | None) -> list[nn.Module]:
        """Return the modules of which a method may be the frame that `node` was traced in.

        Args:
            node: of a graph of Dynamo's.
            recorded: class of the module that Dynamo recorded for it. Where that inherits its forward from torch, no frame need
                be its own: those of others, if they do not lie within one that is, lie around it.

        Returns:
            The modules of the innermost frame that is a method's; [] where `recorded` is the module, or there is none.
        """
        if recorded is not None and _is_torchs(recorded):
            return []
        is_known = recorded is None or not _is_torchs(next(cls for cls in recorded.__mro__ if "forward" in vars(cls)))
        innermost: list[nn.Module] = []
        for file, line, name in reversed(_FRAME.findall(node.stack_trace or "")):
            classes = [cls for lines, cls in self._methods.get((file, name), ()) if int(line) in lines]
            if recorded is not None and any(issubclass(recorded, cls) for cls in classes):
                return innermost
            if classes and not innermost:
                innermost = [module for ref in self._modules if isinstance(module := ref(), tuple(classes))]
            if innermost and is_known:
                return innermost
        return []


def _is_torchs(cls: type) -> bool:
    return cls is object or cls.__module__.partition(".")[0] == "torch"


def _lines(code: types.CodeType) -> range:
    return range(code.co_firstlineno, 1 + max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno))
