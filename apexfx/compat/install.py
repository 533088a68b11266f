"""An import finder that gives this package's modules under Apex's names."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .names import ALTERNATIVES, MODULES, REMOVED_BY_NVIDIA, alternative, resolve

SHIM = str(Path(__file__).parent / "shim")
_EAGER = ("apex.amp", "apex.fp16_utils", "apex.multi_tensor_apply", "apex.normalization", "apex.optimizers", "apex.parallel")
_TOP = tuple(name for name in (*MODULES, *ALTERNATIVES) if "." not in name)


def install(*, only: Sequence[str] = (), force: bool = False) -> str:
    """Make `import apex` mean this package; return what was done.

    Where NVIDIA's or ROCm's Apex with amp is installed, nothing happens ("nvidia"). Where NVIDIA's is there without amp, only
    what it lost is added ("added"). Where there is none, or the unrelated package of the same name that PyPI has, every name
    is ours ("installed"), save those of extensions, such as `amp_C`, that are there. A second call changes nothing.

    Args:
        only: the modules to provide, as in `("apex.amp", "amp_C")`. The others are not there, and a script that guards their
            import falls back as it does without Apex; so does one that asks by a bare `import apex`, unless one of `only` is
            in that package.
        force: put what is installed out of sight.

    Raises:
        RuntimeError: another `apex` was imported already, so that its name is taken.
        ValueError: `only` has a name that nothing stands for.
    """
    finder = _installed()
    if finder is not None:
        return finder.what
    unknown = [name for name in only if resolve(name) is None]
    if unknown:
        raise ValueError(f"apexfx.compat.install: only= has {unknown}; there are {', '.join(MODULES)}")
    installed = "none" if force else _what_is_there()
    names = tuple(only) or tuple(MODULES)
    if installed == "without amp":
        names = tuple(name for name in only or REMOVED_BY_NVIDIA if name.startswith(REMOVED_BY_NVIDIA))
    if installed == "nvidia" or not names:
        return "nvidia"
    finder = _ApexFinder(names, "added" if installed == "without amp" else "installed", bool(only), force)
    if finder.has_apex and "apex" in sys.modules and not _is_ours(sys.modules["apex"]):
        raise RuntimeError(f"apexfx.compat: {sys.modules['apex']!r} was imported already; call install() before `import apex`")
    sys.meta_path.insert(0, finder)
    packages = names
    if finder.what == "installed":
        packages = tuple(name for name in _EAGER if finder.provides(name))
    if finder.has_apex:
        top = sys.modules["apex"] = _top_module(finder, packages)
        for name in packages:
            sys.modules[name] = importlib.import_module(resolve(name) or name)
            setattr(top, name.rpartition(".")[2], sys.modules[name])
        if "apex.optimizers" in packages:  # where scripts of 2019 import it from
            top.optimizers.FP16_Optimizer = importlib.import_module("apexfx.fp16_utils").FP16_Optimizer
    _alias_submodules(packages)
    return finder.what


def uninstall() -> None:
    """Take the names back."""
    finder = _installed()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    for name, module in list(sys.modules.items()):
        if (name == "apex" or name.startswith("apex.") or name in _TOP) and _is_ours(module):
            del sys.modules[name]
            if name == "apex.optimizers":
                del module.FP16_Optimizer


def replace_shim(name: str) -> None:
    """Put the module that `name` means in the place of a file in SHIM, whose folder has done its work then."""
    del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry != SHIM]
    install()
    sys.modules[name] = importlib.import_module(name)


def _installed() -> _ApexFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _ApexFinder)), None)


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, "__apexfx__", False) or module.__name__.startswith("apexfx")


def _on_the_path(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of what `name` would be without this package; files are looked at only."""
    return importlib.machinery.PathFinder.find_spec(name, [entry for entry in sys.path if entry != SHIM])


