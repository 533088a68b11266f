"""An import finder that gives this package's modules under Apex's names."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .names import ALTERNATIVES, MODULES, REMOVED_BY_NVIDIA, alternative, resolve

SHIM = str(Path(__file__).parent / "shim")
_EAGER = ("apex.amp", "apex.fp16_utils", "apex.multi_tensor_apply", "apex.normalization", "apex.optimizers", "apex.parallel")
_TOP = ("amp_C", "apex_C", *(name for name in ALTERNATIVES if "." not in name))


def install(*, force: bool = False) -> str:
    """Make `import apex` mean this package; return what was done.

    Where NVIDIA's Apex with amp is installed, nothing happens ("nvidia") unless `force`. Where NVIDIA's is there without
    amp, only what it lost is added ("added"). Where there is none, or the unrelated package of the same name that PyPI
    has, every name is ours ("installed"). A second call changes nothing.

    Raises:
        RuntimeError: another `apex` was imported already, so that its name is taken.
    """
    finder = _installed()
    if finder is not None:
        return finder.what
    installed = "none" if force else _what_is_there()
    if installed == "nvidia":
        return installed
    if installed != "without amp" and "apex" in sys.modules and not _is_ours(sys.modules["apex"]):
        raise RuntimeError(f"apexfx.compat: {sys.modules['apex']!r} was imported already; call install() before `import apex`")
    finder = _ApexFinder(None if installed != "without amp" else REMOVED_BY_NVIDIA)
    sys.meta_path.insert(0, finder)
    if finder.only is None:
        top = sys.modules["apex"] = _top_module()
        for name in _EAGER:
            sys.modules[name] = importlib.import_module(resolve(name) or name)
            setattr(top, name.rpartition(".")[2], sys.modules[name])
        top.optimizers.FP16_Optimizer = top.fp16_utils.FP16_Optimizer  # where scripts of 2019 import it from
    _alias_submodules(_EAGER if finder.only is None else finder.only)
    return finder.what


def uninstall() -> None:
    """Take the names back."""
    finder = _installed()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    if finder.only is None:
        del sys.modules["apex.optimizers"].FP16_Optimizer
    for name, module in list(sys.modules.items()):
        if (name == "apex" or name.startswith("apex.") or name in _TOP) and _is_ours(module):
            del sys.modules[name]


def _installed() -> _ApexFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _ApexFinder)), None)


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, "__apexfx__", False) or module.__name__.startswith("apexfx")


def _what_is_there() -> str:
    """Return "nvidia", "without amp", "impostor" or "none", by looking at files only."""
    path = [entry for entry in sys.path if entry != SHIM]
    spec = importlib.machinery.PathFinder.find_spec("apex", path)
    if spec is None or not spec.submodule_search_locations:
        return "none" if spec is None else "impostor"
    folders = [Path(folder) for folder in spec.submodule_search_locations]

    def has(name: str) -> bool:
        return any((folder / name).is_dir() for folder in folders)

    if has("amp"):
        return "nvidia"
    return "without amp" if has("normalization") and has("optimizers") else "impostor"


def _top_module() -> ModuleType:
    module = ModuleType("apex", "NVIDIA Apex's names, provided by apexfx.")
    module.__path__ = []
    module.__apexfx__ = True
    module.__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]
    module.__spec__ = importlib.machinery.ModuleSpec("apex", None, is_package=True)
    module.__version__ = "0.1"
    module.DeprecatedFeatureWarning = DeprecatedFeatureWarning
    module.__getattr__ = functools.partial(_missing, "apex")
    return module


class DeprecatedFeatureWarning(FutureWarning):
    """What Apex gave before it removed amp, for scripts that filter it; never given here."""


def _missing(package: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    raise AttributeError(_message(f"{package}.{name}"))


def _message(name: str) -> str:
    return f"apexfx.compat provides no {name!r}; use {alternative(name)}"


def _alias_submodules(packages: Sequence[str]) -> None:
    """Put the submodules that our packages have imported under Apex's names too.

    Left to the import system, it would write each into its package's attributes: `amp._amp_state`, the state object, and
    `parallel.LARC`, the class, would become modules.
    """
    for package in packages:
        ours = resolve(package) or package
        importlib.import_module(ours)
        for name in [name for name in sys.modules if name.startswith(f"{ours}.")]:
            sys.modules[package + name.removeprefix(ours)] = sys.modules[name]


class _ApexFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Apex's modules here. `only` limits it to some packages, where the rest of Apex is installed."""

    def __init__(self, only: Sequence[str] | None) -> None:
        self.only = only
        self.what = "installed" if only is None else "added"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("apexfx."):
            # `from apex.amp import wrap` looks for a submodule of the package that stands there.
            theirs = "apex." + fullname.removeprefix("apexfx.")
            if theirs in ALTERNATIVES and self._mine(theirs):
                raise ModuleNotFoundError(_message(theirs))
            return None
        if not self._mine(fullname):
            return None
        if fullname == "apex.contrib" and self.only is None:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        ours = resolve(fullname)
        if ours is not None and _exists(ours):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=False)
        if "." not in fullname and importlib.machinery.PathFinder.find_spec(fullname) is not None:
            return None  # an extension that was built by itself
        # Without `name=`: `from apex import RNN` would take it for a name that is not there, and drop the message.
        raise ModuleNotFoundError(_message(fullname))

    def _mine(self, name: str) -> bool:
        if self.only is not None:
            return any(name == package or name.startswith(f"{package}.") for package in self.only)
        return name.startswith("apex.") or name in _TOP

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__apexfx__ = True
        return module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in MODULES or resolve(name) is not None:
            sys.modules[name] = importlib.import_module(resolve(name) or name)
        else:
            module.__path__ = []
            module.__getattr__ = functools.partial(_missing, name)


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
