"""torch.compile(backend="apex"), and the report of what was compiled last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ._torch import compiling_backend
from .compiler.graph_compiler import GraphCompiler, Groups, _compiler
from .compiler.pipeline import warn_unmatched
from .config import TransformConfig
from .distributed.agreement import Label
from .report.data import Report

log = logging.getLogger(__name__)


_last_report: Report | None = None


def apex(gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
         options: dict[str, Any] | None = None, **_: Any) -> Callable[..., Any]:
    """The `torch.compile` backend "apex"; `options` are the keywords of `apexfx.transform`.

    Found by torch through the package's entry point: import nothing, write `torch.compile(model, backend="apex")`.

    With `ddp`, what a graph holds is copied from rank 0 before its first run with gradients on, and every such run of a
    graph that trains counts as a training forward, which a backward is to follow on every rank. There is no `no_sync()`:
    each backward averages, which adds up to the same; `transform()` has it.
    """
    if mode is not None:
        raise ValueError(f"apexfx: mode={mode!r} belongs to backend='inductor'; the backend 'apex' takes options={{...}}")
    backend = compiling_backend()  # there is one for every torch.compile(), and it lives as long as the compiled model
    compiler = getattr(backend, "_apexfx_compiler", None) or compiler_for(TransformConfig.from_options(options), "compile")
    if hasattr(backend, "compiler_name"):  # torch.compile()'s, not this function by itself
        backend._apexfx_compiler = compiler
    compiled = compiler(gm, example_inputs)
    warn_unmatched(compiler.report, " so far")  # a graph break may be followed by graphs that have something for the pass
    return compiled


def compiler_for(config: TransformConfig, origin: str = "transform") -> GraphCompiler:
    """Return the compiler of a new model, with a new report that becomes `last_report()`.

    Args:
        origin: how the model came about.
    """
    global _last_report
    groups = Groups(config)
    label = Label(groups.user, origin) if groups.user is not None else ""
    compiler = _compiler(config, groups, label, standalone=origin == "compile")
    if config.sync_bn and groups.batch_norm is None:
        message = "apexfx: sync_bn=True without a process group: batch norm uses the batch of this one process"
        compiler.report.note(message)
        log.info(message)
    if config.ddp and groups.gradients is None:  # only a model unpickled where there is no group gets here
        message = "apexfx: ddp was asked for and there is no process group: gradients stay this process's own"
        compiler.report.note(message)
        log.warning(message)
    _last_report = compiler.report
    return compiler


def last_report() -> Report:
    """Return the report of the model transformed, or compiled with `backend="apex"`, last."""
    if _last_report is None:
        raise RuntimeError("apexfx: nothing was transformed yet; call apexfx.transform(model, ...) or compile a model with "
                           'torch.compile(model, backend="apex") and run it once')
    return _last_report
