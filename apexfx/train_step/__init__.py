"""The whole training step as one graph."""

from __future__ import annotations

from .step import TrainStep as TrainStep
from .step import train_step as train_step
