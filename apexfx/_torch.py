"""The only importer of torch's private names.

Each name is followed by the torch versions on which it was checked; `tests/test_torch_names.py`
fails, naming the line, when a torch release moves one of them.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives  # noqa: F401  registers autograd and fakes for _c10d_functional
from torch._dynamo import config as dynamo_config  # 2.11, 2.13, 2.15
from torch._dynamo.backends.common import aot_autograd  # 2.11, 2.13, 2.15
from torch._dynamo.exc import BackendCompilerFailed  # 2.11, 2.13, 2.15
from torch._functorch import config as functorch_config  # 2.11, 2.13, 2.15
from torch._functorch._aot_autograd.descriptors import (  # 2.11, 2.13, 2.15
    GradAOTOutput,
    PlainAOTInput,
)
from torch._inductor import config as inductor_config  # 2.11, 2.13, 2.15
from torch._inductor.compile_fx import compile_fx  # 2.11, 2.13, 2.15
from torch._inductor.custom_graph_pass import CustomGraphPass  # 2.11, 2.13, 2.15
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir  # 2.11, 2.13, 2.15
from torch._logging import trace_structured  # 2.11, 2.13, 2.15
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # 2.11, 2.13, 2.15
from torch.distributed.distributed_c10d import (  # 2.11, 2.13, 2.15
    _get_process_group_store as process_group_store,
    _resolve_process_group as resolve_process_group,
)
from torch.fx.experimental.symbolic_shapes import (  # 2.11, 2.13, 2.15
    free_unbacked_symbols,
    statically_known_true,
)
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # 2.11, 2.13, 2.15
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map  # 2.11, 2.13, 2.15


def active_ddp_module() -> object | None:
    """Return the `DistributedDataParallel` whose forward is running, or None (2.11, 2.13, 2.15)."""
    return DistributedDataParallel._active_ddp_module


def has_kernel(op: str, key: str) -> bool:
    """Tell whether `op` ("namespace::name") has a kernel of its own for a dispatch key (2.11, 2.13, 2.15)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def registered_ops(namespace: str) -> list[str]:
    """Return the names ("namespace::name") of every op of a namespace, sorted (2.11, 2.13, 2.15)."""
    names = (name.split(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return sorted({name for name in names if name.startswith(f"{namespace}::")})


__all__ = [
    "BackendCompilerFailed",
    "BatchNorm",
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "PlainAOTInput",
    "active_ddp_module",
    "aot_autograd",
    "compile_fx",
    "dynamo_config",
    "free_unbacked_symbols",
    "functorch_config",
    "has_kernel",
    "inductor_cache_dir",
    "inductor_config",
    "process_group_store",
    "registered_ops",
    "resolve_process_group",
    "statically_known_true",
    "trace_structured",
    "tree_leaves",
    "tree_map",
]
