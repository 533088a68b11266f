"""Put real output into README.md: run the example and print the page with its blocks replaced.

    python docs/make_readme.py > README.new && mv README.new README.md
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

from apexfx import passes

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples/two_ranks.py"


def run_example() -> tuple[str, str]:
    """Return the report (and plan) and the diff that the example prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{EXAMPLE} failed:\n{done.stdout}{done.stderr}")
    report, _, diff = done.stdout.partition("\n--- ")
    return report.strip(), compact("--- " + diff)


def compact(diff: str) -> str:
    """Return the changed lines of a diff without blank lines, source comments, indentation and cpu devices."""
    lines = []
    for line in diff.splitlines():
        sign, text = line[:1], line[1:].strip()
        if line.startswith(("--- ", "+++ ")):
            lines.append(line)
        elif sign in "+-" and text and not text.startswith("#") and not text.startswith("File"):
            text = re.sub(r", layout = torch.strided|, device = device\(type='cpu'\)", "", text)
            lines.append(f"{sign} {text}")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the README `text` with its generated blocks made anew."""
    report, diff = run_example()
    rows = [(row["pass"], row["stage"], row["asked for by"], row["what it does"]) for row in passes.describe()]
    table = tabulate(rows, headers=("pass", "graph", "asked for by", "what it does"), tablefmt="github")
    for marker, language, block in ((f"output: {EXAMPLE}", "text", report), (f"diff: {EXAMPLE}", "diff", diff)):
        text, number = re.subn(rf"(<!-- {re.escape(marker)} -->\n```{language}\n).*?(\n```)",
                               lambda m: m[1] + block + m[2], text, flags=re.DOTALL)
        assert number == 1, marker
    return re.sub(r"(## What does what\n\n).*?(\n\n\[docs/passes)", lambda m: m[1] + table + m[2], text,
                  flags=re.DOTALL)


if __name__ == "__main__":
    sys.stdout.write(page((ROOT / "README.md").read_text()))
