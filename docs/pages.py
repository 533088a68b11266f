"""Run the programs in README.md and docs/*.md, and put what they print into the pages.

    python docs/pages.py        # rewrites the pages in place

A page's Python blocks run in order, in one namespace and an empty folder. A comment in front of a block makes it:

    <!-- run: ... -->       Python that runs here and is not shown (what the reader has at this point)
    <!-- output -->         what the page has printed since the last such block; of a ```diff, the changed lines
    <!-- output: COMMAND --> what a command prints; `<!-- output: COMMAND | TITLE -->` its part below the line "== TITLE".
                            `torchrun --nnodes N` runs N times, as on N machines of which the first is called node0
    <!-- file: PATH -->     a file of this repository
    <!-- needs: MODULE -->  Python that runs where the module is installed
    <!-- apex -->           the list of Apex's names
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import linecache
import os
import re
import runpy
import shlex
import socket
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from apexfx import compat
from apexfx.compat import names as names_of_apex

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
_PART = re.compile(r"<!-- run:(?P<hidden>.*?)-->|(?:<!-- (?P<marker>[^>]*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```"
                   r"|<!-- apex -->\n(?P<names>(?:- [^\n]*\n)+)", re.DOTALL)


def made(page: str) -> str:
    """Return the text of a page with its programs run and its generated blocks made anew.

    Raises:
        RuntimeError: a command failed. What a Python block raises goes through.
    """
    text = (ROOT / page).read_text()
    linecache.cache[page] = (len(text), None, text.splitlines(keepends=True), page)  # for errors that quote a line
    name = re.sub(r"\W", "_", f"page_{page}")  # Dynamo imports the module of a function that it traces, and keeps it by its name
    module = sys.modules[name] = types.ModuleType(name)
    namespace = module.__dict__
    printed = io.StringIO()

    def remake(match: re.Match[str]) -> str:
        marker, language, block = match["marker"] or "", match["language"], match["text"]
        if match["names"]:
            return f"<!-- apex -->\n{_apex_names()}\n"
        kind, _, what = marker.partition(": ")
        if kind == "needs" and not importlib.util.find_spec(what):
            return match[0]
        if match["hidden"] or (language == "python" and kind in ("", "needs")):
            start = match.start("hidden" if match["hidden"] else "text")
            lines_above = "\n" * text.count("\n", 0, start)  # so that errors and reports name the page's own line
            with contextlib.redirect_stdout(printed):
                exec(compile(lines_above + (match["hidden"] or block), page, "exec"), namespace)
            return match[0]
        if kind == "output":
            block = _printed_by(what) if what else printed.getvalue()
            block = _compact(block) if language == "diff" else block
            printed.seek(0)
            printed.truncate()
        elif kind == "file":
            block = (ROOT / what).read_text()
        else:
            return match[0]
        return f"<!-- {marker} -->\n```{language}\n{block.strip()}\n```"

    with _empty_folder():
        torch.compiler.reset()
        torch.manual_seed(0)
        try:
            return _PART.sub(remake, text)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _printed_by(what: str) -> str:
    command, _, title = what.partition(" | ")
    text = _run(command)
    if not title:
        return text
    [part] = [part for part in text.split("\n== ") if part.startswith(f"{title}\n")]
    return part.removeprefix(f"{title}\n")


def _compact(diff: str) -> str:
    """Return the changed lines of a diff without blank lines, source comments, indentation and the layouts of casts."""
    lines = []
    for line in diff.splitlines():
        sign, text = line[:1], line[1:].strip()
        if line.startswith(("--- ", "+++ ")):
            lines.append(line)
        elif sign in "+-" and text and not text.startswith("#"):
            text = re.sub(r", layout = torch.strided|, device = device\(type='cpu'\)", "", text)
            lines.append(f"{sign} {text}")
    return "\n".join(lines)


@functools.cache
def _run(command: str) -> str:
    """Return what a command prints: `python` runs in this process, the ranks of one node, or several nodes, in forks."""
    program, *arguments = shlex.split(command)
    with _empty_folder() as folder:
        if program == "python":
            return _run_here(arguments)
        if arguments[0] == "--standalone":
            _, _, num_ranks, *script = arguments
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            shared = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                      "TORCHELASTIC_USE_AGENT_STORE": "True"}
            ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(int(num_ranks))]
            return _run_forked(_run_script, script, ranks, folder)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        nodes = int(arguments[arguments.index("--nnodes") + 1]) * [{"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}]
        return _run_forked(torchrun, [word.replace("node0:29500", address) for word in arguments], nodes, folder)


def _run_forked(run: Callable[[list[str]], None], arguments: list[str], environments: list[dict[str, str]], folder: str) -> str:
    """Return what `run(arguments)` prints in a process for each environment, forked from a server that has imported torch."""
    import tests.distributed.launch  # noqa: F401  # which says what the server imports

    context, forks = torch.multiprocessing.get_context("forkserver"), []
    for number, environment in enumerate(environments):
        files = [str(Path(folder, f"{stream} of {number}")) for stream in ("output", "errors")]
        forks.append((context.Process(target=_fork, args=(run, arguments, environment, files)), files))
        forks[-1][0].start()
    for process, _ in forks:
        process.join(300)
        process.kill()
        process.join()
    output, errors = ("".join(Path(file).read_text() for file in files) for files in zip(*(files for _, files in forks)))
    if any(process.exitcode for process, _ in forks):
        raise RuntimeError(f"{arguments} failed:\n{output}{errors}")
    return output


def _fork(run: Callable[[list[str]], None], arguments: list[str], environment: dict[str, str], files: list[str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    for stream, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    run(arguments)
    sys.stdout.flush()
    os._exit(0)  # no interpreter shutdown: a compile worker or a gloo thread could hang it


def _run_script(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def _run_here(arguments: list[str]) -> str:
    printed, before = io.StringIO(), sys.argv
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    try:
        with contextlib.redirect_stdout(printed):
            run = runpy.run_module if is_module else runpy.run_path
            run(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = before
    return printed.getvalue()


@contextlib.contextmanager
def _empty_folder():
    """Work in a temporary folder that holds nothing but the examples."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "examples").symlink_to(ROOT / "examples")
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def _apex_names() -> str:
    """Return Apex's modules and names, each imported just now: the module that it is of, or what the error says to use."""
    rows, same, missing = [], [], {}
    public = names_of_apex.PUBLIC
    compat.install(force=True)
    try:
        for module in dict.fromkeys([*public, *names_of_apex.ALTERNATIVES]):
            names = public.get(module, "").split()
            try:
                found = importlib.import_module(module)
                assert all(hasattr(found, name) for name in names), module
                here = f"`{names_of_apex.resolve(module) or 'apexfx'}`"
                if names and set(names) <= set(public.get(module.rpartition(".")[0], "").split()):
                    same.append(f"`{module}`")
                elif names:
                    rows.append(f"- `{module}` is {here}: {', '.join(f'`{name}`' for name in names)}")
            except ModuleNotFoundError as error:
                missing.setdefault(str(error).partition("; ")[2], []).append(f"`{module}`")
    finally:
        compat.uninstall()
    rows.append(f"- with names of the package above: {', '.join(same)}")
    return "\n".join([*rows, *(f"- not {', '.join(modules)}: {advice}" for advice, modules in missing.items())])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for tests/
    for name in sys.argv[1:] or PAGES:
        (ROOT / name).write_text(made(name))
