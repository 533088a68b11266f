"""Models with half parameters: each level says that it casts them, and without the precision pass a step is the loop."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.tables import table

AS_WRITTEN = {"opt_level": "O0", "skip": ("precision",)}


class Adapter(nn.Module):
    """A frozen layer and a float32 adapter of it, as peft writes one."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x.to(self.down.weight.dtype)))).to(x.dtype)


class Language(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.words, self.norm, self.query = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 40)
        self.bfloat16()
        if kind == "adapters":
            self.requires_grad_(False)
            self.query, self.head = Adapter(self.query), Adapter(self.head)

    def forward(self, ids):
        x = self.norm(self.words(ids))
        weights = (self.query(x) @ x.mT).softmax(-1, dtype=torch.float32).to(x.dtype)
        return self.head(F.gelu(x + weights @ x))


def build(kind):
    torch.manual_seed(0)
    return Language(kind)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(40, (4, 9), generator=generator) for _ in range(count)]


def log_probabilities(model, ids):
    return model(ids[:, :-1]).float().log_softmax(-1).gather(-1, ids[:, 1:, None])


def loss_of(model, ids):
    return -log_probabilities(model, ids).mean()


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS = {"SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
              "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
              "masters": lambda params: apexfx.optimizers.FusedAdam(params, lr=0.01, master_weights=True)}


def update(model, optimizer, group, max_grad_norm=None):
    """Return the losses and gradients of a loop, as torch.autograd has them."""
    optimizer.zero_grad()
    losses = [loss_of(model, ids) for ids in group]
    for loss in losses:
        (loss / len(group)).backward()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(trained(model), max_grad_norm)
    optimizer.step()
    return torch.stack(losses).detach(), [p.grad for p in trained(model)]


CASES = {
    **{f"{kind}, {optimizer}": (kind, optimizer, {}) for optimizer in OPTIMIZERS for kind in ("bfloat16", "adapters")},
    "adapters, accumulation": ("adapters", "SGD", {"accumulate": 2}),
    "bfloat16, accumulation": ("bfloat16", "AdamW", {"accumulate": 2}),
    "adapters, clipping": ("adapters", "SGD", {"max_grad_norm": 0.1}),
    "bfloat16, clipping": ("bfloat16", "SGD", {"max_grad_norm": 0.1}),
    "bfloat16, in pieces": ("bfloat16", "SGD", {"fallback": "transform"}),
    "adapters, Inductor": ("adapters", "SGD", {"inner": "inductor"}),
    "bfloat16, Inductor": ("bfloat16", "AdamW", {"inner": "inductor"})}


@table(2, "name", CASES)
def test_without_the_precision_pass_a_step_computes_as_the_model_is_written(name):
    kind, optimizer, options = CASES[name]
    model = build(kind)
    optimizer, calls = OPTIMIZERS[optimizer](trained(model)), options.get("accumulate", 1)
    step = apexfx.train_step(model, objective=loss_of, optimizer=optimizer, **AS_WRITTEN, keep_grads=True,
                             **{"inner": "eager", **options})
    for i in range(2):
        eager, optimizer_of_eager = copy.deepcopy((model, optimizer))
        group = batches(4)[i * calls:(i + 1) * calls]
        expected = update(eager, optimizer_of_eager, group, options.get("max_grad_norm"))
        found = torch.stack([step(ids) for ids in group]), [p.grad for p in trained(model)]
        # Under Inductor a kernel rounds at its end alone; factors and sums of gradients are float32 in a step.
        exact, rounds = {"rtol": 0, "atol": 0}, {"rtol": 0.03, "atol": 3e-3}
        # A bfloat16 update rounds as its operands do, of which one may be larger than the result.
        last_bit = {"rtol": 2**-7, "atol": 1e-4} if kind == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(found[0], expected[0], **rounds if "inner" in options else exact)
        torch.testing.assert_close(found[1], expected[1], **rounds if "inner" in options else last_bit if options else exact)
        torch.testing.assert_close(trained(model), trained(eager), **rounds if "inner" in options else last_bit)
    assert not any("are half" in note for note in step.report.notes)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bfloat16", "adapters"])
def test_the_first_ratio_to_log_probabilities_of_the_model_itself_is_1(kind):
    def policy(model, ids, old):
        ratio = (log_probabilities(model, ids) - old).exp()
        return -ratio.mean(), (ratio - 1).abs().max()

    def furthest(**options):
        model, ids = build(kind), batches(1)[0]
        with torch.no_grad():
            old = log_probabilities(model, ids)
        return apexfx.train_step(model, objective=policy, optimizer=OPTIMIZERS["SGD"](trained(model)), inner="eager",
                                 **options)(ids, old)[1]

    assert furthest(**AS_WRITTEN) == 0 < furthest(opt_level="O0")


SAID = {"O0": "O0 computes with them in float32", "O1": "O1 computes op by op in half or float32",
        "O2": r"O2 casts the float32 ones \(query\.down\.weight, .*\) to torch\.bfloat16\.",
        "O3": r"O3 casts the float32 ones \(query\.down\.weight, .*\) to torch\.bfloat16, in place\."}


@table(1, "level", SAID)
def test_a_level_that_casts_half_parameters_says_so_once(level, caplog):
    model = build("adapters")
    step = apexfx.train_step(model, objective=loss_of, optimizer=OPTIMIZERS["SGD"](trained(model)), opt_level=level,
                             dtype=None if level == "O0" else torch.bfloat16, inner="eager")
    for batch in batches(2):
        step(batch)
    assert caplog.text.count("half parameter") == 1
    [note] = [note for note in step.report.notes if "half parameter" in note]
    assert re.search(rf"half parameters \(words\.weight, .*{SAID[level]}.*skip=\('precision',\)", note), note


@pytest.mark.parametrize("model, level", [
    (nn.Linear(4, 4), "O3"), (nn.Linear(4, 4).bfloat16(), "O3"),
    (nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.BatchNorm1d(4)), "O2")], ids=["float32", "bfloat16", "batch norm"])
def test_where_a_level_casts_no_half_parameter_nothing_is_said(model, level):
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters()), opt_level=level, dtype=torch.bfloat16)
    assert not step.report.notes
