"""Train a small language model by GRPO, whole steps of it: groups of samples, their rewards, a clipped ratio, a frozen reference.

    python examples/step_grpo.py
    torchrun --standalone --nproc-per-node 2 examples/step_grpo.py

The task: say the prompt again. A completion is rewarded by the share of its tokens that are right.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx

WORDS, PROMPT, COMPLETION = 8, 3, 6
GROUPS, SAMPLES, UPDATES, EPOCHS = 16, 8, 30, 2  # prompts of a round, samples of each, rounds, and steps on a round's samples
CLIP, BETA = 0.2, 0.02

rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if num_ranks > 1:
    dist.init_process_group("gloo")


class Policy(nn.Module):
    """Token ids (N, T) -> logits of the following tokens (N, T, WORDS)."""

    def __init__(self, width=32):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(PROMPT + COMPLETION, width)
        self.attention, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.mlp, self.head = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)), nn.Linear(width, WORDS)

    def forward(self, ids):
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.attention(self.norm(h)).chunk(3, dim=-1)
        h = h + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return self.head(h + self.mlp(h))


def log_probs(model, ids):
    """Return the log-probability of each token of the completions, (N, COMPLETION)."""
    logits = model(ids[:, :-1])[:, PROMPT - 1:]
    return -F.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten(), reduction="none").view(-1, COMPLETION)


@torch.no_grad()
def sample(model, prompts):
    ids = prompts
    for _ in range(COMPLETION):  # by the model itself, and no step: lengths change
        ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].softmax(-1), 1)], dim=1)
    return ids


def objective(model, ids, old, advantages):
    new = log_probs(model, ids)
    with torch.no_grad():  # what no optimizer of the step holds is computed so, or frozen
        anchor = log_probs(reference, ids)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    distance = (anchor - new).exp() - (anchor - new) - 1
    losses = BETA * distance - gain
    return apexfx.Mean(losses.sum(), losses.numel()), {"kl": distance.detach().mean()}  # by tokens, of all ranks


torch.manual_seed(0)
policy = Policy()
reference = copy.deepcopy(policy).requires_grad_(False).eval()
optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.0)
# Leave out inner="eager" to have the graph compiled by Inductor.
step = apexfx.train_step(policy, objective=objective, optimizer=optimizer, opt_level="O0", max_grad_norm=1.0,
                         ddp=num_ranks > 1, inner="eager")

torch.manual_seed(1 + rank)
for update in range(1, UPDATES + 1):
    prompts = torch.randint(WORDS, (GROUPS // num_ranks, PROMPT)).repeat_interleave(SAMPLES, dim=0)
    ids = sample(policy, prompts)
    rewards = (ids[:, PROMPT:] == prompts.repeat(1, 2)).float().mean(1).view(-1, SAMPLES)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    with torch.no_grad():
        old = log_probs(policy, ids)
    for _ in range(EPOCHS):
        loss, measured = step(ids, old, advantages)
    if rank == 0 and update % 10 == 0:
        print(f"update {update}: reward {rewards.mean():.2f}, kl {measured['kl']:.3f}, norm {step.grad_norm:.3f}")

if num_ranks > 1:
    dist.destroy_process_group()
