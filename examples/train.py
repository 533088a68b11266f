"""Train a small network on handwritten digits; stopped and started again, it goes on from its checkpoint.

    python examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import apexfx

EPOCHS, CHECKPOINT = 3, "checkpoint.pt"

# One process, or as many as torchrun has started.
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if num_ranks > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

# Data: 1797 images of 8 x 8 pixels. Every rank sees its share of each batch.
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
train_set = TensorDataset(images[:1400], labels[:1400])
sampler = DistributedSampler(train_set, num_ranks, rank)
loader = DataLoader(train_set, batch_size=64 // num_ranks, sampler=sampler, drop_last=True)
test_images, test_labels = images[1400:].to(device), labels[1400:].to(device)

# The model. transform() is the only line about apexfx; leave out inner="eager" to have the graphs compiled by Inductor.
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
).to(device)
model = apexfx.transform(model, opt_level="O1", dtype=torch.bfloat16, sync_bn=True, ddp=num_ranks > 1, inner="eager")
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, epochs=EPOCHS, steps_per_epoch=len(loader))

# Go on where an earlier run stopped.
first_epoch = 0
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    first_epoch = saved["epoch"]
    if rank == 0:
        print(f"{CHECKPOINT} has {first_epoch} of {EPOCHS} epochs; delete it to begin anew")

for epoch in range(first_epoch, EPOCHS):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    if rank == 0:
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
        print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                    "epoch": epoch + 1}, CHECKPOINT)

if num_ranks > 1:
    dist.destroy_process_group()
