"""The warning where a float16 model trains and nothing scales its loss."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: what any test keeps alive may scale losses.
PROGRAM = """
import logging, sys
import torch
from torch import nn
import apexfx
from apexfx import amp

class Count(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

said = []
logging.getLogger("apexfx").addHandler(Count())

def warnings(**options):
    said.clear()
    model = apexfx.transform(nn.Linear(4, 4), inner="eager", **options)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    model.eval()(torch.ones(2, 4)).sum().backward()
    return len([text for text in said if "nothing was found that scales its loss" in text])

half = {"dtype": torch.float16, "opt_level": "O1"}
print(warnings(**half), warnings(**half | {"opt_level": "O2"}), warnings(dtype=torch.bfloat16), warnings(opt_level="O0"))
scaler = torch.amp.GradScaler("cpu", enabled=False)
print(warnings(**half))
scaler = torch.amp.GradScaler("cpu")
print(warnings(**half))
del scaler
print(warnings(**half))
model = nn.Linear(4, 4)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
print(warnings(**half))
"""


def test_a_float16_model_whose_loss_nothing_scales_warns_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["1 1 0 0", "1", "0", "1", "0", ""]
