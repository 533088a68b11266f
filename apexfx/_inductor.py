"""Private names of Inductor that come with all of its lowerings, a second of importing: import this where code is made."""

from __future__ import annotations

import torch
from torch._inductor import ir, lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.debug import reset_provenance_globals as keep_kernels  # without it, a graph that is compiled later has none
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V as state
from torch._inductor.virtualized import ops


def computes_channels_last(gm: torch.fx.GraphModule) -> bool:
    """Return whether Inductor computes the convolutions of a graph without a backward channels_last, whatever its strides."""
    return GraphLowering.decide_layout_opt(gm, is_inference=True)
