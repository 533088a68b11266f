"""`apex_amp_before.py` with one graph a step. `python examples/migrate/apex_amp_after.py`"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import apexfx
from apexfx.optimizers import FusedAdam

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
criterion = nn.CrossEntropyLoss()
optimizer = FusedAdam(model.parameters(), lr=0.01)
step = apexfx.train_step(model, criterion, optimizer, opt_level="O2", max_grad_norm=1.0, inner="eager")

for epoch in range(2):
    model.train()
    for batch in torch.arange(1400).split(50):
        loss = step(images[batch], labels[batch])

model.eval()
with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
print(f"loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
torch.save(step.state_dict(), "checkpoint.pt")
