"""Importing this leaves out what torch does after each compile for its logs: a quarter of the time that a small graph takes."""

from __future__ import annotations

import gc

from torch._dynamo import config, guards

guards.profile_guard_manager = lambda *_: 0.0  # it empties the processor's caches and times the guards, for a log
config.run_gc_after_compile = False
gc.set_threshold(700, 10, 100)  # of a million modules, functions and constants hardly any are ever freed
