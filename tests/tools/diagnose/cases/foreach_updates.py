"""Train with two groups of parameters, clipping and an average of the weights, all of them over lists of tensors.

    python foreach_updates.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Tagger(nn.Module):
    def __init__(self, vocabulary=100, width=96, tags=7):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                                                  nn.Linear(2 * width, width)) for _ in range(6))
        self.head = nn.Linear(width, tags)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def groups(model, weight_decay):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tagger()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(groups(model, 0.01), lr=1e-3, foreach=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    tokens, tags = torch.randint(100, (5, 16, 40)), torch.randint(7, (5, 16, 40))
    losses = []
    for step in range(40):
        loss = F.cross_entropy(model(tokens[step % 5]).flatten(0, 1), tags[step % 5].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(loss.detach())
    print("loss", " ".join(f"{mean:.3f}" for mean in torch.stack(losses).view(4, 10).mean(1).tolist()))


if __name__ == "__main__":
    main()
