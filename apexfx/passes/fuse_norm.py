"""Layer norm and RMS norm nodes, and RMS norm written out by hand, become one op where its kernel measured faster; so does
the residual add in front of one."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import below_functorch, has_kernel
from ..graph.mutation import bodies
from ..graph.nodes import call, fake_mode, insert_after, size_hint, value
from ..graph.printing import count_text
from ..ops import layer_norm, rms_norm  # noqa: F401  registers the ops
from ..precision.casts import RemovedCast
from ..report.records import Artifacts
from .base import Pass
from .measured_speedups import LEAST_ELEMENTS, RATIO
from .norm_matching import Norm, is_safe, norms, with_casts, with_residual


def is_faster(op: str, x: Tensor) -> bool:
    """Return whether the measured kernel of `op` beats what Inductor makes of torch's, for inputs like `x`.

    A dynamic size counts as what it was when the graph was captured. False inside torch.func's transforms, which batch and
    differentiate torch's norms but do not know the ops.
    """
    if below_functorch(x) is not x or math.prod(map(size_hint, x.shape)) < LEAST_ELEMENTS.get(op, 0):
        return False
    return (op, x.device.type, str(x.dtype).removeprefix("torch.")) in RATIO


class FuseNorm(Pass):
    """Replace norms by apexfx.layer_norm or apexfx.rms_norm where a kernel is registered and measured faster.

    Besides the nodes of torch's own norms, RMS norm as Llama and T5 write it is found, with its casts: the op computes
    in float32 and rounds once, to the dtype the written form ends in. Casts that earlier passes put around a norm go into
    the op, which widens and rounds by itself. So does the residual add in front of a norm (apexfx.add_layer_norm,
    apexfx.add_rms_norm, which return the sum too, for its other users).

    What was not measured to be faster (measured_speedups.py) for the op, device and dtype is left to Inductor. So is an input
    smaller than any that was measured: the kernel loses there. On a CPU, float32, two threads, time(torch) / time(apexfx) of
    (64, 64), (256, 128), (512, 256), (2048, 256) and (2048, 768) was 0.77, 0.77, 0.76, 0.81 and 0.91 for layer norm, 0.82,
    0.77, 0.78, 0.74 and 0.90 for RMS norm.

    Before:  h = x.to(f32); v = h.pow(2).mean(-1, keepdim=True); n = (h * rsqrt(v + 1e-06)).to(bf16); w * n
    After:   apexfx.rms_norm(x, w, 1, 1e-06, bf16)[0]
    """

    name = "fuse_norm"
    stage = "forward"
    numeric = "changes_dtype"  # a written norm in half rounds in between, the op does not

    def begin(self) -> None:
        super().begin()
        self.removed: list[RemovedCast] = []

    def artifacts(self) -> Artifacts:
        return Artifacts(removed_casts=self.removed)

    def call(self, gm: fx.GraphModule) -> PassResult:
        modified = False
        for body in bodies(gm):
            changed = False
            for norm in norms(body.graph):
                norm = with_casts(norm)
                for candidate in (with_residual(norm), norm):
                    if candidate is not None and self._is_faster(candidate) and is_safe(candidate):
                        self._rewrite(candidate)
                        changed = True
                        break
            if changed:
                modified = True
                if body is not gm:
                    body.recompile()
        return PassResult(gm, modified)

    def _is_faster(self, norm: Norm) -> bool:
        x = value(norm.x)
        return is_faster(norm.op, x) and has_kernel(f"apexfx::{_op_name(norm)}", x.device.type.upper())

    def _rewrite(self, norm: Norm) -> None:
        graph, mode = norm.root.graph, fake_mode(norm.root.graph)
        tail = (norm.num_dims, norm.eps) if norm.dtype == value(norm.x).dtype else (norm.num_dims, norm.eps, norm.dtype)
        target = getattr(torch.ops.apexfx, _op_name(norm)).default
        inputs = (norm.x,) if norm.residual is None else (norm.x, norm.residual)
        parameters = (norm.weight, norm.bias) if norm.is_centered else (norm.weight,)
        with graph.inserting_before(norm.root):
            outputs = call(graph, target, (*inputs, *parameters, *tail), like=norm.root, mode=mode)
        with insert_after(outputs):
            y = call(graph, operator.getitem, (outputs, 0), like=norm.root, mode=mode)
        self.record(norm.root, f"{norm.op} -> {target} ({count_text(len(norm.nodes), 'node')})")
        norm.root.replace_all_uses_with(y)
        if norm.residual is not None:
            add = norm.nodes[0]
            with insert_after(y):
                total = call(graph, operator.getitem, (outputs, 1), like=add, mode=mode)
            add.replace_all_uses_with(total, delete_user_cb=lambda user: user not in norm.nodes)
        for node in reversed(norm.nodes):
            if not node.users:
                if "apexfx_cast" in node.meta:
                    self.removed.append(RemovedCast(**vars(node.meta["apexfx_cast"]), removed=f"inside {target}"))
                graph.erase_node(node)


def _op_name(norm: Norm) -> str:
    return ("add_" if norm.residual is not None else "") + ("layer_norm" if norm.is_centered else "rms_norm")
