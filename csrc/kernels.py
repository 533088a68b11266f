"""What the hot CUDA kernels take and have in flight, compared with csrc/cuda/kernels.json: see `Figures`.

    python csrc/kernels.py build/cuda            what `compile_ops.py check-cuda` compiled; 1 where a kernel is worse
    python csrc/kernels.py build/cuda --write    make the table anew

A kernel is hot where it reads or writes 128 bits at once: the versions for packs, not those for single elements, nor those of
double. The compiler's log has the first three figures; the accesses are counted in the machine code, whose instructions are 16
bytes: the opcode is in the lowest 12 bits, the width of a global access in bits 73 to 75. (nvdisasm counts the same.) A load
names in bits 110 to 112 the barrier that its data releases, and whoever uses them waits for it in bits 116 to 121: the bytes
that loads have asked for before an instruction waits for one of them say how much memory latency a thread hides by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

from compile_ops import find_nvcc, nvcc_version

TABLE = Path(__file__).resolve().parent / "cuda/kernels.json"
_ACCESSES = {0x381, 0x981, 0x386, 0x986, 0x980, 0x985}  # LDG and STG, with a register or a descriptor; LD, ST
_ACCESSES_256 = {0x97E, 0x97F}  # LDG, STG of 256 bits, from sm_100 on
_ASYNC_COPY = 0xFAE  # LDGSTS; from sm_100 on its width is one bit higher
_ASYNC_WAIT = 0x91A  # DEPBAR
_LOADS = {0x381, 0x981, 0x980}
_128_BITS = 6
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}  # of an access, by its width's code
_REPORT = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers([^\n]*)", re.DOTALL
)

# registers, bytes spilled, bytes of static shared memory, percent of the accesses that have 128 bits or more, bytes in flight
Figures = list[int]
Table = dict[str, dict[str, Figures]]  # "file kernel" -> architecture -> figures


def measured(build: Path) -> Table:
    """Return the figures of every hot kernel whose log and machine code are in a build folder."""
    found: Table = {}
    for log in sorted(build.glob("cuda_*.log")):
        read: dict[tuple[str, str], tuple[Counter[bool], int]] = {}
        for cubin in log.with_suffix(".keep").glob("*.cubin"):
            architecture = cubin.stem.rpartition("_")[2]
            for symbol, code in instructions(cubin).items():
                read[symbol, architecture] = accesses(code, int(architecture)), bytes_in_flight(code, int(architecture))
        hot = {symbol for (symbol, _), (counts, _) in read.items() if counts[True]}
        names = demangled(hot)
        for symbol, architecture, spilled, registers, rest in _REPORT.findall(log.read_text()):
            if symbol not in hot or re.search(r"\bdouble\b", names[symbol]):
                continue
            (counts, in_flight), shared = read[symbol, architecture], re.search(r"(\d+) bytes smem", rest)
            share = 100 * counts[True] // max(1, counts.total())
            row = found.setdefault(f"{log.stem.removeprefix('cuda_')} {names[symbol]}", {})
            row[architecture] = [int(registers), int(spilled), int(shared[1]) if shared else 0, share, in_flight]
    return dict(sorted(found.items()))


def instructions(cubin: Path) -> dict[str, list[tuple[int, int]]]:
    """Return the machine code of every kernel: the lower and the upper 64 bits of each instruction."""
    code = cubin.read_bytes()
    start, (size, count, names_at) = struct.unpack_from("<Q", code, 40)[0], struct.unpack_from("<HHH", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, start + i * size) for i in range(count)]
    found = {}
    for name_at, _, _, _, offset, length in sections:
        name_at += sections[names_at][4]
        name = code[name_at:code.index(b"\0", name_at)].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = list(struct.iter_unpack("<QQ", code[offset:offset + length]))
    return found


def accesses(code: list[tuple[int, int]], architecture: int) -> Counter[bool]:
    """Return how many accesses to global memory have 128 bits or more (True) and how many have fewer."""
    counts: Counter[bool] = Counter()
    for low, high in code:
        opcode = low & 0xFFF
        if opcode in _ACCESSES or opcode == _ASYNC_COPY:
            counts[width(opcode, high, architecture) == _128_BITS] += 1
        elif opcode in _ACCESSES_256:
            counts[True] += 1
    return counts


def width(opcode: int, high: int, architecture: int) -> int:
    """Return the code of an access's width."""
    return high >> (10 if opcode == _ASYNC_COPY and architecture >= 100 else 9) & 7


