"""The command line: `python -m apexfx demo | diagnose | doctor | passes | compare | replay | simulate | compat`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .config import INNER_COMPILERS, OPT_LEVELS

_EXIT_STATUS = "exit status: 0 success, 1 the result is not as required, 2 wrong arguments or a missing requirement"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):  # what an encoding lacks is printed as ?
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if argv and argv[0] == "compat":  # what follows belongs to a script, options included
        from .compat.__main__ import main as run_script

        return run_script(list(argv[1:]))
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("\napexfx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apexfx", epilog=_EXIT_STATUS,
                                     description="Mixed precision, synchronized batch norm and data parallel as passes "
                                                 "over torch.compile graphs.")
    parser.add_argument("--version", action="version", version=f"apexfx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_diagnose(commands)
    doctor = commands.add_parser("doctor", help="what this machine and this install can do", epilog=_EXIT_STATUS,
                                 description="Print torch, the compiled libraries, every op's kernels, and the "
                                             "variables read.")
    doctor.set_defaults(run=_doctor)
    passes = commands.add_parser("passes", help="the passes, in order", epilog=_EXIT_STATUS,
                                 description="Print the ordered table of built-in passes, or everything about one.")
    passes.add_argument("name", nargs="?", help="a pass to explain")
    passes.add_argument("--markdown", action="store_true", help="print the page docs/passes.md")
    passes.set_defaults(run=_passes)
    _add_compare(commands)
    _add_replay(commands)
    _add_simulate(commands)
    commands.add_parser("compat", help="run a script written for NVIDIA Apex, unchanged")
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo", help="train a small network on several ranks and show every rewrite", epilog=_EXIT_STATUS,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Train a residual network on scikit-learn's digits with mixed precision, synchronized batch norm "
                    "and bucketed allreduce, on ranks of this machine; print what the passes did. Fails below 97 % "
                    "test accuracy, of which plain eager float32 has 99.3 % in 8 epochs.",
    )
    demo.add_argument("--ranks", type=_whole_number, default=2, metavar="N", help="processes to train on")
    demo.add_argument("--opt-level", choices=sorted(OPT_LEVELS), default="O2", help="precision level")
    demo.add_argument("--epochs", type=_whole_number, default=8, metavar="N", help="passes over the training images")
    demo.add_argument("--inner", choices=INNER_COMPILERS, default="eager",
                      help="what runs the rewritten graphs; inductor generates code first, which takes a minute or two")
    demo.add_argument("--batch-size", type=_whole_number, default=64, metavar="N",
                      help="images a step, all ranks together")
    demo.add_argument("--out", default="out", metavar="DIR", help="where the report goes")
    demo.set_defaults(run=_demo)


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    compare = commands.add_parser(
        "compare", help="which op makes a model's results differ from float64", epilog=_EXIT_STATUS,
        description="Run a Python file, and compare what it calls `step` or `model` on what it calls `batch` (with `loss_fn`, if "
                    "there is one) with a wide dtype, op by op: a table of ops by the error that they make. Status 1 says that "
                    "an op makes more error than the rounding of its dtype. docs/compare.md explains the table.",
    )
    compare.add_argument("file", metavar="FILE", help="the Python file")
    compare.add_argument("--reference", choices=["float64", "float32"], default="float64", help="the wide dtype")
    compare.add_argument("--splits", action="store_true", help="instead, whether `step` has the same gradient however `batch` is "
                         "split over ranks and calls (check_splits); status 1 says that it has not")
    for name, what in (("ranks", "numbers of ranks"), ("accumulate", "numbers of calls")):
        compare.add_argument(f"--{name}", type=_whole_number, nargs="+", default=(1, 2, 4), metavar="N",
                             help=f"with --splits: {what} to try, whose products divide the length of the batch; default 1 2 4")
    compare.add_argument("--json", metavar="PATH", help="write all of it to a file")
    compare.set_defaults(run=_compare)


def _add_diagnose(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .tools.diagnose.command import add_arguments, run

    diagnose = commands.add_parser(
        "diagnose", help="run some steps of a training script, unchanged, and rank what costs",
        epilog="exit status: 0 nothing found, or a rank of torchrun, which takes 1 for a failure; 1 something found; 2 wrong "
               "arguments, the script failed, or no optimizer stepped",
        description="Run a training script for some steps and rank what costs: reads to the host, graph breaks, a torch.compile "
                    "that is never called, groups of an optimizer, loops over parameters, broadcasts, data loading ..., each "
                    "with its line, what it takes of a step and what to change. What a change saves is measured by making it in "
                    "some of the steps. docs/diagnose.md explains each.",
    )
    add_arguments(diagnose)
    diagnose.set_defaults(run=run)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser(
        "replay", help="run a recorded training step again", epilog=_EXIT_STATUS,
        description="Run the graph of a bundle that a training step has recorded, op by op on this machine alone, and say which "
                    "op first gave what is not finite, and whether all nodes have the bits that were recorded. Nothing of a "
                    "bundle is executed but registered ops of torch and apexfx. docs/guard.md explains bundles.",
    )
    replay.add_argument("bundle", metavar="BUNDLE", help="the folder")
    replay.set_defaults(run=_replay)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .tools.simulate.command import add_arguments

    simulate = commands.add_parser(
        "simulate", help="predict how long a data-parallel step takes on any number of ranks", epilog=_EXIT_STATUS,
        description="Estimate a training step from shapes, or measure it here, simulate it with its buckets on a model of the "
                    "network, and print exposed communication, the cost of synchronized batch norm and the best bucket size. "
                    "docs/simulate.md has the formulas.",
    )
    add_arguments(simulate)
    simulate.set_defaults(run=_simulate)


def _whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} was given, expected a whole number of at least 1")
    return int(text)


def _demo(arguments: argparse.Namespace) -> int:
    from .tools.demo.launch import run
    from .tools.demo.train import Options

    return run(Options(ranks=arguments.ranks, opt_level=arguments.opt_level, epochs=arguments.epochs,
                       inner=arguments.inner, batch_size=arguments.batch_size, out=arguments.out))


def _doctor(arguments: argparse.Namespace) -> int:
    from .tools import demo, doctor

    print(doctor.report(of_demo=demo.NEEDS.values()))
    return 0


def _passes(arguments: argparse.Namespace) -> int:
    from .passes import pass_docs

    if arguments.markdown and arguments.name is not None:
        print(f"apexfx: --markdown prints the page of all passes; leave {arguments.name!r} out", file=sys.stderr)
        return 2
    if arguments.markdown:
        print(pass_docs.markdown(), end="")
        return 0
    if arguments.name is None:
        print(pass_docs.table())
        return 0
    try:
        print(pass_docs.one(arguments.name))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    import runpy

    from .checks.check_splits import check_splits
    from .compare import compare

    if not Path(arguments.file).is_file():
        print(f"apexfx: {arguments.file!r} is not there; give a Python file that defines `batch`, and `step` or `model`",
              file=sys.stderr)
        return 2
    sys.argv, sys.path[0] = [arguments.file], str(Path(arguments.file).resolve().parent)
    try:
        names = runpy.run_path(arguments.file, run_name="__compare__")
    except Exception:  # the file's own, with its own lines
        traceback.print_exc()
        return 2
    subjects = ["step"] if arguments.splits else ["step", "model"]
    if "batch" not in names or not names.keys() & subjects:
        print(f"apexfx: {arguments.file} has to define `batch`, and {' or '.join(map('`{}`'.format, subjects))}", file=sys.stderr)
        return 2
    subject = names["step"] if "step" in names else names["model"]
    try:
        if arguments.splits:
            splits = check_splits(names["step"], *names["batch"], ranks=arguments.ranks, accumulate=arguments.accumulate)
            print(splits)
            return 0 if splits.is_right else 1
        comparison = compare(subject, names["batch"], arguments.reference,
                             loss_fn=names.get("loss_fn") if "step" not in names else None)
        if arguments.json is not None:
            comparison.save(arguments.json)
    except Exception as error:  # of the model, as a label out of range is, too
        _say(error)
        return 2
    print(comparison)
    return 1 if any(row.stands_out for row in comparison) else 0


def _replay(arguments: argparse.Namespace) -> int:
    from .observe.replay import replay

    try:
        text, as_recorded = replay(arguments.bundle)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 0 if as_recorded else 1


def _simulate(arguments: argparse.Namespace) -> int:
    from .tools.simulate import command

    try:
        text = command.text(arguments)
    except Exception as error:  # of the model, too
        _say(error)
        return 2
    print(text)
    return 0


def _say(error: Exception) -> None:
    text = str(error)
    print(text if text.startswith("apexfx: ") else f"apexfx: {type(error).__name__}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
