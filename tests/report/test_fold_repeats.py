"""Equal layers fold into one line; names, dtypes and different things stay apart."""

from __future__ import annotations

import pytest

from apexfx.report.fold_repeats import fold, numbers


@pytest.mark.parametrize("values, text", [
    ([7, 7], "7"), ([2, 5], "{2, 5}"), ([0, 1], "{0, 1}"), ([0, 1, 2], "{0..2}"), ([1, 4, 9], "{1, 4, 9}"),
    (range(48), "{0..47}"), (range(0, 48, 2), "{0..46, 24 of them}"),
])  # fmt: skip
def test_numbers(values, text):
    assert numbers(values) == text


def test_repeated_layers_become_one_line():
    texts = [f"encoder.layer.{i}.norm{j}: statistics over 2 ranks  (model.py:{40 + j})" for i in range(48) for j in (1, 2)]
    assert fold(texts) == [(96, "encoder.layer.{0..47}.norm{1, 2}: statistics over 2 ranks  (model.py:{41, 42})")]


def test_names_that_end_in_digits_are_not_numbers():
    texts = ["norm: x f32 -> bf16", "norm: x f32 -> f16", "norm: torch.float16", "norm: torch.float32", "x: aten.conv2d",
             "x: aten.conv1d"]  # fmt: skip
    assert fold(texts) == [(1, text) for text in texts]


def test_every_text_is_counted_once():
    texts = ["bn1: a", "bn2: a", "layer1.0.bn1: a", "layer2.1.bn2: a", "head: a", "", "12"]
    folded = fold(texts)
    assert sum(number for number, _ in folded) == len(texts)
    assert folded == [(2, "bn{1, 2}: a"), (2, "layer{1, 2}.{0, 1}.bn{1, 2}: a"), (1, "head: a"), (1, ""), (1, "12")]
