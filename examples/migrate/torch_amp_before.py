"""torch: autocast to float16, GradScaler, clipping, evaluation under autocast. `python examples/migrate/torch_amp_before.py`"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.amp import GradScaler, autocast

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=56)
scaler = GradScaler("cpu")

for epoch in range(2):
    model.train()
    num_right = 0
    for batch in torch.arange(1400).split(50):
        optimizer.zero_grad(set_to_none=True)
        with autocast("cpu", dtype=torch.float16):
            output = model(images[batch])
            loss = F.cross_entropy(output, labels[batch])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        num_right += (output.argmax(1) == labels[batch]).sum()
    print(f"training accuracy {num_right / 14:.1f} %")

model.eval()
with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16):
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
print(f"loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
