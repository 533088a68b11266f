"""Apex's distributed API: data parallel, Reducer, synchronized batch norm, LARC, multiproc. No compilation is needed.

Data parallel in reading order: `distributed` (the module, its `arguments`), `averaging` (what one backward does). What ranks tell
each other is in `apexfx.distributed`.

`averaging` does beside torch's own DDP what Apex's semantics need and a communication hook is not called for: the first backward,
triggers, a second backward of one forward, and a module that is called without its wrapper.
"""

from __future__ import annotations

from torch.distributed import ReduceOp as ReduceOp

from ..errors import RankFailureError as RankFailureError
from .convert import convert_syncbn_model as convert_syncbn_model
from .convert import create_syncbn_process_group as create_syncbn_process_group
from .distributed import DistributedDataParallel as DistributedDataParallel
from .flat import flatten as flatten
from .flat import unflatten as unflatten
from .LARC import LARC as LARC
from .reducer import Reducer as Reducer
from .sync_batchnorm import SyncBatchNorm as SyncBatchNorm
