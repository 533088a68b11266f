"""What people publish, in small: each program trains through every entry as it does in eager, or is refused by name."""

from __future__ import annotations

import functools

import pytest
import torch

import apexfx
from apexfx.testing import tolerance
from tests.tables import table
from tests.world import generative, hugging_face, kinds, language, others, public, reports, vision  # noqa: F401
from tests.world.script import ENTRIES, PROGRAMS, distance, train

# oneDNN has no such LSTM, and torch.complex() takes no bfloat16; torch.autocast calls them all the same.
NO_HALF_IN_EAGER = ("word_lstm", "a_complex_layer", "tags_of_a_sentence")
SLOW = ("curriculum", "adversarial_networks_with_spectral_norm", "adversarial_networks_with_gradient_penalty", "whisper",
        "vision_transformer", "truncated_backpropagation")
DEAR = ("rope_in_place", "rope_by_halves", "rope_by_complex_numbers", "checkpointed_decoder", "attention_with_masks",
        "adversarial_networks", "flow_of_couplings", "variational_autoencoder", "detection", "diffusion", "selective_state_space",
        "forecasts_by_quantiles", "tags_of_a_sentence", "router_logits", "mixture_of_experts_by_rows")
# Each program through one entry at one level; `make test` takes every fifth of those that take no time.
QUICK = [(name, ENTRIES[i // 3 % len(ENTRIES)]) for i, name in enumerate(PROGRAMS) if name not in (*SLOW, *DEAR)]
eager = functools.cache(lambda name, level: train(name, "eager", level))


def bounds(name, level):
    """Return how far the losses, and all that moves, may be from float32 in eager."""
    if level == "O0":
        return 1e-5, 1e-5
    half = (0.0, 0.0) if name in NO_HALF_IN_EAGER else distance(eager(name, "O1"), eager(name, "O0"))
    return tuple(2 * lost + tolerance(torch.bfloat16)["rtol"] for lost in half)


def check(name, entry, level, inner="eager", **options):
    if PROGRAMS[name].needs:
        pytest.importorskip(PROGRAMS[name].needs)
    if entry in PROGRAMS[name].refused:
        with pytest.raises(Exception, match=f"(?s){PROGRAMS[name].refused[entry]}"):
            train(name, entry, level, inner=inner, **options)
        return
    found = distance(train(name, entry, level, inner=inner, **options), eager(name, "O0"))
    assert all(error <= bound for error, bound in zip(found, bounds(name, level))), (found, bounds(name, level))


OTHERS = [pytest.param(name, entry, marks=pytest.mark.long) for name in PROGRAMS for entry in ENTRIES
          if (name, entry) not in QUICK]


@table(len(QUICK) // 5, "name, entry", [*QUICK, *OTHERS], ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_a_program_trains_as_in_eager(name, entry):
    check(name, *entry)


# Under the default compiler each program goes through one entry at one level; dear ones in `make test-long`.
UNDER_INDUCTOR = [pytest.param(name, ENTRIES[(i + 1) % len(ENTRIES)], marks=[pytest.mark.long] if name in DEAR else [])
                  for i, name in enumerate(PROGRAMS) if name not in SLOW]
# Inductor draws by a generator of its own, unless it is told to draw as eager does.
DRAWS = ("diffusion", "dropout_after_a_relu_in_place", "variational_autoencoder", "point_clouds", "trajectories",
         "forecasts_by_quantiles")


@table(1, "name, entry", UNDER_INDUCTOR, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_a_program_trains_under_inductor(name, entry):
    check(name, *entry, inner="inductor", **({"inner_options": {"fallback_random": True}} if name in DRAWS else {}))


@pytest.mark.parametrize("name", [pytest.param("whisper", marks=pytest.mark.long), "vision_transformer"])
def test_a_trainer_trains_a_transformed_model_as_the_plain_one(name, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    losses = []
    for wrap in (lambda model: model, lambda model: apexfx.transform(model, opt_level="O0", inner="eager")):
        torch.manual_seed(0)
        script = PROGRAMS[name].build()
        data = [{key: value[0] for key, value in script.batch(step, None).items()} for step in range(10)]
        arguments = TrainingArguments(tmp_path, per_device_train_batch_size=2, num_train_epochs=1, logging_steps=1, use_cpu=True,
                                      save_strategy="no", report_to="none", disable_tqdm=True)
        trainer = Trainer(wrap(script.model), arguments, train_dataset=data)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(losses[0]) == 5 and losses[0] == pytest.approx(losses[1], rel=1e-5)
