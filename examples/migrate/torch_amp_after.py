"""`torch_amp_before.py` with one graph a step. `python examples/migrate/torch_amp_after.py`"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.amp import autocast

import apexfx

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def objective(model, images, labels):
    output = model(images)
    return F.cross_entropy(output, labels), output


step = apexfx.train_step(model, optimizer=optimizer, objective=objective, opt_level="O1", dtype=torch.float16, max_grad_norm=1.0,
                         inner="eager")
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=56)

for epoch in range(2):
    model.train()
    num_right = 0
    for batch in torch.arange(1400).split(50):
        loss, output = step(images[batch], labels[batch])
        schedule.step()
        num_right += (output.argmax(1) == labels[batch]).sum()
    print(f"training accuracy {num_right / 14:.1f} %")

model.eval()
with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16):
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
print(f"loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
