"""Keys that make torch's compile caches see our passes, and the reports kept beside their entries.

AOTAutograd's cache is keyed by the graph Dynamo captured and by the `uuid()` of the custom pass; neither knows the source
of a pass, of an op's Python body, or the world size. All of that goes into the uuid. On a hit no pass runs, so what the
passes reported is stored in a file of the same key, which travels with the entries in torch's portable caches.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout
from torch import fx

from .._torch import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
from ..graph.nodes import graphs
from ..graph.printing import format_graph
from ..passes.base import Pass
from ..ranks import num_ranks
from ..report.records import StageReport, stage_from_json, stage_to_json
from .progress import PROGRESS

log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def package_digest() -> str:
    """Return a hash over every source file and compiled library of this package."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.so")]):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pass_digest(pass_: Pass) -> str | None:
    """Return a hash of a pass's options and, of a user's, of its source; None when either cannot be read.

    What it calls counts where it is loaded and in a module of the same top-level package; of others it does not.
    A pass that does not override `options()` counts with its attributes: one forgotten would be a stale cache hit.
    The source of our own is in `package_digest`.
    """
    options, package = pass_.options(), type(pass_).__module__.partition(".")[0]
    is_own = package == __name__.partition(".")[0]
    if type(pass_).options is Pass.options or not is_own and "options" not in vars(type(pass_)):
        options = {**options, **{name: option for name, option in vars(pass_).items() if name != "matches"}}
    try:
        source = b"" if is_own else _source(type(pass_), Pass).encode() + _package(package)
        return hashlib.sha256(f"{type(pass_)} {json.dumps(options, sort_keys=True)}".encode() + source).hexdigest()
    except (OSError, TypeError):
        return None


def source_digest(cls: type, base: type, more: str = "") -> str:
    """Return a hash of the source of a user's class below `base`, and of `more`; where it cannot be read, one as no other has."""
    try:
        source = _source(cls, base) + more
    except (OSError, TypeError):  # a class of a notebook, which may be written anew under its name
        source = uuid4().hex
    return hashlib.sha256(source.encode()).hexdigest()


def _source(cls: type, base: type) -> str:
    """Return the text of whole files: a class calls its neighbours."""
    return "".join(Path(inspect.getfile(each)).read_text() for each in cls.__mro__[: cls.__mro__.index(base)])


def _package(name: str) -> bytes:
    """Return what is in the files of all modules of a top-level package that are loaded."""
    loaded = [getattr(module, "__file__", None) for each, module in sorted(sys.modules.items()) if each.partition(".")[0] == name]
    return b"".join(Path(file).read_bytes() for file in loaded if file)


def uuid(config: dict[str, Any], passes: Sequence[Pass], facts: dict[str, Any]) -> str | None:
    """Return the cache key of a schedule, or None (bypass the cache) when a user pass has no readable source.

    Args:
        config: `TransformConfig.describe()`.
        passes: all that are to run, user passes included, as they are before any has.
        facts: what else the result depends on: world size, group, sync flag, the names of the inputs.
    """
    digests = [pass_digest(p) for p in passes]
    if None in digests:
        return None
    text = json.dumps([package_digest(), config, digests, facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def graph_key(uuid_: str, gm: fx.GraphModule) -> str:
    """Return the key of the report that belongs to `gm` (after its forward passes) compiled under `uuid_`."""
    text = "\n".join(format_graph(graph) for graph in graphs(gm))
    return hashlib.sha256((uuid_ + text).encode()).hexdigest()


@contextlib.contextmanager
def compiled_by_one_rank(key: str | None) -> Iterator[None]:
    """Have one rank of a host compile, in this context, what several are about to; the others find it in Inductor's cache.

    The one is who comes first. The others wait until it has compiled, has failed, or is dead, which ends its hold on a file.

    Args:
        key: of what is compiled, the same on every rank; None where no cache keeps it.
    """
    with contextlib.ExitStack() as held:
        if key is not None and num_ranks() > 1:
            path = _path(key).with_suffix(".lock")
            with contextlib.suppress(OSError, NotImplementedError):  # no file can be written or locked there: each compiles
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = FileLock(path)
                try:
                    held.enter_context(lock.acquire(blocking=False))
                except Timeout:
                    PROGRESS.enter("waiting for another rank of this host, which compiles the same graph")
                    with lock:
                        log.info("another rank has compiled this graph")
        yield


def _path(key: str) -> Path:
    from .._torch_compilers import inductor_cache_dir

    return Path(inductor_cache_dir()) / "apexfx" / f"{key}.json"


@CacheArtifactFactory.register
class PortableReport(CacheArtifact):
    """The file of a report in what `torch.compiler.save_cache_artifacts()` returns."""

    @staticmethod
    def type() -> str:
        return "apexfx_report"

    def populate_cache(self) -> None:
        _write(self.key, self.content)


def save_stage(key: str, stage: StageReport) -> None:
    """Keep a backward stage's report beside the cache entry it belongs to. A full disk loses only the report."""
    content = json.dumps(stage_to_json(stage)).encode()
    CacheArtifactManager.record_artifact(PortableReport.type(), key, content)
    _write(key, content)


def save_verdict(entry: str, code: str, verdict: str) -> None:
    """Keep beside an entry of Inductor's cache what came of comparing its code with its graph: no fault.

    Args:
        code: the source; an entry has several, for sizes that differ.
        verdict: what a report is to say of it.
    """
    key, content = _verdict(entry, code), json.dumps(verdict).encode()
    CacheArtifactManager.record_artifact(PortableReport.type(), key, content)
    _write(key, content)


def load_verdict(entry: str, code: str) -> str | None:
    """Return the verdict that was kept of some code, in any process, or None."""
    try:
        content = _path(_verdict(entry, code)).read_bytes()
        verdict = str(json.loads(content))
    except (OSError, ValueError):
        return None
    CacheArtifactManager.record_artifact(PortableReport.type(), _verdict(entry, code), content)
    return verdict


def _verdict(entry: str, code: str) -> str:
    return f"{entry}.{hashlib.sha256(code.encode()).hexdigest()[:16]}.proof"


def _write(key: str, content: bytes) -> None:
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError as error:
        log.info("the report of the backward passes could not be kept at %s: %s", path, error)


def load_stage(key: str) -> StageReport | None:
    """Return the report kept under `key`, or None."""
    try:
        content = _path(key).read_bytes()
        stage = stage_from_json(json.loads(content))
        CacheArtifactManager.record_artifact(PortableReport.type(), key, content)
        return stage
    except (OSError, ValueError, KeyError, TypeError):
        return None
