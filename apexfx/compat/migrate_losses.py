"""Where the losses of a script come from: which statements a step's objective takes over, and what else reads their results."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .migrate_syntax import calls, dividend, divisor, dotted, nodes, targets


@dataclass(frozen=True)
class Loss:
    """What a backward starts from.

    Attributes:
        name: the variable; "" where the backward is that of an expression.
        value: its expression, without the number that it is divided by.
        statements: those that compute it from a batch, the model's calls among them, in order; the last assigns it.
        dividing: those that do nothing but divide it.
        number: what it is divided by in front of the backward, or None.
        read: what these statements assign, the loss apart -> the others that read it, in order.
    """

    name: str
    value: ast.expr
    statements: tuple[ast.stmt, ...]
    dividing: tuple[ast.stmt, ...]
    number: ast.expr | None
    read: dict[str, list[ast.stmt]]


class Losses:
    """The losses of a script. A name has the value of the last assignment above it in its scope.

    Args:
        script: (scope, the statement's own expressions, statement) in order.
        is_model: whether a call is that of a model.
    """

    def __init__(self, script: Sequence[tuple[ast.AST, list[ast.AST], ast.stmt]], is_model: Callable[[ast.Call], bool]) -> None:
        self._is_model = is_model
        self._scopes = {statement: scope for scope, _, statement in script}
        self._expressions = {statement: expressions for _, expressions, statement in script}
        self._places = {statement: place for place, statement in enumerate(self._scopes)}
        self._assigned: dict[tuple[ast.AST, str], list[ast.stmt]] = {}
        for scope, _, statement in script:
            for name in targets(statement):
                self._assigned.setdefault((scope, name), []).append(statement)
        self._depends: dict[ast.stmt, bool] = {}
        self._loops: dict[ast.AST, list[ast.stmt]] = {}  # around a statement
        for loop in self._places:
            if isinstance(loop, (ast.For, ast.AsyncFor, ast.While)):
                for inside in ast.walk(loop):
                    self._loops.setdefault(inside, []).append(loop)

    def of(self, backward: ast.stmt, call: ast.Call) -> Loss | None:
        """Return the loss of `loss.backward()`, `scaler.scale(loss)` or `amp.scale_loss(loss, ...)`; None for another call."""
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method == "backward":
            starts = [call.func.value, *call.args[:1]]  # accelerator.backward(loss)
        elif method in ("scale", "scale_loss") and call.args:
            starts = call.args[:1]
        else:
            return None
        sources = [(start, source) for start in starts if (source := self._source(dotted(dividend(start)), backward)) is not None]
        if sources:
            start, last = next((row for row in sources if self._depends_on_model(row[1])), sources[0])
            name = dotted(dividend(start))
        elif any(map(self._is_model, calls(starts))) or isinstance(starts[0], ast.BinOp) and self._depends_on_model(backward):
            start, last, name = starts[0], backward, ""
        else:
            return None
        number, dividing = start.right if dividend(start) is not start else None, []
        while _divides_only(last, name) and (source := self._source(name, last)) is not None:
            dividing.append(last)
            number, last = divisor(last), source
        value = getattr(last, "value", None) if name else start
        if value is None or isinstance(value, ast.Constant):
            return None
        number = number if number is not None or not name else divisor(last)
        inside = self._computed_by(last)
        read = self._read_elsewhere(name, [*inside, *dividing, backward])
        return Loss(name, dividend(value), tuple(inside), tuple(dividing), number, read)

    def _source(self, name: str, reader: ast.AST) -> ast.stmt | None:
        """Return the statement that assigned what a name has in `reader`."""
        scope = self._scopes[reader]
        assigned = self._assigned.get((scope, name), ())
        above = [statement for statement in assigned if self._places[statement] < self._places[reader]]
        if not above and isinstance(scope, ast.With):
            return self._source(name, scope)
        return above[-1] if above else None

    def _reads(self, statement: ast.stmt) -> list[str]:
        names = [dotted(node) for node in nodes(self._expressions[statement]) if isinstance(getattr(node, "ctx", None), ast.Load)]
        return list(dict.fromkeys([*filter(None, names), *(targets(statement) if isinstance(statement, ast.AugAssign) else ())]))

    def _depends_on_model(self, statement: ast.stmt) -> bool:
        if statement not in self._depends:
            sources = (self._source(name, statement) for name in self._reads(statement))
            self._depends[statement] = any(map(self._is_model, calls(self._expressions[statement]))) or any(
                self._depends_on_model(source) for source in sources if source is not None
                and self._scopes[source] is self._scopes[statement])  # what a block without gradients computes is data
        return self._depends[statement]

    def _computed_by(self, last: ast.stmt) -> list[ast.stmt]:
        inside = [last]
        for statement in inside:
            for source in (self._source(name, statement) for name in self._reads(statement)):
                if source is not None and source not in inside and self._scopes[source] is self._scopes[statement] \
                        and self._depends_on_model(source):
                    inside.append(source)
        return sorted(inside, key=self._places.__getitem__)

    def _read_elsewhere(self, loss: str, own: Sequence[ast.stmt]) -> dict[str, list[ast.stmt]]:
        assigned = {name: statement for statement in own for name in targets(statement) if name != loss}
        read: dict[str, list[ast.stmt]] = {}
        for reader in self._places:
            for name in self._reads(reader) if reader not in own else ():
                if name in assigned and self._reaches(assigned[name], name, reader):
                    read.setdefault(name, []).append(reader)
        return {name: read[name] for name in assigned if name in read}

    def _reaches(self, source: ast.stmt, name: str, reader: ast.stmt) -> bool:
        """Whether `reader` gets what `source` assigns, in this turn of a loop or in the next one."""
        last = self._source(name, reader)
        if last is source or "." in name and self._scopes[reader] is not self._scopes[source]:  # self.output, in any method
            return True
        shared = [loop for loop in self._loops.get(source, ()) if loop in self._loops.get(reader, ())]
        is_next = self._places[reader] < self._places[source] and self._scopes[reader] is self._scopes[source]
        return is_next and any(last is None or loop not in self._loops.get(last, ()) for loop in shared)


def _divides_only(statement: ast.stmt, name: str) -> bool:
    if divisor(statement) is None:
        return False
    return isinstance(statement, ast.AugAssign) or dotted(dividend(statement.value)) == name
