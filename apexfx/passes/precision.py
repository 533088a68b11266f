"""Mixed precision as cast nodes: O0-O3 over a captured forward graph."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from ..config import HALVES, OptLevel
from ..graph.marks import CAST_ROW, KIND, NAME, OF_STEP
from ..graph.mutation import bodies
from ..graph.nodes import fake_mode, module_paths, op_name, source_line, value
from ..graph.op_names import canonical_name
from ..graph.printing import first_names
from ..precision.casts import CastRow, dtype_of
from ..precision.policy import Policy, and_above
from ..precision.rules import RULES
from ..report.records import Artifacts
from .base import Pass
from .cast_inserter import CastInserter, autocast_region, device_types
from .model_casts import cast_entries

log = logging.getLogger(__name__)

_CAST = sorted(name for name, rule in RULES.items() if rule.kind != "passthrough")


class Precision(Pass):
    """Cast per op by rule (O1), or everything once at entry (O2, O3), or halves up to float32 (O0).

    Parameters keep their storage, name and dtype: the cast node is the model's copy, and its backward brings the
    gradient to the parameter's dtype. The outputs keep the dtype the graph was captured with, so that code after a
    graph break meets what Dynamo promised it.

    Before:  h: f32 = linear(x: f32, weight: f32); y: f32 = softmax(h)
    After:   h: bf16 = linear(_to_copy(x, bf16), _to_copy(weight, bf16)); y: f32 = softmax(_to_copy(h, f32))

    Args:
        level: a row of the O0-O3 table.
        half_dtype: torch.float16 or torch.bfloat16.
        overrides: module path pattern or op name -> dtype; see `Policy`.
    """

    name = "precision"
    stage = "forward"
    numeric = "changes_dtype"

    def __init__(
        self, *, level: OptLevel, half_dtype: torch.dtype, overrides: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if half_dtype not in HALVES:
            raise ValueError(f"apexfx: half_dtype={half_dtype} was given, expected torch.float16 or torch.bfloat16")
        self.policy = Policy(level, half_dtype, overrides or {})
        self.rows: list[CastRow] = []
        self.uncovered: dict[str, str] = {}
        self.remarks: list[str] = []
        self.left_alone = ""
        self.not_cast: list[fx.Node] = []

    def begin(self) -> None:
        super().begin()
        self.rows, self.uncovered, self.remarks = [], {}, []

    def call(self, gm: fx.GraphModule) -> PassResult:
        level = self.policy.level
        if level.casts:
            _refuse_autocast(gm)
        before = len(self.rows)
        mode = fake_mode(gm.graph)
        captured = {node: value(node) for body in bodies(gm) for node in body.graph.nodes}
        missed = self._missed(captured)
        casts = CastInserter(gm, self.policy, self.add_row, captured, mode)
        if not level.patch_ops:
            entries = cast_entries(gm, self.policy, self.add_row, mode)
            captured.update({node: captured[original] for node, original in entries.items()})
            casts.changed.update(entries)
        casts.rewrite(gm)
        casts.restore_outputs(gm)
        self._find_uncovered(captured, missed)
        self.left_alone, self.not_cast = _left_alone(gm, level), casts.not_cast
        if self.left_alone and (self.rows or self._halved_before(gm)):  # otherwise it is why nothing was rewritten
            self.remarks.append(self.left_alone)
        for text in self.remarks:
            log.warning("apexfx: %s", text)
        return PassResult(gm, len(self.rows) > before or casts.edited)

    def _missed(self, nodes: Collection[fx.Node]) -> set[str]:
        """Remark on each override key that covers a module, but not an op that may be the module's; return these keys."""
        missed: dict[str, fx.Node] = {}
        for node in nodes:
            if node.op in ("call_function", "call_method"):
                for key in self.policy.missed(node):
                    missed.setdefault(key, node)
        self.remarks += [
            f"precision[{key!r}] does not reach {op_name(node)} ({source_line(node)}): there a method of a module was called, or "
            "its parameter used, without a call of the module itself, which is all that Dynamo records. Call the module, or "
            "override the op by its name"
            for key, node in missed.items()]
        return set(missed)

    def _find_uncovered(self, nodes: Collection[fx.Node], missed: Collection[str]) -> None:
        """Note the override keys that cover nothing here, with the nearest module path or op name that would."""
        if not (keys := [key for key in self.policy.unused() if key not in missed]):
            return
        paths = {above for node in nodes for path in module_paths(node) for above in and_above(path)}
        ops = {canonical_name(node.target).rstrip("_").rpartition(".")[2] for node in nodes
               if node.op.startswith("call_") and not node.meta.get(OF_STEP)}
        for key in keys:
            asked = key.removesuffix(".*").removeprefix("torch.").removeprefix("F.")
            near = [path for path in sorted(paths) if path.endswith(f".{asked}")] or \
                difflib.get_close_matches(asked, sorted(paths | ops), n=1) or \
                difflib.get_close_matches(asked, () if asked in RULES else _CAST, n=1, cutoff=0.7)
            self.uncovered[key] = (f"precision[{key!r}] covers no module path and no op"
                                   + (f"; did you mean {near[0]!r}?" if near else ""))

    def add_row(self, cast: fx.Node, row: CastRow) -> None:
        """Put an inserted cast into the ledger."""
        self.rows.append(row)
        cast.meta[CAST_ROW] = row
        self.record(cast, f"{row.op}: {row.tensor} {row.source_dtype} -> {row.target_dtype} ({row.rule})")

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        level = self.policy.level
        if not level.casts:
            return None
        if self._halved_before(gm):
            return None
        if self.left_alone:
            return self.left_alone
        floating = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "placeholder")]
        floating = [n for n in floating if dtype_of(n)]
        if not floating:
            return "the graph has no floating tensor of 16, 32 or 64 bits"
        if self.not_cast:
            return (f"all that would be cast is inside of torch.autocast({device_types(value(self.not_cast[0])).pop()!r}, "
                    f"enabled=False), around {source_line(self.not_cast[0])}")
        ops = sorted({op_name(n) for n in floating if n.op != "placeholder"})
        return (f"every op already gets the dtype its rule asks for, or has no rule ({', '.join(ops[:6])}"
                f"{', ...' if len(ops) > 6 else ''})")

    def _halved_before(self, gm: fx.GraphModule) -> bool:
        """Return whether transform() made the parameters and inputs half already."""
        return self.policy.level.half_parameters and any(
            dtype_of(n) in HALVES for n in gm.graph.find_nodes(op="placeholder"))

    def artifacts(self) -> Artifacts:
        return Artifacts(casts=self.rows, uncovered=self.uncovered or None, remarks=self.remarks or None)

    def options(self) -> dict[str, Any]:
        overrides = {k: [r.kind, str(r.dtype)] for k, r in self.policy.overrides.items()}
        return {"level": self.policy.level.summary, "keep_batchnorm_fp32": self.policy.level.keep_batchnorm_fp32,
                "half": str(self.policy.half), "overrides": overrides}


