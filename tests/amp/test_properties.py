"""The property table, its overrides and their errors (APEX_SPEC 1.1, 1.2)."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

from apexfx import amp
from apexfx.amp._amp_state import _amp_state
from apexfx.amp.frontend import O0, O1, O2, O3, Properties, opt_levels
from apexfx.amp.scaler import LossScaler

HALF = torch.float16
TABLE = {
    None: (False, None, None, False, None, None, 1.0),
    "O0": (True, "O0", torch.float32, False, None, False, 1.0),
    "O1": (True, "O1", None, True, None, None, "dynamic"),
    "O2": (True, "O2", HALF, False, True, True, "dynamic"),
    "O3": (True, "O3", HALF, False, False, False, 1.0),
}
NAMES = ("enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights",
         "loss_scale")


def options(opt_level="O1", **given):
    amp.initialize(nn.Linear(2, 2), opt_level=opt_level, verbosity=0, dtype=HALF, **given)
    return _amp_state.opt_properties


SIGNATURES = {
    "initialize": """models optimizers=None enabled=True opt_level='O1' cast_model_type=None patch_torch_functions=None
        keep_batchnorm_fp32=None master_weights=None loss_scale=None cast_model_outputs=None num_losses=1 verbosity=1
        min_loss_scale=None max_loss_scale=16777216.0""",
    "scale_loss": "loss optimizers loss_id=0 model=None delay_unscale=False delay_overflow_check=False",
    "state_dict": "destination=None", "load_state_dict": "state_dict", "master_params": "optimizer",
    "half_function": "fn", "float_function": "fn", "promote_function": "fn",
    "register_half_function": "module name", "register_float_function": "module name",
    "register_promote_function": "module name", "disable_casts": "",
    "init": "enabled=True loss_scale='dynamic' enable_caching=True verbose=False allow_banned=False",
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_apex(name):
    positional = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(getattr(amp, name)).parameters.values() if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert positional == SIGNATURES[name].split()


def test_amp_state_is_a_module_and_an_object():
    import sys

    assert amp._amp_state is _amp_state
    module = sys.modules["apexfx.amp._amp_state"]
    assert module._amp_state is _amp_state and callable(module.maybe_print) and callable(module.warn_or_err)
    assert module.master_params is amp.master_params
    assert (_amp_state.hard_override, _amp_state.allow_incoming_model_not_fp32, _amp_state.verbosity) == (False, False, 1)
    assert not hasattr(_amp_state, "opt_properties")


@pytest.mark.parametrize("level", TABLE)
def test_table(level):
    properties = Properties() if level is None else options(level)
    assert tuple(getattr(properties, name) for name in NAMES) == TABLE[level]
    assert tuple(properties.options) == NAMES


def test_levels_are_objects_that_fill_in_properties():
    assert [type(opt_levels[name]) for name in ("O0", "O1", "O2", "O3")] == [O0, O1, O2, O3]
    assert opt_levels["O2"](Properties()).master_weights is True


def test_half_type_of_the_cpu_is_bfloat16():
    amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert _amp_state.opt_properties.cast_model_type == torch.bfloat16


@pytest.mark.parametrize("level", ["01", 1, "o1", "O4", None])
def test_unknown_level_mentions_the_letter(level):
    with pytest.raises(RuntimeError, match="letter O, not the number zero"):
        options(level)


def test_cudnn_must_be_enabled():
    torch.backends.cudnn.enabled = False
    try:
        with pytest.raises(RuntimeError, match="cudnn.enabled"):
            options()
    finally:
        torch.backends.cudnn.enabled = True


CONTRADICTIONS = [
    *(("O1", {"cast_model_type": dtype}, "O1 inserts casts around Torch functions") for dtype in (HALF, torch.bfloat16)),
    *(("O1", {"keep_batchnorm_fp32": v}, "keep_batchnorm_fp32 should be None") for v in (True, False, "True", "False")),
    *(("O1", {"master_weights": value}, "master_weights with O1") for value in (True, False)),
    *((level, {"patch_torch_functions": True}, "opt_level='O1'") for level in ("O0", "O2", "O3")),
]


@pytest.mark.parametrize(("level", "given", "message"), CONTRADICTIONS)
def test_contradicting_overrides_raise_and_under_hard_override_are_warnings(level, given, message, capsys):
    with pytest.raises(RuntimeError, match=message):
        options(level, **given)
    _amp_state.hard_override = True
    properties = options(level, **given)
    ((name, value),) = given.items()
    assert getattr(properties, name) == {"True": True, "False": False}.get(value, value)
    printed = capsys.readouterr().out
    assert printed.startswith("Warning:  ") and message in printed


@pytest.mark.parametrize("value", [2, "yes", "true"])
def test_keep_batchnorm_must_be_a_boolean(value):
    with pytest.raises(AssertionError, match="keep_batchnorm_fp32 must be"):
        options("O2", keep_batchnorm_fp32=value)


@pytest.mark.parametrize(("value", "parsed"), [("True", True), ("False", False), (True, True)])
def test_keep_batchnorm_parses_strings(value, parsed):
    assert options("O3", keep_batchnorm_fp32=value).keep_batchnorm_fp32 is parsed


@pytest.mark.parametrize(("value", "parsed"), [("dynamic", "dynamic"), ("128.0", 128.0), (128, 128.0)])
def test_loss_scale_parses(value, parsed):
    assert options("O1", loss_scale=value).loss_scale == parsed


@pytest.mark.parametrize("value", ["big", 0, -1.0, math.nan, math.inf, "nan", None, True])
def test_loss_scale_must_be_a_number(value):
    with pytest.raises(ValueError, match=f"loss_scale={value!r} was given, expected 'dynamic' or a positive, finite number"):
        LossScaler(value)
    if value is not None:  # the level's
        with pytest.raises(ValueError, match="expected 'dynamic' or a positive, finite number"):
            options("O1", loss_scale=value)
    for limits in ({"max_loss_scale": value}, {"min_loss_scale": value}, {"init_scale": value}, {"scale_factor": value}):
        if value not in (None, math.inf) and not (value == 0 and "min_loss_scale" in limits):
            with pytest.raises(ValueError, match="was given, expected"):
                LossScaler("dynamic", **limits)
    for scaler in (LossScaler("dynamic"), LossScaler(128.0)):
        before = scaler.state_dict()
        for wrong in ({"loss_scale": value, "unskipped": 3}, {"loss_scale": 4.0, "unskipped": value}, {"loss_scale": 4.0}, value):
            if not (isinstance(wrong, dict) and wrong.get("unskipped") == 0):
                with pytest.raises(ValueError, match="expected|was given"):
                    scaler.load_state_dict(wrong)
        with pytest.raises(ValueError, match="positive, finite"):
            scaler._loss_scale = value
        assert scaler.state_dict() == before


@pytest.mark.parametrize("value", [0, -1, 1.5, None, True, "2"])
def test_counts_are_whole_numbers(value):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"num_losses={value!r} was given"):
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), num_losses=value)
    assert model.weight.dtype == torch.float32 and not hasattr(amp._amp_state, "opt_properties")
    with pytest.raises(ValueError, match="scale_window="):
        LossScaler("dynamic", scale_window=value)


@pytest.mark.parametrize(
    ("level", "given"),
    [
        ("O0", {"cast_model_type": torch.bfloat16}), ("O0", {"master_weights": True}), ("O0", {"loss_scale": "dynamic"}),
        ("O0", {"keep_batchnorm_fp32": True}), ("O0", {"cast_model_type": False}), ("O3", {"cast_model_type": False}),
        ("O2", {"master_weights": False}), ("O3", {"loss_scale": "dynamic"}), ("O3", {"keep_batchnorm_fp32": True}),
        ("O2", {"cast_model_type": False}), ("O2", {"cast_model_type": torch.bfloat16}),
        ("O1", {"cast_model_type": torch.float32}), ("O1", {"cast_model_type": False}),
    ],
)  # fmt: skip
def test_accepted_without_a_word(level, given):
    properties = options(level, **given)
    assert all(getattr(properties, name) == value for name, value in given.items())


def test_o1_without_patching_is_loss_scaling_only():
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", patch_torch_functions=False, verbosity=0)
    assert type(model) is nn.Linear and _amp_state.session.executor is None
    assert _amp_state.loss_scalers[0].dynamic


def test_an_unknown_option_is_refused():
    with pytest.raises(AttributeError, match="no option 'speed'"):
        Properties().speed = 1
    with pytest.raises(AttributeError, match="no option"):
        _ = Properties().speed


def test_dtype_must_be_a_half_type():
    with pytest.raises(ValueError, match="dtype=torch.float32 was given"):
        amp.initialize(nn.Linear(2, 2), dtype=torch.float32, verbosity=0)


def test_verbosity_one_prints_the_options(capsys):
    amp.initialize(nn.Linear(2, 2), opt_level="O2", loss_scale="128.0", keep_batchnorm_fp32=None, dtype=HALF)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Selected optimization level O2:") and len(lines) == 18
    assert lines[8] == "loss_scale             : dynamic" and lines[9] == "Overridden: loss_scale='128.0'"
    assert lines[-1] == "loss_scale             : 128.0"


def test_options_that_nothing_overrides_are_printed_once(capsys):
    amp.initialize(nn.Linear(2, 2), opt_level="O0")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[-1] == "Nothing overrides them."


def test_verbosity_zero_prints_nothing(capsys):
    options("O2")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verbosity", [0, 1])
def test_verbosity_zero_hides_overflows_too(verbosity, capsys):
    model = nn.Linear(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=verbosity)
    with amp.scale_loss(model(torch.ones(1, 2)).sum() * float("inf"), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert ("Gradient overflow" in capsys.readouterr().out) == (verbosity == 1)


def test_options_are_printed_by_the_first_rank_and_overflows_by_all(monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    _amp_state.maybe_print("options", rank0=True)
    _amp_state.maybe_print("Gradient overflow.")
    assert capsys.readouterr().out == "Gradient overflow.\n"


def test_verbosity_two_prints_every_cast(capsys):
    layer = nn.Linear(2, 2)
    model = amp.initialize(nn.Sequential(layer, layer), dtype=HALF, verbosity=2)
    capsys.readouterr()
    for _ in range(2):
        model(torch.ones(1, 2))
        assert capsys.readouterr().out.splitlines() == ["Float->Half (linear)"] * 3 + ["Float->Half (linear, cache hit)"] * 2


def test_initialize_emits_no_warning(recwarn):
    options("O2")
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]
