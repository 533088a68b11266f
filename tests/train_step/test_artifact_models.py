"""Artifacts of what people train, in small: a new process with an empty cache computes the bits of the one that compiled."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

from apexfx.tools.simulate.models import Bottleneck
from tests import fresh_process
from tests.distributed.launch import run_ranks
from tests.train_step.test_artifact import in_new_process, refused, train


def bert(p=0.1):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=p, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32 * 12, 10))


def resnet(memory_format=torch.channels_last):
    return nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
                         Bottleneck(8, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1),
                         nn.Linear(32, 10)).to(memory_format=memory_format)


class Gpt2(nn.Module):
    def __init__(self, **config):
        super().__init__()
        from transformers import GPT2Config, GPT2Model
        self.body = GPT2Model(GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=16, vocab_size=50, use_cache=False,
                                         bos_token_id=0, eos_token_id=0, **config))
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        return self.head(self.body(tokens).last_hidden_state[:, -1])


def wrapped(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)
    return wrapper


class Collector:
    """What transformers 5 has under torch.compile in the place of a context variable."""

    def __init__(self):
        self.collected, self.is_compiling = None, False

    @contextlib.contextmanager
    def collecting(self):
        self.collected, self.is_compiling = {}, True
        try:
            yield self.collected
        finally:
            self.collected, self.is_compiling = None, False


class Output:
    @wrapped
    def __init__(self, hidden):
        self.hidden = hidden


class Scales(dict):
    def get(self, key):
        return super().get(str(key)) or 2.0


COLLECTOR, SCALES = Collector(), Scales()


class Collects(nn.Module):
    """Writes Python objects, which are in the end as they were."""

    def __init__(self, kind="linear"):
        super().__init__()
        self.body, self.head, self.kind, self.scales = nn.Linear(6, 8), nn.Linear(8, 10), kind, SCALES

    @wrapped
    def forward(self, x):
        self.kind, scales, self.scales = "linear", self.scales, None
        with COLLECTOR.collecting() as collected:
            collected["body"] = torch.tanh(self.body(x)) * scales.get("body")
            output = Output(collected["body"])
        self.scales = scales
        return self.head(output.hidden)


def features(*size):
    return torch.randn(4, *size), torch.randint(10, (4,))


def tokens():
    return torch.randint(50, (2, 16)), torch.randint(10, (2,))


MODELS = {  # name -> how it is built, its batches, another, and how that differs
    "bert": (bert, functools.partial(features, 12, 32), lambda: bert(p=0.2), "dropout.* 0.1, and the program has 0.2"),
    "resnet": (resnet, functools.partial(features, 3, 24, 24), lambda: resnet(torch.contiguous_format),
               r"parameter 0.weight. The file has .* strides \(147, 1, 21, 3\).* has .* strides \(147, 49, 7, 1\)"),
    "gpt2": (Gpt2, tokens, lambda: Gpt2(layer_norm_epsilon=1e-4), "eps. The file has 1e-05, and the program has 0.0001"),
    "collects": (Collects, functools.partial(features, 6), lambda: Collects("other"),
                 "model.kind. The file has 'linear', and the program has 'other'"),
}
CASES = [("bert", {}), ("bert", {"opt_level": "O1", "accumulate": 4}), ("resnet", {"accumulate": 4}),
         ("resnet", {"opt_level": "O2", "dtype": torch.float16}), ("gpt2", {}), ("gpt2", {"opt_level": "O2", "accumulate": 4}),
         ("collects", {})]


def arguments(name, options):
    if name == "gpt2":
        pytest.importorskip("transformers")
    build, batch, *_ = MODELS[name]
    return {"num_steps": 50, "build": build, "batch": batch, **options}


@pytest.mark.long
@pytest.mark.parametrize("name, options", CASES, ids=lambda x: x if type(x) is str else " ".join(map(str, x.values())) or "O0")
def test_a_process_that_loads_it_computes_the_same_bits(name, options, tmp_path):
    first = in_new_process(tmp_path / "step", tmp_path / "cache", **arguments(name, options))
    again = in_new_process(tmp_path / "step", tmp_path / "empty", compiles=False, **arguments(name, options))
    assert first[4] == [] and again[:5] == (*first[:2], 0, [], [])
    fresh_process.call(another_is_refused, tmp_path / "step", name, options)


def another_is_refused(path, name, options):
    """In a process of its own: transformers counts the models that it has built, and a graph of one depends on that."""
    _, batch, other, difference = MODELS[name]
    refused(path, difference, model=other(), batch=batch(), **options)


def of_ranks(rank, world_size, folder, cache, compiles, options):
    torch.save(train(folder / "step", folder / cache, compiles=compiles, ddp=True, seed=1 + rank, **options),
               folder / f"{cache}.{rank}")


@pytest.mark.long
def test_ranks_do_so_too(tmp_path):
    for cache in ("cache", "empty"):
        run_ranks(of_ranks, 2, tmp_path, cache, cache == "cache", arguments("bert", {"opt_level": "O2", "accumulate": 4}))
    for rank in range(2):
        first, again = (torch.load(tmp_path / f"{cache}.{rank}", weights_only=False) for cache in ("cache", "empty"))
        assert first[4] == [] and again[:5] == (*first[:2], 0, [], [])
