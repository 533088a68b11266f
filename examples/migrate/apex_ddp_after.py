"""`apex_ddp_before.py` with one graph a step. `torchrun --nproc-per-node 2 examples/migrate/apex_ddp_after.py`"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import apexfx

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = apexfx.train_step(model, nn.functional.cross_entropy, optimizer, opt_level="O1", sync_bn=True,
                         ddp=apexfx.BucketConfig(delay_allreduce=True), inner="eager")
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=28, gamma=0.5)

for epoch in range(2):
    model.train()
    for batch in torch.arange(1400).split(50):
        mine = batch[rank::num_ranks]
        loss = step(images[mine], labels[mine])
        schedule.step()

model.eval()
with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
if rank == 0:
    print(f"loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
dist.destroy_process_group()
