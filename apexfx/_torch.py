"""The only importer of torch's private names.

Each name is followed by the torch versions on which it was checked; `tests/test_torch_names.py`
fails, naming the line, when a torch release moves one of them.
"""

from __future__ import annotations

import torch.distributed._functional_collectives  # noqa: F401  registers autograd and fakes for _c10d_functional
from torch._dynamo.backends.common import aot_autograd  # 2.11, 2.13, 2.15
from torch._functorch._aot_autograd.descriptors import (  # 2.11, 2.13, 2.15
    GradAOTOutput,
    PlainAOTInput,
)
from torch._inductor.custom_graph_pass import CustomGraphPass  # 2.11, 2.13, 2.15
from torch._logging import trace_structured  # 2.11, 2.13, 2.15
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # 2.11, 2.13, 2.15
from torch.distributed.distributed_c10d import (  # 2.11, 2.13, 2.15
    _get_process_group_store as process_group_store,
    _resolve_process_group as resolve_process_group,
)

__all__ = [
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "PlainAOTInput",
    "aot_autograd",
    "process_group_store",
    "resolve_process_group",
    "trace_structured",
]
