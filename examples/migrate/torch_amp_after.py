"""`torch_amp_before.py` with one graph a step. `python examples/migrate/torch_amp_after.py`"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import apexfx

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O1", dtype=torch.float16, max_grad_norm=1.0, inner="eager")
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=56)

for epoch in range(2):
    model.train()
    for batch in torch.arange(1400).split(50):
        loss = step(images[batch], labels[batch])
        schedule.step()

model.eval()
with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
print(f"loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
