"""Mixed precision, synchronized batch norm, data parallel and fused optimizers as passes over readable graphs."""

from __future__ import annotations

import importlib
from typing import Any

from .agreement import RankMismatchError as RankMismatchError
from .backend import last_report as last_report
from .config import BucketConfig as BucketConfig
from .gradient_sync import UnsynchronizedGradientError as UnsynchronizedGradientError
from .pipeline import Match as Match
from .pipeline import Pass as Pass
from .pipeline import PassError as PassError
from .report import Report as Report
from .schedule.plan import BucketPlan as BucketPlan
from .transform import transform as transform

__version__ = "0.1.0"

_SUBPACKAGES = ("amp", "compat", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
_MODULES = ("fx", "ops", "schedule")  # for passes of one's own, the ops by themselves, and steps on paper


def __getattr__(name: str) -> Any:  # Apex's packages, when they are reached for: the graphs need none of them
    if name in _SUBPACKAGES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:  # what is promised; every other module can be imported all the same
    ours = [name for name, item in globals().items() if getattr(item, "__module__", "").partition(".")[0] == __name__]
    return sorted({*(name for name in ours if not name.startswith("_")), *_SUBPACKAGES, *_MODULES, "__version__"})