def _what_is_there() -> str:
    """Return "nvidia", "without amp", "impostor" or "none"."""
    spec = _on_the_path("apex")
    if spec is None or not spec.submodule_search_locations:
        return "none" if spec is None else "impostor"
    folders = [Path(folder) for folder in spec.submodule_search_locations]

    def has(name: str) -> bool:
        return any((folder / name).is_dir() for folder in folders)

    if has("amp"):
        return "nvidia"
    return "without amp" if has("normalization") and has("optimizers") else "impostor"


def _top_module(finder: _ApexFinder, packages: Sequence[str]) -> ModuleType:
    module = ModuleType("apex", "NVIDIA Apex's names, provided by apexfx.")
    module.__path__ = []
    module.__apexfx__ = True
    module.__all__ = [name.removeprefix("apex.") for name in packages]
    module.__spec__ = importlib.machinery.ModuleSpec("apex", None, is_package=True)
    module.__version__ = "0.1"
    module.DeprecatedFeatureWarning = DeprecatedFeatureWarning
    module.__getattr__ = functools.partial(finder.attribute, "apex")
    return module


class DeprecatedFeatureWarning(FutureWarning):
    """What Apex gave before it removed amp, for scripts that filter it; never given here."""


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


def _is_asked() -> bool:
    """Whether `importlib.util.find_spec` looks, which returns None for what is not there, and nothing is imported."""
    frame = inspect.currentframe().f_back.f_back
    while frame.f_code.co_filename == "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "importlib.util"


class _ApexFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Apex's modules here: those of `names`, with what is in them and around them."""

    def __init__(self, names: Sequence[str], what: str, is_part: bool, force: bool) -> None:
        self.names = names
        self.what = what
        self.is_part = is_part
        self.force = force
        self.has_apex = what == "installed" and any(name.startswith("apex.") for name in names)

    def provides(self, name: str) -> bool:
        """Whether something stands for the module `name`."""
        ours = resolve(name)
        return self._has(name) and (ours is None or (name not in ALTERNATIVES and _exists(ours)))

    def attribute(self, package: str, name: str) -> Any:
        """Return a module of `package` that a script has not imported by itself.

        Raises:
            AttributeError: there is none.
        """
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not self.provides(f"{package}.{name}"):
            raise AttributeError(self._message(f"{package}.{name}"))
        return importlib.import_module(f"{package}.{name}")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        name = fullname
        if fullname.startswith("apexfx."):
            # `from apex.amp import wrap` looks for a submodule of the package that stands there.
            name = "apex." + fullname.removeprefix("apexfx.")
            if name not in ALTERNATIVES:
                return None
        if not self._is_mine(name):
            return None
        if "." not in name and not self.force and (theirs := _on_the_path(name)) is not None:
            return theirs  # an extension that was built by itself
        if self.provides(name):
            return importlib.machinery.ModuleSpec(name, self, is_package=resolve(name) is None)
        if _is_asked():
            return None
        # Without `name=`: `from apex import RNN` would take it for a name that is not there, and drop the message.
        raise ModuleNotFoundError(self._message(name))

    def _is_mine(self, name: str) -> bool:
        if name.startswith("apex."):
            return self.has_apex or self._has(name)
        return name in _TOP and self.what == "installed" and (not self.is_part or self._has(name))

    def _has(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in self.names)

    def _message(self, name: str) -> str:
        if self.is_part and not self._has(name) and name not in ALTERNATIVES:
            return f"apexfx.compat.install(only=...) leaves out {name!r}"
        return f"apexfx.compat provides no {name!r}; use {alternative(name)}"

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__apexfx__ = True
        return module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        ours = resolve(name)
        if ours is None:
            module.__path__ = []
            module.__getattr__ = functools.partial(self.attribute, name)
            return
        module = sys.modules[name] = importlib.import_module(ours)
        if not hasattr(module, "__path__") and any(each.startswith(f"{name}.") for each in MODULES):
            module.__path__ = []  # one file stands for a package and for the module in it, `apex.mlp.mlp`


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
