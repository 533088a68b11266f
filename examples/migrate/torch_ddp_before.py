"""torch: data parallel, synchronized batch norm, accumulation over two batches. `torchrun --nproc-per-node 2 FILE`"""

import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 2
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
if torch.cuda.is_available():  # torch's SyncBatchNorm runs on no CPU
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = DDP(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for epoch in range(4):
    model.train()
    for place, batch in enumerate(torch.arange(1400).split(50)):
        mine = batch[rank::num_ranks]
        last = (place + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(images[mine])
                loss = criterion(output, labels[mine])
            (loss / ACCUMULATE).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

model.eval()
with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
if rank == 0:
    print(f"loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
dist.destroy_process_group()
