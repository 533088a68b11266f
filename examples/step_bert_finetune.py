"""Teach a small BERT to tell good reviews from bad ones: gradients of four batches accumulated, warm-up, two parameter groups.

    python examples/step_bert_finetune.py
    torchrun --standalone --nproc-per-node 2 examples/step_bert_finetune.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import apexfx

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 16, 4

# One process, or as many as torchrun has started.
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if num_ranks > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

PAD, START, FIRST_GOOD, FIRST_BAD, FIRST_OTHER, NUM_WORDS = 0, 1, 10, 20, 30, 100


def reviews(count):
    """Return input_ids and attention_mask (count, 24), and labels (count,): 1 where more words are good ones than bad ones."""
    random = torch.Generator().manual_seed(0)
    words = torch.randint(FIRST_GOOD, NUM_WORDS, (count, 24), generator=random)
    words[:, 0] = START
    lengths = torch.randint(12, 25, (count, 1), generator=random)
    mask = (torch.arange(24) < lengths).long()
    words = torch.where(mask.bool(), words, PAD)
    good, bad = ((words >= first) & (words < first + 10) for first in (FIRST_GOOD, FIRST_BAD))
    return words, mask, (good.sum(1) > bad.sum(1)).long()


# Data. Every rank sees its share of each batch.
data = reviews(2560)
train_set = TensorDataset(*(tensor[:2048] for tensor in data))
test_ids, test_mask, test_labels = (tensor[2048:].to(device) for tensor in data)
sampler = DistributedSampler(train_set, num_ranks, rank)
loader = DataLoader(train_set, batch_size=BATCH_SIZE // num_ranks, sampler=sampler, drop_last=True)

# For a trained one: BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(
    vocab_size=NUM_WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=2,
    max_position_embeddings=32,
)).to(device)
torch.manual_seed(rank)  # dropout differs by rank

# No weight decay on biases and norms, which are the parameters with one dimension.
optimizer = torch.optim.AdamW([
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
], lr=3e-3)
num_updates = EPOCHS * len(loader) // ACCUMULATE
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=num_updates // 10, num_training_steps=num_updates)


def objective(model, inputs, labels):
    """Return the loss, and what else the step is to return. Outside of the model O2 computes in float32: so is the loss."""
    logits = model(**inputs).logits
    return F.cross_entropy(logits, labels), logits


# Leave out inner="eager" to have the graphs compiled by Inductor: one that accumulates, and one that updates as well.
step = apexfx.train_step(model, optimizer=optimizer, objective=objective, opt_level="O2", dtype=torch.bfloat16, max_grad_norm=1.0,
                         accumulate=ACCUMULATE, ddp=num_ranks > 1, inner="eager")

for epoch in range(EPOCHS):
    model.train()
    sampler.set_epoch(epoch)
    sum_losses, num_right = 0, 0
    for num_calls, (ids, mask, labels) in enumerate(loader, 1):
        labels = labels.to(device)
        loss, logits = step({"input_ids": ids.to(device), "attention_mask": mask.to(device)}, labels)
        sum_losses += loss  # on the device: nothing waits for it
        num_right += (logits.argmax(1) == labels).sum()
        if num_calls % ACCUMULATE == 0:
            schedule.step()

    if rank == 0:
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_ids, test_mask).logits.argmax(1) == test_labels).float().mean()
        print(f"epoch {epoch + 1}: loss {sum_losses / num_calls:.3f}, training accuracy "
              f"{100 * num_right / (num_calls * len(ids)):.1f} %, test accuracy {100 * accuracy:.1f} %")

if num_ranks > 1:
    dist.destroy_process_group()
