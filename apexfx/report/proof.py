"""What came of comparing the code of a graph with the graph, op by op, at its first call: the table of `report.proof()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from ..graph.printing import count_text

_MAX_ROWS = 12  # of a graph, those that are farthest off


@dataclass(frozen=True)
class TensorProof:
    """A tensor that leaves a graph, or that its code hands to an op: how far the code has it off, over its size.

    Attributes:
        name: "gradient of 0.weight", "change of 0.weight", "output 3".
        code: the error of the code, norm over norm; its distance from the ops where `ops` is None.
        ops: the error of the graph, op by op, in its own dtypes; where the code was suspected, the largest on inputs a rounding
            away. None where the code is so near to the ops that nothing was computed in float64.
        worst_code, worst_ops: the same of the element that is farthest off, over the largest.
        is_wrong: whether the code is too far off.
    """

    name: str
    code: float
    ops: float | None
    worst_code: float
    worst_ops: float | None
    is_wrong: bool = False


@dataclass(frozen=True)
class Proof:
    """The comparison of a graph's code with the graph.

    Attributes:
        stage: "step", "forward" or "backward".
        rows: a tensor each.
        seconds: that it took.
        note: why there is none, or by whom; "" otherwise.
        fault: what the warning says of code that is wrong; "" otherwise.
    """

    stage: str
    rows: tuple[TensorProof, ...] = ()
    seconds: float = 0.0
    note: str = ""
    fault: str = ""

    def __str__(self) -> str:
        if self.note:
            return self.note
        worst = max(self.rows, key=lambda row: row.code, default=None)
        if self.fault or worst is None:
            return self.fault or "code proved: it gives no tensor"
        off = "from the ops" if worst.ops is None else \
            f"off, {f'{worst.code / worst.ops:.1f} times the error of the ops' if worst.ops else 'where the ops have none'}"
        return f"code proved: {count_text(len(self.rows), 'tensor')}, worst {worst.code:.1e} of its size {off}, {worst.name}"

    def to_json(self) -> dict[str, Any]:
        """Return the proof as JSON-able values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Proof:
        """Read what `to_json` returned."""
        return cls(**{**row, "rows": tuple(TensorProof(**each) for each in row["rows"])})


def proof_text(proofs: Sequence[tuple[int, Proof]]) -> str:
    """Return the table of all graphs, each given with its number."""
    lines = []
    for index, proof in proofs:
        lines.append(f"graph {index}, {proof.stage}: {proof}")
        rows = sorted(proof.rows, key=lambda row: (not row.is_wrong, -row.code))
        if rows and rows[0].ops is None:
            table = [(row.name, f"{row.code:.1e}", f"{row.worst_code:.1e}") for row in rows[:_MAX_ROWS]]
            lines.append(tabulate(table, headers=("tensor", "from the ops", "worst element"), disable_numparse=True))
        elif rows:
            table = [("wrong" if row.is_wrong else "", row.name, f"{row.code:.1e}", f"{row.ops:.1e}", f"{row.worst_code:.1e}",
                      f"{row.worst_ops:.1e}") for row in rows[:_MAX_ROWS]]
            headers = ("", "tensor", "code", "ops", "worst element, code", "ops")
            lines.append(tabulate(table, headers=headers, disable_numparse=True))
        if rows[_MAX_ROWS:]:
            lines.append(f"and {count_text(len(rows) - _MAX_ROWS, 'tensor')} that are nearer")
    return "\n".join(lines) or "no code was compared: nothing was compiled, or verify='off' was given"
