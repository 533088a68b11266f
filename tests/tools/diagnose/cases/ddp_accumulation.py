"""Train a transformer on several processes; gradients are averaged once in four micro-batches.

    torchrun --standalone --nproc-per-node 2 ddp_accumulation.py
"""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

UPDATES, MICRO_BATCHES, BATCH, TOKENS, WIDTH, VOCABULARY = 12, 4, 8, 32, 128, 200


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(VOCABULARY, (8, BATCH, TOKENS + 1), generator=generator)
    total = torch.zeros(())
    for update in range(1, UPDATES + 1):
        for micro_batch in range(MICRO_BATCHES):
            tokens = data[(update * MICRO_BATCHES + micro_batch) % len(data)]
            last = micro_batch == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss {total.item() / UPDATES / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
