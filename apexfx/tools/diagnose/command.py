"""Runs a script as the main program, with its steps watched."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from . import constructors
from .detectors import diagnosis
from .findings import Diagnosis
from .plan import Plan
from .session import Enough, Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of the command."""
    parser.add_argument("--steps", type=_whole_number, metavar="N",
                        help="steps to time, and as many with each change that is tried; the script is stopped behind them "
                             "(default: a second's worth, 20 to 100; 0: never stop)")
    parser.add_argument("--json", action="store_true", help="print data; what the script prints goes to stderr")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that trains")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its own arguments")


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} was given, expected a whole number, 0 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run a script, print what it loses on rank 0, and return the exit status."""
    if arguments.is_module and not _is_module(arguments.script) \
            or not arguments.is_module and not Path(arguments.script).is_file():
        print(f"apexfx diagnose: {arguments.script!r} is not there; give a Python file, or -m and a module", file=sys.stderr)
        return 2
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        result = diagnose(arguments.script, arguments.arguments, num_steps=arguments.steps, is_module=arguments.is_module)
    if result is None:
        return 2
    if not int(os.environ.get("RANK", 0)):
        print(json.dumps(result.as_data(), indent=1) if arguments.json else result)
    return 1 if result.findings and "RANK" not in os.environ else 0


def _is_module(name: str) -> bool:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]


def diagnose(script: str, arguments: list[str], *, num_steps: int | None = None, is_module: bool = False) -> Diagnosis | None:
    """Run a script as the main program, and return what it loses; None, with the reason on stderr, where no step was seen."""
    before = sys.argv, list(sys.path)
    with constructors.noted() as constructed:
        plan = Plan(constructed)
        session = Session(constructed, num_steps, plan)
        try:
            with session.running(), contextlib.suppress(Enough):
                _run_as_main(script, arguments, is_module)
        except SystemExit as end:
            if end.code not in (None, 0):
                print(f"apexfx diagnose: {script} ended with status {end.code}", file=sys.stderr)
                return None
        except Exception:  # the script's own
            traceback.print_exc()
            print(f"apexfx diagnose: {script} failed after {session.num_steps} steps", file=sys.stderr)
            return None
        finally:
            sys.argv, sys.path[:] = before
        if session.num_steps:
            return diagnosis(script, session, plan)
    print(f"apexfx diagnose: {script} called step() of no torch.optim.Optimizer in this process. Processes of its own are not "
          "seen: start ranks by torchrun --nproc-per-node N -m apexfx diagnose SCRIPT. A step of apexfx.train_step is one graph, "
          "which step.report describes.", file=sys.stderr)
    return None


def _run_as_main(script: str, arguments: list[str], is_module: bool) -> None:
    sys.argv = [script, *arguments]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        path = Path(script).resolve()
        sys.path[0] = str(path.parent)
        runpy.run_path(str(path), run_name="__main__")