def bytes_in_flight(code: list[tuple[int, int]], architecture: int) -> int:
    """Return the most bytes that a thread has asked for before some of them are waited for, in the order of the code."""
    pending, most = Counter(), 0  # barrier, or opcode of an asynchronous copy -> bytes
    for low, high in code:
        opcode = low & 0xFFF
        for barrier in range(6):
            if high >> 52 + barrier & 1:
                pending[barrier] = 0
        barrier = high >> 46 & 7
        if opcode in _LOADS | _ACCESSES_256 and barrier < 6:
            pending[barrier] += 32 if opcode in _ACCESSES_256 else _BYTES[width(opcode, high, architecture)]
        elif opcode == _ASYNC_COPY:
            pending[opcode] += _BYTES[width(opcode, high, architecture)]
        elif opcode == _ASYNC_WAIT:
            pending[_ASYNC_COPY] = 0
        most = max(most, pending.total())
    return most


def demangled(symbols: set[str]) -> dict[str, str]:
    """Return the kernels' C++ names, without their arguments and namespaces (whose names hold a hash)."""
    listed = sorted(symbols)
    text = subprocess.run(["c++filt"], input="\n".join(listed), capture_output=True, text=True, check=True).stdout
    plain = (re.sub(r"\(anonymous namespace\)::|apexfx::|c10::|^void ", "", line) for line in text.splitlines())
    return {symbol: re.sub(r"\(.*", "", line).replace("> >", ">>") for symbol, line in zip(listed, plain)}


def regressions(now: Table, table: Table) -> list[str]:
    """Return a line for every kernel that is worse than in the table, or in only one of the two."""
    files = {name.split()[0] for name in now}
    lines = []
    for name in sorted(now.keys() | {name for name in table if name.split()[0] in files}):
        if name not in now or name not in table:
            lines.append(f"{name}: {'not in the table' if name in now else 'no longer there, or no longer of 128-bit accesses'}")
            continue
        for architecture in now[name].keys() & table[name].keys():
            registers, spilled, shared, share, in_flight = now[name][architecture]
            before = table[name][architecture]
            worse = {"registers": -(-registers // 8) > -(-before[0] // 8),  # which a warp gets eight at a time
                     "spilled bytes": spilled > before[1], "bytes of shared memory": shared > before[2],
                     "% 128-bit accesses": share < before[3] - 2, "bytes in flight": in_flight < before[4]}  # fmt: skip
            for i, what in enumerate(worse):
                if worse[what]:
                    lines.append(f"{name} on sm_{architecture}: {now[name][architecture][i]} {what}, {before[i]} in the table")
    return lines


def show(table: Table) -> None:
    """Print a line a kernel: under each architecture the figures."""
    architectures = sorted({a for row in table.values() for a in row}, key=int)
    width = max(map(len, table), default=0)
    heads = "  ".join(f"{f'sm_{a}':>24}" for a in architectures)
    print(f"{'registers, spilled B, shared B, 128-bit, B in flight':{width}}  {heads}")
    for name, row in table.items():
        cells = ("{:4} {:4} {:5} {:3}% {:3}".format(*row[a]) if a in row else "" for a in architectures)
        print(f"{name:{width}}  " + "  ".join(f"{cell:>24}" for cell in cells))


def write(table: Table, nvcc: str) -> None:
    """Write the table, a line a kernel."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
    TABLE.write_text(f'{{\n "nvcc": "{nvcc}",\n "kernels": {{\n{lines}\n }}\n}}\n')


def main() -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--write", action="store_true", help="make the table anew")
    given = parser.parse_args()
    nvcc = ".".join(map(str, nvcc_version(find_nvcc())))
    now = measured(given.build)
    show(now)
    if given.write:
        write(now, nvcc)
        return 0
    table = json.loads(TABLE.read_text())
    if table["nvcc"] != nvcc:
        print(f"{TABLE.name} is of nvcc {table['nvcc']}, so these figures of nvcc {nvcc} are compared with nothing")
        return 0
    worse = regressions(now, table["kernels"])
    for line in worse:
        print(line)
    print(f"{len(now)} hot kernels, {len(worse)} differences for the worse"
          + (" (where they are wanted: python csrc/compile_ops.py check-cuda --write)" if worse else ""))
    return 1 if worse or not now else 0


if __name__ == "__main__":
    sys.exit(main())
