"""Mixed precision, synchronized batch norm, data parallel and fused optimizers as passes over readable graphs."""

from __future__ import annotations

import importlib
from typing import Any

from .backend import last_report as last_report
from .buckets.plan import BucketPlan as BucketPlan
from .checks.check_loop import LoopCheck as LoopCheck
from .checks.check_loop import check_loop as check_loop
from .checks.check_splits import Splits as Splits
from .checks.check_splits import check_splits as check_splits
from .compare import compare as compare
from .config import BucketConfig as BucketConfig
from .errors import NonFiniteError as NonFiniteError
from .errors import PassError as PassError
from .errors import RankFailureError as RankFailureError
from .errors import RankMismatchError as RankMismatchError
from .errors import ReplicaMismatchError as ReplicaMismatchError
from .errors import UnsynchronizedGradientError as UnsynchronizedGradientError
from .passes.base import Match as Match
from .passes.base import Pass as Pass
from .report import Report as Report
from .train_step import EMA as EMA
from .train_step import Part as Part
from .train_step import Safeguard as Safeguard
from .train_step import Slot as Slot
from .train_step import TrainStep as TrainStep
from .train_step import train_step as train_step
from .train_step.capture_errors import NotOneGraph as NotOneGraph
from .train_step.mean import Mean as Mean
from .transform import transform as transform

__version__ = "0.1.0"

_SUBPACKAGES = ("amp", "compat", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
_MODULES = ("graph", "ops", "buckets")  # for passes of one's own, the ops by themselves, and plans


def __getattr__(name: str) -> Any:  # Apex's packages, when they are reached for: the graphs need none of them
    if name in (*_SUBPACKAGES, *_MODULES):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:  # what is promised; every other module can be imported all the same
    ours = [name for name, item in globals().items() if getattr(item, "__module__", "").partition(".")[0] == __name__]
    return sorted({*(name for name in ours if not name.startswith("_")), *_SUBPACKAGES, *_MODULES, "__version__"})
