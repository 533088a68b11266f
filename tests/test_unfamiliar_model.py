"""The network of unfamiliar_model.py runs, and is what its questions take it to be. Nothing here asks a report for an answer."""

import pytest
import torch
from torch import Tensor

import apexfx
from tests.unfamiliar_model import QUESTIONS, line_of, make_inputs, make_labels, make_model, objective


def logits(**options) -> Tensor:
    model = make_model()
    if options:
        model = apexfx.transform(model, dtype=torch.bfloat16, inner="eager", **options)
    return model(*make_inputs())[0].detach()


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


def test_twelve_questions_have_answers():
    assert len(QUESTIONS) == 12
    assert f"unfamiliar_model.py:{line_of('print(')}," in QUESTIONS[-1][1]


def test_changed_line_changes_nothing_in_float32():
    torch.testing.assert_close(make_model(2)(*make_inputs())[0], logits(), rtol=0, atol=0)


@pytest.mark.long
def test_frequencies_alone_spoil_bfloat16():
    assert relative_error(logits(opt_level="O1"), logits()) > 0.1
    assert relative_error(logits(opt_level="O1", precision={"phase.frequencies": "float32"}), logits()) < 0.02


def test_trains_in_a_step():
    model = make_model()
    batch = *make_inputs(), make_labels()
    before = objective(make_model(), *batch)
    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.AdamW(model.parameters()), opt_level="O0",
                             inner="eager")
    torch.testing.assert_close(step(*batch), before.detach())
    assert step(*batch) < before


def test_statistics_of_the_data_set_stay():
    stem = make_model().stem
    before = stem.loudness.running_mean.clone()
    stem(make_inputs()[0])
    assert torch.equal(stem.loudness.running_mean, before) and stem.norm1.num_batches_tracked == 1
