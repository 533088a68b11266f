"""Builds the pure-Python package, and the compiled ops wherever torch and a compiler are at hand.

APEXFX_EXT=0 leaves every compiled op out; APEXFX_CUDA=auto|0|1 builds the CUDA ops when torch has CUDA and nvcc of the
same major version is found (auto), never, or always. A failure to compile is reported in one sentence and the package
is installed without those ops: the pure-torch references cover all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # as pyproject.toml says, which a build without isolation does not read
    raise SystemExit(f"apexfx: setuptools {setuptools.__version__} was found, expected 77.0.3 or newer; run "
                     "`pip install -U setuptools`, or leave out --no-build-isolation")

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))
import compile_ops  # csrc/compile_ops.py: how the libraries are made


def say(sentence: str) -> None:
    """Print one sentence about what is built and why."""
    print(f"apexfx: {sentence}", file=sys.stderr, flush=True)


def extensions() -> list[Extension]:
    """List the libraries to build, saying what is left out and why."""
    try:
        names, sentences = compile_ops.plan(dict(os.environ))
    except compile_ops.BuildError as error:
        raise SystemExit(f"apexfx: {error}") from error
    for sentence in sentences:
        say(sentence)
    return [Extension(f"apexfx.{name}", sources=[], optional=True) for name in names]


class BuildLibraries(build_ext):
    """Builds each library by csrc/compile_ops.py, and goes on without it when that fails."""

    def get_ext_filename(self, fullname: str) -> str:
        """Name the file without a Python ABI tag: it holds no Python symbols."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one library."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        folder = Path("build").resolve()
        try:
            if ext.name.endswith("_cuda"):
                compile_ops.build_cuda(target, folder / "cuda")
            else:
                compile_ops.build_cpu(target, folder / "cpu")
        except (compile_ops.BuildError, OSError) as error:
            say(f"{error}\napexfx: {ext.name} could not be built, so the pure-torch references are used instead")
            if os.environ.get("APEXFX_STRICT") == "1":
                raise SystemExit(1) from error

    def copy_extensions_to_source(self) -> None:
        """Replace libraries in the source tree atomically: a running process may have them mapped."""
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            if built.exists():
                place = Path(__file__).resolve().parent / self.get_ext_filename(ext.name)
                fresh = place.with_name(f".{place.name}.{os.getpid()}")
                shutil.copy2(built, fresh)
                os.replace(fresh, place)


class PlatformWheel(bdist_wheel):
    """Tags a wheel with libraries py3-none-<platform>: no Python ABI is used."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


def readme() -> str:
    """Return README.md as an index shows it, where no link into the repository leads anywhere: its text, and the file's name."""
    text = Path(__file__).with_name("README.md").read_text()
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)",
                  lambda link: link[1] if link[2] in ("", link[1]) else f"{link[1]} ({link[2]})", text)


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
      long_description=readme(), long_description_content_type="text/markdown")
