"""One training step on two ranks, and what the passes did to it.

    torchrun --standalone --nproc-per-node 2 examples/two_ranks.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x)))
        return self.head(h.mean((2, 3)))


def main():
    dist.init_process_group("gloo")
    model = apexfx.transform(Net(), opt_level="O2", sync_bn=True, ddp=True, inner="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))

    F.cross_entropy(model(images), labels).backward()
    optimizer.step()

    if dist.get_rank() == 0:
        print("\n== captured", model.report.code(after="captured"), sep="\n")
        print("\n== report", model.report, sep="\n")
        print("\n== bucket plan", model.report.buckets(), sep="\n")
        for name in ("sync_batchnorm", "precision", "bucket_allreduce", "schedule_comm"):
            print(f"\n== {name}", model.report.diff(name), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
