"""An image classifier in the way public scripts use Apex: try/except around the import, options from the command line."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as DDP  # noqa: F401
    from apex.parallel import convert_syncbn_model  # noqa: F401
    from apex.fp16_utils import *  # noqa: F403
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default="dynamic")
args = parser.parse_args()
if args.keep_batchnorm_fp32 == "None":
    args.keep_batchnorm_fp32 = None

torch.manual_seed(0)
assert multi_tensor_applier.available
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
train_images, train_labels, test_images, test_labels = images[:1500], labels[:1500], images[1500:], labels[1500:]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32),
    nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 9, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
model, optimizer = amp.initialize(
    model, optimizer, opt_level=args.opt_level, keep_batchnorm_fp32=args.keep_batchnorm_fp32, loss_scale=args.loss_scale
)
criterion = nn.CrossEntropyLoss()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

for epoch in range(3):
    model.train()
    order = torch.randperm(len(train_labels))
    for start in range(0, len(order), 64):
        chosen = order[start : start + 64]
        loss = criterion(model(train_images[chosen]), train_labels[chosen])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        accuracy = (F.softmax(model(test_images), dim=1).argmax(1) == test_labels).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.3f} accuracy {accuracy:.3f}")
