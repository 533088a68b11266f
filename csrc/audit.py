"""Audit the symbols of compiled libraries: stable ABI only, and present in every supported torch that is at hand.

    python csrc/audit.py apexfx/_C_cpu.so                       forbidden symbols, and the torch that is installed
    python csrc/audit.py apexfx/_C_cpu.so --torch FOLDER ...    also the libraries of other torch packages
    python csrc/audit.py apexfx/_C_cpu.so --headers FOLDER ...  also the declarations in their headers

FOLDER is a torch package (it holds lib/ and include/). ELF and Mach-O libraries can be read with `nm` or, where nm does
not know the format, as text: every exported symbol is in the file by name. Exit status 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

# The C functions of the stable ABI begin with one of these; C++ names, Python and the rest of libtorch are forbidden.
STABLE = re.compile(r"^(aoti_torch_|torch_|stable_)\w+$")
ALLOWED_LIBRARIES = re.compile(
    r"^(libtorch_cpu|libtorch_cuda|libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux-[\w-]+)\.so(\.\d+)*$"
)


def undefined_symbols(library: Path) -> set[str]:
    """Return the names the library needs from others, without versions."""
    text = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in text.splitlines() if line.split() and line.split()[-2:-1] != ["w"]}


def needed_libraries(library: Path) -> list[str]:
    """Return the NEEDED entries."""
    text = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", text)


def torch_symbols(symbols: set[str]) -> set[str]:
    """Return those that can only come from libtorch: the C names, and any mangled name of its namespaces."""
    mangled = re.compile(r"^_Z\w*?(2at|3c10|5torch)\d")
    return {s for s in symbols if STABLE.match(s) or mangled.match(s) or s.startswith("Py")}


def names_in_file(path: Path, names: set[str]) -> set[str]:
    """Return the names that occur in a file as whole symbols (Mach-O puts an underscore before them)."""
    found = re.findall(rb"(?<![A-Za-z0-9])_?((?:aoti_torch|torch|stable)_\w+)", path.read_bytes())
    return names & {name.decode() for name in set(found)}


def exported(folder: Path, names: set[str]) -> set[str]:
    """Return which of `names` the libraries of a torch package export."""
    found: set[str] = set()
    for library in sorted((folder / "lib").glob("libtorch_c*")):
        if library.suffix not in {".so", ".dylib"}:
            continue
        done = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout:
            found |= names & {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.split()}
        else:
            found |= names_in_file(library, names)
    return found


def declared(folder: Path, names: set[str]) -> set[str]:
    """Return which of `names` the headers of a torch package declare."""
    found: set[str] = set()
    include = folder / "include/torch"
    for header in [*include.rglob("shim*.h"), *include.rglob("*shim*.h"), *include.rglob("*.inc")]:
        found |= names_in_file(header, names - found)
    return found


def main() -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--torch", nargs="*", type=Path, default=[], help="torch packages that must export the symbols")
    parser.add_argument("--headers", nargs="*", type=Path, default=[], help="torch packages that must declare them")
    arguments = parser.parse_args()
    failures = 0
    for library in arguments.libraries:
        names = torch_symbols(undefined_symbols(library))
        forbidden = sorted(n for n in names if not STABLE.match(n))
        foreign = [n for n in needed_libraries(library) if not ALLOWED_LIBRARIES.match(n)]
        stable = {n for n in names if STABLE.match(n)}
        print(f"{library.name}: {len(stable)} stable-ABI symbols, {len(forbidden)} others, {len(foreign)} foreign libraries")
        for name in [*forbidden, *foreign]:
            print(f"  not allowed: {name}")
        failures += len(forbidden) + len(foreign)
        for folder in arguments.torch:
            failures += _report(folder, "exports", stable, exported(folder, stable))
        for folder in arguments.headers:
            failures += _report(folder, "declares", stable, declared(folder, stable))
    return 1 if failures else 0


def _report(folder: Path, verb: str, wanted: set[str], found: set[str]) -> int:
    missing = sorted(wanted - found)
    print(f"  {_version(folder)} {verb} {len(found)} of {len(wanted)}")
    # A CPU build of torch has no libtorch_cuda: what only that one exports cannot be missing there.
    if verb == "exports" and not list((folder / "lib").glob("libtorch_cuda*")):
        only_cuda = [n for n in missing if "cuda" in n]
        if only_cuda:
            print(f"    no libtorch_cuda there to look for {', '.join(only_cuda)}")
        missing = [n for n in missing if n not in only_cuda]
    for name in missing:
        print(f"    missing: {name}")
    return len(missing)


def _version(folder: Path) -> str:
    version = folder / "version.py"
    match = re.search(r"__version__ = '([^']+)'", version.read_text()) if version.exists() else None
    return f"torch {match[1]}" if match else folder.name


if __name__ == "__main__":
    sys.exit(main())