def _left_alone(gm: fx.GraphModule, level: OptLevel) -> str:
    """Name the parameters and buffers whose dtype the level does not cast although it casts others; "" for none."""
    held: dict[torch.dtype, list[str]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        val = value(node)
        if node.meta.get(KIND) in ("param", "buffer") and isinstance(val, Tensor):
            held.setdefault(val.dtype, []).append(node.meta[NAME])
    total, texts = sum(map(len, held.values())), []
    for dtype, names in held.items():
        if dtype == torch.float64 and level.casts or dtype.is_complex and level.cast_model:
            advice = "; call .float() on the model first to have it cast" if dtype == torch.float64 else ""
            texts.append(f"{len(names)} of {total} parameters and buffers are {dtype}, which is left alone "
                         f"({first_names(names, 3)}){advice}")
    return "; ".join(texts)


def _refuse_autocast(gm: fx.GraphModule) -> None:
    """Raise ValueError where torch.autocast would cast what this pass has cast."""
    devices = device_types([value(node) for node in gm.graph.nodes]) - {"meta"}
    ambient = [d for d in sorted(devices) if torch.is_autocast_enabled(d)]
    inner = [n for body in bodies(gm) for n in body.graph.nodes if autocast_region(n) in [(d, True) for d in devices]]
    if ambient or inner:
        where = f"torch.autocast({ambient[0]!r}) is active around the call" if ambient else \
            f"the model or the objective enters torch.autocast({inner[0].args[0]!r}), whose first op is at " + \
            source_line(inner[0].next)
        raise ValueError(f"apexfx: {where}, and opt_level asks for casts too: every op would be cast twice. Leave the "
                         "autocast out, or use opt_level='O0'; torch.autocast(..., enabled=False) regions are fine")
