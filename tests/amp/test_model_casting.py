"""What is cast at O0, O2, O3, what the wrapped forward does to its values, and copies of the model (APEX_SPEC 1.4)."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import numpy
import pytest
import torch
from torch import nn

from apexfx import amp
from apexfx.config import HALVES
from tests.amp.amp_cases import ConvNet, batch


class Custom:
    """A batch class of a user: implements `.to`, as Apex asks."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, dtype):
        return Custom(self.tensor.to(dtype))


class Subclass(nn.BatchNorm2d):
    pass


class Tree(nn.Module):
    """Returns what it is given, with a note of the dtypes it saw."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return args[0] if args else kwargs


def initialized(model, level="O2", **options):
    return amp.initialize(model, opt_level=level, verbosity=0, dtype=torch.bfloat16, **options)


def test_o2_keeps_affine_batch_norm_only():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False), nn.GroupNorm(1, 2), Subclass(2),
                          nn.LayerNorm(2), nn.LSTM(2, 2))
    kinds = {str(i): {t.dtype for t in m.state_dict(keep_vars=True).values()} for i, m in enumerate(model)}
    initialized(model)
    found = {str(i): {t.dtype for t in (*m.parameters(), *m.buffers())} for i, m in enumerate(model)}
    full, half = {torch.float32}, {torch.bfloat16}
    assert found["0"] == found["3"] == found["5"] == found["6"] == half
    assert found["1"] == found["4"] == full | {torch.int64}
    assert found["2"] == half | {torch.int64}
    assert kinds["0"] == full


def test_o3_casts_everything_and_o0_brings_double_down():
    assert initialized(ConvNet(), "O3").norm.weight.dtype == torch.bfloat16
    assert initialized(ConvNet().double(), "O0").conv.weight.dtype == torch.float32


def test_parameters_keep_their_identity_and_their_gradients_follow():
    model = ConvNet()
    model(batch()[0]).sum().backward()
    before = list(model.parameters())
    initialized(model)
    assert all(a is b for a, b in zip(model.parameters(), before))
    assert model.conv.weight.grad.dtype == torch.bfloat16 and model.norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("level", "options", "expected"), [
    ("O0", {}, torch.float32), ("O1", {}, torch.float32), ("O2", {}, torch.float32), ("O3", {}, torch.float32),
    ("O2", {"cast_model_outputs": torch.bfloat16}, torch.bfloat16), ("O1", {"cast_model_outputs": torch.float64}, torch.float64),
    ("O3", {"cast_model_outputs": torch.float16}, torch.float16),
])  # fmt: skip
def test_dtype_of_the_outputs(level, options, expected):
    model = initialized(ConvNet(), level, **options)
    assert model(batch()[0]).dtype == expected


def test_o1_outputs_other_than_half_are_left_alone():
    model = initialized(Tree(), "O1")
    doubles = torch.ones(2, dtype=torch.float64)
    assert model(doubles) is doubles
    assert model([torch.ones(2).bfloat16(), torch.ones(2, dtype=torch.int64)])[1].dtype == torch.int64


def test_inputs_of_any_kind_are_cast_or_left_alone():
    """Containers are those of `precision/test_call_casts.py`."""
    x, half = torch.ones(2), torch.bfloat16
    array = numpy.ones(2, dtype=numpy.float32)

    class Looks(Tree):
        def forward(self, first, array_, *, custom, packed, module):
            assert custom.tensor.dtype == packed.data.dtype == first.dtype == half and array_ is array
            assert module.weight.dtype == torch.float32  # Apex called `.to` on modules too
            return first

    packed = nn.utils.rnn.pack_sequence([x[:, None]])
    assert initialized(Looks())(x.double(), array, custom=Custom(x), packed=packed, module=nn.Linear(2, 2)).dtype == torch.float32


@pytest.mark.long
def test_model_outputs_of_transformers_keep_their_class():
    transformers = pytest.importorskip("transformers.modeling_outputs")

    class Holds(Tree):
        def forward(self, kind):
            return kind(logits=torch.ones(2).bfloat16())

    out = initialized(Holds())(transformers.SequenceClassifierOutput)
    assert type(out) is transformers.SequenceClassifierOutput and out.logits.dtype == out["logits"].dtype == torch.float32


def test_only_forward_casts_and_o1_leaves_other_methods_in_float32():
    class Encoder(ConvNet):
        def encode(self, x):
            return self.conv(x)

    x = batch()[0]
    assert initialized(Encoder(), "O1").encode(x).dtype == torch.float32
    with pytest.raises(RuntimeError):
        initialized(Encoder(), "O2").encode(x)


def saved(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved, copy.copy],
                         ids=["deep", "pickle", "save", "copy"])
def test_a_copy_runs_its_own_parameters(copied, level):
    model, x = initialized(ConvNet(), level).eval(), batch()[0]
    other = copied(model)
    assert type(other).__name__ == "ConvNet" and isinstance(other, ConvNet)
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.0)
    assert other(x).abs().max() == 0
    assert (model(x).abs().max() == 0) == (copied is copy.copy)  # which shares them


def test_a_forward_set_on_the_instance_is_kept():
    model = ConvNet()
    model.forward = lambda x: model.conv(x).sum()
    initialized(model, "O2")
    out = model(batch()[0])
    assert out.dim() == 0 and out.dtype == torch.float32


def test_state_dict_is_float32_and_loads_anywhere():
    torch.manual_seed(0)
    model = ConvNet()
    before = copy.deepcopy(model.state_dict())
    initialized(model, "O3")
    state = model.state_dict()
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    assert all(torch.equal(state[k].bfloat16(), v.bfloat16()) for k, v in before.items() if v.is_floating_point())
    ConvNet().load_state_dict(state)
    assert model.conv.state_dict()["weight"].dtype == torch.float32  # a submodule's own, too


def test_loading_float32_rounds_into_the_half_parameters():
    model = initialized(ConvNet(), "O3")
    source = ConvNet()
    model.load_state_dict(source.state_dict())
    assert torch.equal(model.conv.weight, source.conv.weight.bfloat16())


def test_torch_compile_of_an_initialised_model():
    x = batch()[0]
    model = initialized(ConvNet(), "O2").eval()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
    model = initialized(ConvNet(), "O1").eval()
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))  # left to eager, with a warning


def test_casts_stay_in_the_thread_and_in_the_model():
    model = initialized(ConvNet(), "O1")
    inside, go_on = threading.Event(), threading.Event()
    results = {}

    def hook(module, args):
        inside.set()
        assert go_on.wait(30)

    model.conv.register_forward_pre_hook(hook)
    thread = threading.Thread(target=lambda: results.update(model=model(batch()[0])))
    thread.start()
    assert inside.wait(30)
    w = torch.ones(2, 2)
    results["other"] = torch.mm(w, w).dtype
    go_on.set()
    thread.join()
    assert results["other"] == torch.float32 == torch.mm(w, w).dtype and "model" in results


def test_a_buffer_that_modules_share_stays_one():
    model, shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.zeros(2)
    for module, name in ((model[0], "a"), (model[0], "b"), (model[1], "c")):
        module.register_buffer(name, shared)
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model[0].a is model[0].b is model[1].c and shared.dtype in HALVES
