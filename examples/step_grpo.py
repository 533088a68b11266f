"""Train a small language model by GRPO, whole steps of it: samples that end early, a clipped ratio, a reference, a checkpoint.

    python examples/step_grpo.py
    torchrun --standalone --nproc-per-node 2 examples/step_grpo.py

The task: say the prompt again, then end. A completion is rewarded by the share of these tokens that are right.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx

WORDS, END, PROMPT, LENGTH = 8, 0, 3, 6  # tokens; the one that ends a completion; tokens of a prompt, and of a completion at most
GROUPS, SAMPLES, ROUNDS, EPOCHS = 16, 8, 40, 2  # prompts of a round, completions of each, rounds, and passes over a round's
ACCUMULATE, WARM_UP, CLIP, BETA = 2, 8, 0.2, 0.02
CHECKPOINT = "step_grpo.pt"

rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if num_ranks > 1:
    dist.init_process_group("gloo")


class Policy(nn.Module):
    """Token ids (N, T) -> logits of the following tokens (N, T, WORDS)."""

    def __init__(self, width=32):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(PROMPT + LENGTH, width)
        self.attention, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.mlp, self.head = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)), nn.Linear(width, WORDS)

    def forward(self, ids):
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.attention(self.norm(h)).chunk(3, dim=-1)
        h = h + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return self.head(h + self.mlp(h))


def log_probs(model, ids):
    """Return the log-probability of each token of the completions, (N, LENGTH)."""
    logits = model(ids)[:, PROMPT - 1:-1]
    return -F.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten(), reduction="none").view(-1, LENGTH)


def sample(model, prompts):
    """Return prompts with completions (N, PROMPT + LENGTH), and which tokens count (N, LENGTH): up to the first END."""
    ids = F.pad(prompts, (0, LENGTH), value=END)  # of one length: one graph
    for place in range(PROMPT, PROMPT + LENGTH):
        ids[:, place] = torch.multinomial(model(ids)[:, place - 1].float().softmax(-1), 1)[:, 0]
    ends = (ids[:, PROMPT:] == END).int()
    mask = ends.cumsum(1) - ends == 0
    ids[:, PROMPT:].masked_fill_(~mask, END)  # padding lies behind, where causal attention never looks
    return ids, mask


def objective(model, ids, mask, old, advantages):
    new = log_probs(model, ids)
    with torch.no_grad():  # what no optimizer of the step holds is computed so, or frozen
        anchor = log_probs(reference, ids)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    distance = (anchor - new).exp() - (anchor - new) - 1

    def mean(x):  # over the tokens of all calls of an update, and of all ranks
        return apexfx.Mean(torch.where(mask, x, 0.0).sum(), mask.sum())

    return mean(BETA * distance - gain), {"kl": mean(distance).value.detach(), "ratio": mean(ratio).value.detach()}


torch.manual_seed(0)
policy = Policy()
reference = copy.deepcopy(policy).requires_grad_(False).eval()
optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: min(1.0, (updates + 1) / WARM_UP))
# Leave out inner="eager" to have the graphs compiled by Inductor.
options = {"opt_level": "O1", "dtype": torch.bfloat16, "inner": "eager"}
step = apexfx.train_step(policy, objective=objective, optimizer=optimizer, max_grad_norm=1.0, accumulate=ACCUMULATE,
                         ddp=num_ranks > 1, **options)
old_policy = apexfx.transform(policy, **options)  # the same parameters, rounded as in the step: its first ratios are 1

first_round = 1
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT)
    step.load_state_dict(saved["step"])  # model and optimizer
    schedule.load_state_dict(saved["schedule"])
    first_round = saved["round"] + 1

for number in range(first_round, ROUNDS + 1):
    torch.manual_seed(number * num_ranks + rank)  # a run that was stopped goes on with the same samples
    prompts = torch.randint(END + 1, WORDS, (GROUPS // num_ranks, PROMPT)).repeat_interleave(SAMPLES, dim=0)
    with torch.no_grad():
        ids, mask = sample(old_policy, prompts)
        old = log_probs(old_policy, ids)
    right = (ids[:, PROMPT:2 * PROMPT + 1] == F.pad(prompts, (0, 1), value=END)) & mask[:, :PROMPT + 1]
    rewards = right.float().mean(1).view(-1, SAMPLES)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    for _ in range(EPOCHS):
        for batch in zip(*(tensor.chunk(ACCUMULATE) for tensor in (ids, mask, old, advantages))):
            loss, measured = step(*batch)
            if step.updated:
                schedule.step()
    if rank == 0 and number % 10 == 0:
        print(f"round {number}: reward {rewards.mean():.2f}, length {mask.sum(1).float().mean():.1f}, kl {measured['kl']:.3f}, "
              f"ratio {measured['ratio']:.3f}, norm {step.grad_norm:.3f}")
        torch.save({"step": step.state_dict(), "schedule": schedule.state_dict(), "round": number}, CHECKPOINT)

if num_ranks > 1:
    dist.destroy_process_group()
