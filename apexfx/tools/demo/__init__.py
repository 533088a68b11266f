"""The demo: a residual network learns handwritten digits on several ranks, in rewritten graphs that it prints.

Read order: `data.py`, `model.py`, `train.py` (one rank), `launch.py` (all of them, and the verdict).
"""

from __future__ import annotations

NEEDS = {"sklearn": "scikit-learn"}  # module -> the package that has it
