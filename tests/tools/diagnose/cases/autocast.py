"""Train a transformer in bfloat16 by autocast; the loss is printed after each epoch.

    python autocast.py
"""

import torch
import torch.nn.functional as F
from torch import nn

EPOCHS, BATCHES, BATCH, TOKENS, WIDTH = 2, 12, 16, 24, 64


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Linear(16, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.layers(self.embed(x) + self.positions).mean(1))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, labels = torch.randn(BATCHES, BATCH, TOKENS, 16), torch.randint(3, (BATCHES, BATCH))
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(EPOCHS):
        losses = []
        for x, y in zip(inputs, labels):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.3f}")


if __name__ == "__main__":
    main()
