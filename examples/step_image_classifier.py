"""Train a small ResNet by whole-step graphs: float16, synchronized batch norm, data parallel, a cosine schedule, an average of
the parameters that is evaluated, a checkpoint to go on from. The images are scikit-learn's: pip install scikit-learn.

    python examples/step_image_classifier.py
    torchrun --standalone --nproc-per-node 2 examples/step_image_classifier.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import apexfx

EPOCHS, CHECKPOINT = 3, "step_image_classifier.pt"

# One process, or as many as torchrun has started.
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if num_ranks > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

# Data: 1797 images of 8 x 8 pixels. Every rank sees its share of each batch; batches of one size need one graph.
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
train_set = TensorDataset(images[:1400], labels[:1400])
sampler = DistributedSampler(train_set, num_ranks, rank)
loader = DataLoader(train_set, batch_size=64 // num_ranks, sampler=sampler, drop_last=True)
test_images, test_labels = images[1400:].to(device), labels[1400:].to(device)


class Block(nn.Module):
    """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.second_norm = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        h = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(h)) + self.shortcut(x))


torch.manual_seed(0)
model = nn.Sequential(Block(1, 16, stride=1), Block(16, 32, stride=2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

# Forward, loss, backward, allreduce, loss scale, clipping, update and average in one graph. The model stays the user's own, in
# float32; leave out inner="eager" to have the graph compiled by Inductor.
step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O1", dtype=torch.float16, max_grad_norm=1.0, sync_bn=True,
                         ddp=num_ranks > 1, ema=apexfx.EMA(decay=0.9), inner="eager")

# Go on where an earlier run stopped.
first_epoch = 0
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT, map_location=device)
    step.load_state_dict(saved["step"])  # model, optimizer, loss scale and averages
    schedule.load_state_dict(saved["schedule"])
    first_epoch = saved["epoch"]

for epoch in range(first_epoch, EPOCHS):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = step(x.to(device), y.to(device))
        schedule.step()

    if rank == 0:
        averaged = step.ema_model  # a copy of the model, with the averages, in eval mode; without ema= evaluate the model itself
        with torch.no_grad():
            accuracy = (averaged(test_images).argmax(1) == test_labels).float().mean()
        print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
        torch.save({"step": step.state_dict(), "schedule": schedule.state_dict(), "epoch": epoch + 1}, CHECKPOINT)

if num_ranks > 1:
    dist.destroy_process_group()
