"""The C++ kernels of a graph, several in a file: compiler and linker take longer to start than for most kernels.

The same kernels in the same order are in the same files, which Inductor's cache keeps as it keeps those of one kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from .._torch_compilers import AsyncCompile, CppFile, inductor_async_compile
from ..graph.printing import count_text
from .progress import PROGRESS

_FILE_CHARACTERS = 150_000  # after which a file is full: it takes three seconds then, and files are compiled side by side


@dataclass(eq=False)
class _Kernel:
    """A kernel that the module of a graph has asked for: the types of its arguments, and its code, whose function is `kernel`."""

    argument_types: Sequence[str]
    code: str


class KernelFiles(AsyncCompile):
    """What the module of a graph asks for its kernels, and then waits for."""

    def __init__(self) -> None:
        self._kernels: list[_Kernel] = []

    def cpp_pybinding(self, argtypes: Sequence[str], source_code: str) -> _Kernel:
        """Note a kernel, which `wait` compiles."""
        self._kernels.append(_Kernel(argtypes, source_code))
        return self._kernels[-1]

    def wait(self, scope: dict[str, Any]) -> None:
        """Compile, and put the function of each kernel in its place in `scope`."""
        files = list(_filled(self._kernels))
        loads = [CppFile.load_kernels([(each.argument_types, each.code) for each in kernels]) for kernels in files]
        functions: dict[_Kernel, Any] = {}
        for kernels, load in zip(files, loads):
            done = f"compiled {len(functions)} of" if functions else "compiles"
            PROGRESS.enter(f"{done} {count_text(len(self._kernels), 'kernel')}")
            functions.update(zip(kernels, load()))
        scope.update({name: functions[held] for name, held in scope.items() if isinstance(held, _Kernel)})
        super().wait(scope)


def _filled(kernels: Sequence[_Kernel]) -> Iterator[list[_Kernel]]:
    file: list[_Kernel] = []
    for kernel in kernels:
        file.append(kernel)
        if sum(len(each.code) for each in file) >= _FILE_CHARACTERS:
            yield file
            file = []
    if file:
        yield file


def several_kernels_a_file() -> contextlib.AbstractContextManager[Any]:
    """Have modules that are loaded in this context compile their kernels so; each has a file where torch calls them otherwise."""
    if not CppFile.is_known():
        return contextlib.nullcontext()
    return mock.patch.object(inductor_async_compile, "AsyncCompile", KernelFiles)
