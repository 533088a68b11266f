"""torch.compile(backend="apex"), and the report of what was compiled last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from .compiler.graph_breaks import note_breaks
from .compiler.pipeline import warn_unmatched
from .compiler.process_groups import Groups
from .config import TransformConfig
from .report.data import Report

if TYPE_CHECKING:
    from .compiler.graph_compiler import GraphCompiler

log = logging.getLogger(__name__)


_last_report: Report | None = None


def apex(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
         options: dict[str, Any] | None = None, **_: Any) -> Callable[..., Any]:
    """The `torch.compile` backend "apex"; `options` are the keywords of `apexfx.transform`.

    Found by torch through the package's entry point: import nothing, write `torch.compile(model, backend="apex")`.

    Each call of `torch.compile` has one report, `last_report()`.

    A backend is shown graphs, and the model only as their inputs: `ddp` and `methods` are `transform()`'s.
    """
    from ._torch_compilers import compiling_backend, graph_breaks_around
    from .compiler.progress import PROGRESS, captured

    if mode is not None:
        raise ValueError(f"apexfx: mode={mode!r} belongs to backend='inductor'; the backend 'apex' takes options={{...}}, "
                         "among them 'inner_options', for what torch._inductor.list_mode_options(mode) returns")
    compiler = _compiler_of(compiling_backend(), options)
    breaks = graph_breaks_around(gm)
    with PROGRESS.compiling(captured(gm)):
        compiled = compiler(gm, example_inputs)
    _note_breaks(compiler, breaks)
    warn_unmatched(compiler.report, " so far")  # a graph break may be followed by graphs that have something for the pass
    return compiled


def _note_breaks(compiler: GraphCompiler, breaks: Sequence[str]) -> None:
    """Note what runs in eager between graphs, and warn where that loses something that was asked for."""
    config = compiler.config
    asks_for_passes = config.level.casts or config.precision or config.sync_bn or config.passes
    for reason in breaks:
        advice = "; apexfx.transform() holds torch.nn.LSTM, GRU and RNN in its graphs" if "LSTM" in reason else ""
        note_breaks(compiler.report, f": {reason}", advice, loses=bool(asks_for_passes))


def _compiler_of(backend: Any, options: dict[str, Any] | None) -> GraphCompiler:
    """Return the compiler of one call of `torch.compile`, for which `backend` stands: it lives as long as the compiled model."""
    compiler = getattr(backend, "_apexfx_compiler", None)
    if compiler is not None:
        return compiler
    if (options or {}).get("ddp"):  # before it asks for a process group
        raise ValueError("apexfx: ddp= belongs to apexfx.transform(), which is given the model; torch.compile() shows a backend "
                         "graphs alone")
    config = TransformConfig.from_options(options)
    if config.methods:
        raise ValueError("apexfx: methods= belongs to apexfx.transform(); give torch.compile(model.method, backend='apex') a "
                         "method")
    compiler = compiler_for(config)
    if hasattr(backend, "compiler_name"):  # made by torch.compile(), which holds the options too
        backend._apexfx_compiler = compiler
    return compiler


def compiler_for(config: TransformConfig) -> GraphCompiler:
    """Return the compiler of a new model, with a new report that becomes `last_report()`."""
    from .compiler.graph_compiler import make_compiler

    global _last_report
    groups = Groups(config)
    compiler = make_compiler(config, groups)
    if config.sync_bn and groups.batch_norm is None:
        message = "apexfx: sync_bn=True without a process group: batch norm uses the batch of this one process"
        compiler.report.note(message)
        log.info(message)
    if config.ddp and groups.gradients is None:  # only a model unpickled where there is no group gets here
        compiler.report.warn("apexfx: ddp was asked for and there is no process group: gradients stay this process's own")
    _last_report = compiler.report
    return compiler


def last_report() -> Report:
    """Return the report of the model transformed, or compiled with `backend="apex"`, last."""
    if _last_report is None:
        raise RuntimeError("apexfx: nothing was transformed yet; call apexfx.transform(model, ...) or compile a model with "
                           'torch.compile(model, backend="apex") and run it once')
    return _last_report
