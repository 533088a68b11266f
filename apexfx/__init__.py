"""Mixed precision, synchronized batch norm, data parallel and fused optimizers as passes over readable graphs."""

from __future__ import annotations

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
