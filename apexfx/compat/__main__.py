"""python -m apexfx compat, or apexfx.compat, [-m MODULE | SCRIPT] [ARGS...]: run a script written for Apex."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

from .install import SHIM, install
from .names import resolve

USAGE = "usage: python -m apexfx.compat [-m MODULE | SCRIPT] [ARGS...]"
HELP = f"""{USAGE}
       python -m apexfx compat [-m MODULE | SCRIPT] [ARGS...]

Run a script written for NVIDIA Apex, unchanged: in it and in the processes it starts, `import apex`, `amp_C`, `apex_C`
and the names of other extensions give apexfx's modules. Where NVIDIA's Apex with amp is installed, that one is used; where
it is installed without amp, what it lost is added.

  SCRIPT     a Python file to run as the main program
  -m MODULE  a module to run so; apex.parallel.multiproc is one
  ARGS       its own arguments

What Apex has and apexfx does not raises an error that names what to use instead.
exit status: the script's; 2 for wrong arguments
"""


def main(arguments: list[str]) -> int:
    """Run what the command line names as the main program, with Apex's names in place for it and its children."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if not arguments or arguments == ["-m"]:
        print(USAGE, file=sys.stderr)
        return 2
    if arguments[0] != "-m" and not Path(arguments[0]).exists():
        print(f"python -m apexfx.compat: can't open {arguments[0]!r}: no such file", file=sys.stderr)
        return 2
    install()
    if arguments[0] == "-m" and _is_missing(resolve(arguments[1]) or arguments[1]):
        print(f"python -m apexfx.compat: no module named {arguments[1]!r}", file=sys.stderr)
        return 2
    # Processes the script starts find the names through a folder on their path.
    os.environ["PYTHONPATH"] = os.pathsep.join([SHIM, *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(resolve(arguments[1]) or arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        sys.path.append(SHIM)
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
