"""Apex: data parallel, synchronized batch norm, amp at O1. `torchrun --nproc-per-node 2 -m apexfx.compat FILE`"""

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model
from sklearn.datasets import load_digits
from torch import nn

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
model = convert_syncbn_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
model = DDP(model, delay_allreduce=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=28, gamma=0.5)

for epoch in range(2):
    model.train()
    for batch in torch.arange(1400).split(50):
        mine = batch[rank::num_ranks]
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        schedule.step()

model.eval()
with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
if rank == 0:
    print(f"loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
dist.destroy_process_group()
