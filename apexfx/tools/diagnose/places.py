"""Where in the user's code something happens."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sysconfig
from dataclasses import dataclass
from inspect import currentframe
from pathlib import Path
from types import FrameType

import torch

_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NOT_THE_USERS = (_TORCH, os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep, "<")
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, order=True)
class Place:
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        path = Path(self.file)
        return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{self.line}"

    @property
    def code(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.line).strip()


def is_of_user(file: str) -> bool:
    """Return whether a file is neither torch's, nor this package's, nor Python's, nor generated code."""
    if file.startswith(_NOT_THE_USERS) or "torchinductor_" in file:
        return False
    return file.startswith(_SITE) or not file.startswith(_STDLIB)


def here() -> Place | None:
    """Return the innermost line of the user's that is being executed, or None."""
    frame = user_frame()
    return Place(os.path.abspath(frame.f_code.co_filename), frame.f_lineno) if frame is not None else None


def user_frame() -> FrameType | None:
    """Return the innermost frame that executes a file of the user's, or None."""
    frame: FrameType | None = currentframe()
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_below_torch(*folders: str) -> bool:
    """Return whether the user's line has called torch's own code in one of these folders, other than weight averaging."""
    prefixes = tuple(os.path.join(_TORCH, folder) for folder in folders)
    frame: FrameType | None = currentframe()
    while frame is not None and not is_of_user(file := frame.f_code.co_filename):
        if file.startswith(prefixes) and not file.endswith("swa_utils.py"):
            return True
        frame = frame.f_back
    return False


def loop_around(place: Place) -> tuple[int, int]:
    """Return first and last line of the innermost loop around a line, but for a training loop; else of the line."""
    nodes = (node for node in ast.walk(parsed(place.file)) if isinstance(node, _LOOPS))
    loops = [(node.lineno, node.end_lineno) for node in nodes if not _trains(node)]
    return min((lines for lines in loops if lines[0] <= place.line <= lines[1]), key=lambda lines: lines[1] - lines[0],
               default=(place.line, place.line))


def _trains(loop: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in ("backward", "step", "zero_grad") for node in ast.walk(loop))


@functools.cache
def parsed(file: str) -> ast.Module:
    """Return a file's syntax tree, an empty one where it cannot be read."""
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):  # compiled from a text that is no file
        return ast.Module(body=[], type_ignores=[])

