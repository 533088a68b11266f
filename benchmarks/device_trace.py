"""What torch.profiler saw of a step: kernels, launches, streams."""

from __future__ import annotations

import gzip
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Event = dict[str, Any]


def events(step: Callable[[], object], device: str, path: Path | None = None) -> list[Event]:
    """Run a step under the profiler, and return the events of its trace.

    Args:
        path: where the trace is kept, a .json.gz for chrome://tracing.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = path or Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(path))
        return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def counts(traced: list[Event]) -> dict[str, int]:
    """Count kernels, copies and fills on the device; launches by the host, and those of them that launch a CUDA graph.

    Without a device, all are 0 but `ops`, those of torch that the host ran.
    """
    kinds = Counter(event.get("cat") for event in traced)
    calls = Counter(event["name"] for event in traced if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    launches = {name: count for name, count in calls.items() if any(kind in name for kind in ("Launch", "Memcpy", "Memset"))}
    return {"kernels": kinds["kernel"], "copies": kinds["gpu_memcpy"] + kinds["gpu_memset"], "launches": sum(launches.values()),
            "graph_launches": sum(count for name, count in launches.items() if "GraphLaunch" in name), "ops": kinds["cpu_op"]}


def streams(traced: list[Event]) -> dict[str, list[str]]:
    """Return stream -> the names of what ran on it."""
    found: dict[str, set[str]] = {}
    for event in traced:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found.setdefault(str(event["args"]["stream"]), set()).add(event["name"][:80])
    return {stream: sorted(names) for stream, names in found.items()}


def host_syncs(step: Callable[[], object]) -> list[str]:
    """Return where a step waits for the device, as torch warns of it; [] without a device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
