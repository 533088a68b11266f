"""Apex: amp at O2 with FusedAdam and clipping. `python -m apexfx compat examples/migrate/apex_amp_before.py`"""

import torch
from apex import amp
from apex.optimizers import FusedAdam
from sklearn.datasets import load_digits
from torch import nn

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
criterion = nn.CrossEntropyLoss()
optimizer = FusedAdam(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

for epoch in range(2):
    model.train()
    for batch in torch.arange(1400).split(50):
        output = model(images[batch])
        loss = criterion(output, labels[batch])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()

model.eval()
with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
print(f"loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, "checkpoint.pt")
