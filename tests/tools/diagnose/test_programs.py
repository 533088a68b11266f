"""`diagnose` on five programs that lose time as published ones did, and on one that does not: all found, none invented."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tools.diagnose.expectations import FOLDER, KINDS, PROGRAMS


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.file)
def test_it_finds_what_is_there_and_no_more(program):
    launcher = [] if program.num_ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "-m", "apexfx", "diagnose", "--json", str(FOLDER / program.file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    answer = json.loads(done.stdout[done.stdout.index("{"):done.stdout.rindex("}") + 1])
    findings = {(finding["kind"], finding["line"]) for finding in answer["findings"]}
    for kind, lines in program.expected().items():
        assert findings & {(KINDS[kind], line) for line in lines}, (kind, sorted(findings))
    right = {(KINDS[kind], line) for kind, lines in program.expected().items() for line in lines}
    assert findings <= right, sorted(findings - right)
