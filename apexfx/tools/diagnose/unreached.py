"""Calls of `torch.compile` in the script's source that were asked for, by an option that is True, and not reached."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import currentframe
from types import FrameType
from typing import Any

import torch
from torch import nn

from . import places
from .constructors import Constructed
from .places import Place

_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Unreached:
    """A call of `torch.compile` that never happened, and the option that asks for it."""

    place: Place
    option: str


def live_scopes() -> list[Mapping[str, Any]]:
    """Return the variables of the user's functions that are being executed, innermost first, and of their modules."""
    scopes: list[Mapping[str, Any]] = []
    frame: FrameType | None = currentframe()
    while frame is not None:
        if places.is_of_user(frame.f_code.co_filename):
            scopes += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    return scopes


def unreached_compiles(constructed: Constructed, scopes: list[Mapping[str, Any]]) -> list[Unreached]:
    """Return the calls that an option asks for, in the files that these variables belong to, and which did not happen."""
    reached = {note.place for note in constructed.compiled}
    files = {scope["__file__"] for scope in (*scopes, *_modules_of_script(constructed)) if isinstance(scope.get("__file__"), str)}
    unreached = []
    for file in sorted(filter(places.is_of_own_files, files)):
        tree = places.parsed(file)
        for scope, call in _compile_calls(tree):
            lines = range(call.lineno, call.end_lineno + 1)
            if any(place is not None and place.file == file and place.line in lines for place in reached):
                continue
            if (option := next((each for each in _options(tree, scope) if _is_true(each, scopes)), None)) is not None:
                unreached.append(Unreached(Place(file, call.lineno), ast.unparse(option)))
    return unreached


def trained_module(parameters: Iterable[torch.Tensor], scopes: list[Mapping[str, Any]]) -> nn.Module | None:
    """Return the smallest module among variables, or among what those hold, that has all of these parameters."""
    trained = {id(p) for p in parameters}
    values = [value for scope in scopes for value in list(scope.values())]
    values += [inner for value in values for inner in list(getattr(value, "__dict__", {}).values())]
    modules = {id(value): value for value in values if issubclass(type(value), nn.Module)}.values()
    whole = [module for module in modules if trained <= {id(p) for p in module.parameters()}]
    return min(whole, key=lambda module: len(list(module.modules())), default=None)


def _modules_of_script(constructed: Constructed) -> list[Mapping[str, Any]]:
    return [vars(module) for name, module in list(sys.modules.items())
            if name not in constructed.modules_before and isinstance(getattr(module, "__file__", None), str)]


def _compile_calls(tree: ast.Module) -> Iterator[tuple[_Scope, ast.Call]]:
    """Yield calls of `torch.compile`, or of what was imported as such, with the innermost function around each, or the module."""
    names = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "torch"
             for alias in node.names if alias.name == "compile"}
    modules = {(alias.asname or alias.name).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
               for alias in node.names} - {"torch"}

    def walk(node: ast.AST, scope: _Scope) -> Iterator[tuple[_Scope, ast.Call]]:
        inner = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else scope
        if isinstance(node, ast.Call):
            function = node.func
            is_method = _last_name(function) == "compile" and isinstance(function, ast.Attribute)
            if isinstance(function, ast.Name) and function.id in names:
                yield scope, node
            elif is_method and ast.unparse(function.value) not in modules:
                yield scope, node
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    yield from walk(tree, tree)


def _options(tree: ast.Module, scope: _Scope) -> Iterator[ast.expr]:
    """Yield what conditions in a scope read that has "compile" in its name, directly or by a variable assigned from it."""
    tests = [node.test for node in ast.walk(scope) if isinstance(node, (ast.If, ast.IfExp))]
    names = {node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)}
    tests += [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets
              if isinstance(target, ast.Name) and target.id in names]
    for test in tests:
        for node in ast.walk(test):
            if "compile" in _last_name(node):
                yield node


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_true(option: ast.expr, scopes: list[Mapping[str, Any]]) -> bool:
    """Whether an option is True, looked up by name in the variables, or as an attribute of what they hold."""
    for scope in scopes:
        if (value := _look_up(option, scope)) is not None:
            return value is True
    name = _last_name(option)
    held = [value for scope in scopes for value in list(scope.values())]
    return any(_held(value, name) is True for value in held)


def _look_up(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, (ast.Attribute, ast.Subscript)) and (owner := _look_up(node.value, scope)) is not None:
        return _held(owner, _last_name(node))
    return None


def _held(owner: Any, name: str) -> Any:
    """Return an instance's own attribute, or a dictionary's item; no code of the script's runs."""
    held = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    return held.get(name) if name in held else vars(type(owner)).get(name) if not isinstance(owner, (dict, type)) else None
