"""Train N steps from a checkpoint in a process of its own.

    python resume_process.py CHECKPOINT OUT FIRST STEPS LEVEL OPTIMIZER
"""

from __future__ import annotations

import sys

import torch

from apexfx import amp
from tests.amp.amp_cases import OPTIMIZERS, ConvNet, fresh_state, train


def run(checkpoint, out, first, steps, level, name):
    """Build everything afresh, load, train, and save model, optimizer, amp."""
    torch.manual_seed(first)  # other initial weights than those in the checkpoint
    model = ConvNet()
    model, optimizer = amp.initialize(model, OPTIMIZERS[name](model.parameters()), opt_level=level, loss_scale="dynamic",
                                      verbosity=0)
    amp._amp_state.loss_scalers[0]._scale_seq_len = 3
    if checkpoint:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
    train(model, optimizer, steps, first=first)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(),
                "parameters": list(model.parameters()), "masters": list(amp.master_params(optimizer))}, out)


if __name__ == "__main__":
    for job in " ".join(sys.argv[1:]).split(","):
        checkpoint, out, first, steps, level, name = job.split()
        fresh_state()
        run(None if checkpoint == "-" else checkpoint, out, int(first), int(steps), level, name)
