"""The statements of a parsed script, and what `migrate` asks of their expressions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

_WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
_EVALUATES = re.compile(r"_*(eval|valid|test|infer|predict|generate|sample)")  # how such a function is called


def statements(tree: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, list[ast.AST], ast.stmt]]:
    """Yield (scope, the statement's own expressions, without those of statements inside of it, statement) in order."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield scope, [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt)], node
        yield from statements(node, node if _opens_scope(node) else scope)


def _opens_scope(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or isinstance(node, ast.With) and is_without_gradients(node)


def is_without_gradients(node: ast.AST) -> bool:
    """Whether a block or function computes no gradients: `with torch.no_grad():`, `@torch.inference_mode()`."""
    managers = [item.context_expr for item in node.items] if isinstance(node, ast.With) else getattr(node, "decorator_list", [])
    functions = [manager.func if isinstance(manager, ast.Call) else manager for manager in managers]
    return any(dotted(function).rpartition(".")[2] in _WITHOUT_GRADIENTS for function in functions)


def is_of_evaluation(node: ast.AST) -> bool:
    """Whether a block or function computes no gradients, or is called as what evaluates."""
    return is_without_gradients(node) or _EVALUATES.match(getattr(node, "name", "")) is not None


def nodes(expressions: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of a statement's own expressions."""
    for expression in expressions:
        if not isinstance(expression, (ast.excepthandler, ast.match_case)):  # they hold statements, which have their own turn
            yield from ast.walk(expression)


def calls(expressions: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """Yield the calls in a statement's own expressions."""
    return (node for node in nodes(expressions) if isinstance(node, ast.Call))


def dotted(node: ast.AST) -> str:
    """Return `self.model` for such an expression, "" for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}" if (owner := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def targets(statement: ast.stmt) -> list[str]:
    """Return the variables that a statement assigns."""
    todo = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return list(filter(None, map(dotted, _flat(todo))))


def _flat(parts: Sequence[ast.AST | None]) -> Iterator[ast.AST]:
    for part in parts:
        if isinstance(part, (ast.Tuple, ast.List)):
            yield from _flat(part.elts)
        elif part is not None:
            yield part


def argument(call: ast.Call, place: int, name: str) -> str:
    """Return an argument's source text, "" where it is not given."""
    words = [word.value for word in call.keywords if word.arg == name]
    return ast.unparse([*words, *call.args[place:place + 1]][0]) if words or len(call.args) > place else ""


def divisor(statement: ast.stmt) -> ast.expr | None:
    """Return n of `loss = ... / n` and `loss /= n`; None where that is computed from a batch, as `mask.sum()` is."""
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.AugAssign):
        return value if isinstance(statement.op, ast.Div) and not any(calls([value])) else None
    return value.right if _divides(value) else None


def dividend(value: ast.expr) -> ast.expr:
    """Return what is divided by such a number."""
    return value.left if _divides(value) else value


def _divides(value: ast.expr | None) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and not any(calls([value.right]))
