"""Whatever torch raises while a step is captured and compiled comes out in words of this package: why, where, what to write."""

from __future__ import annotations

import copy
import functools
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.train_step.capture_errors import _OBSTACLES, NotOneGraph
from tests.small_models import take_step
from tests.tables import table

MASK = torch.tensor([True, False, True])


def step_of(model, objective, **options):
    torch.compiler.reset()
    return apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                             **{"opt_level": "O0", "inner": "eager", **options})


class Logits(torch.distributions.Categorical):
    def first(self):
        return super().logits[..., 0]


class Cached(nn.Linear):
    @functools.cached_property
    def scale(self):
        return 2.0


LOCK = threading.RLock()


def acquired(model, x, k):
    LOCK.acquire()
    loss = model(x).sum()
    LOCK.release()
    return loss


def checkpointed(use):
    return lambda model, x, k: use(checkpoint(lambda x: F.dropout(model(x)), x, use_reentrant=False)).sum()


def scanned(model, x, k):
    from torch._higher_order_ops.scan import scan

    return scan(lambda total, x: (total + x, total * x), torch.zeros(3), model(x), dim=0)[1].sum()


DROPOUT = "checkpoints activations around random numbers"
# name -> objective, what is said, whether with the line of this file, and further options.
REFUSED = {
    **{f"dropout in a checkpoint, then {name}": (checkpointed(use), f"{DROPOUT}.*\n.*Checkpoint without dropout", False, {})
       for name, use in {"a mask": lambda y: y[MASK], "masked_select": lambda y: y.masked_select(y > 0),
                         "nonzero": lambda y: y[y[:, 0].nonzero()], "a number": lambda y: y * y.detach().sum().item()}.items()},
    "a property of super()": (lambda model, x, k: Logits(logits=model(x)).first().sum(),
                              "TypeError: 'lazy_property' .*, where eager raises nothing(?s:.*)Write that otherwise", False, {}),
    "acquire()": (acquired, "a lock is taken", True, {}),
}


@table(7, "name", REFUSED)
def test_a_refusal_says_why_and_what_to_write(name):
    objective, said, has_line, options = REFUSED[name]
    step = step_of(nn.Linear(3, 3), objective, **options)
    with pytest.raises(NotOneGraph, match=f"^apexfx: the training step cannot be captured as one graph: (?:.*){said}") as raised:
        for k in (2, 3, 4):
            step(torch.randn(3, 3), k)
    assert raised.value.__cause__ is not None
    assert not has_line or "test_capture_errors.py:" in str(raised.value)


def test_the_types_of_graph_breaks_are_torch_s():
    known = torch._dynamo.exc._load_gb_type_to_gb_id_map()
    named = [re.match(r"\\A\(\?:(.*)\)\\n", pattern.pattern) for pattern, *_ in _OBSTACLES]
    types = [re.sub(r"\\(.)", r"\1", name) for each in filter(None, named) for name in each[1].split("|")]
    assert len(types) == 6 and not set(types) - set(known)


def test_a_cached_property_is_read_before():
    model = Cached(3, 3)
    step = step_of(model, lambda model, x: (model(x) * model.scale).sum())
    if hasattr(functools.cached_property(len), "lock"):  # Python 3.11
        with pytest.raises(NotOneGraph, match="functools.cached_property takes one, too"):
            step(torch.randn(3, 3))
        assert model.scale == 2.0
    step(torch.randn(3, 3))


@pytest.mark.parametrize("loss, holds", [
    (lambda model, x: model(x).sum(), ""),
    (lambda model, x: model(x)[x > 0].sum(), ", which holds a number .*test_capture_errors.py"),
])
def test_what_inductor_fails_at_is_told_as_its_failure(loss, holds):
    def fail(graph):
        raise KeyError("buf29")

    with torch._inductor.config.patch(post_grad_custom_post_pass=fail), \
            pytest.raises(NotOneGraph, match=f"Inductor .* cannot compile this graph{holds}.*: KeyError: 'buf29'") as raised:
        step_of(nn.Linear(3, 3), loss, inner="inductor")(torch.randn(3, 3))
    assert "inner='eager', which runs it op by op" in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError) and not hasattr(raised.value, "__notes__")


FROZEN = {"a layer": lambda model: model[2].requires_grad_(False), "a bias": lambda model: model[2].bias.requires_grad_(False),
          "all but one": lambda model: [p.requires_grad_(p is model[2].weight) for p in model.parameters()]}


@pytest.mark.long
@pytest.mark.parametrize("frozen, inner", [(frozen, inner) for inner in ("eager", "inductor") for frozen in FROZEN])
def test_what_is_frozen_behind_graphs_of_several_sizes_stays(frozen, inner):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Dropout(0.0), nn.Linear(8, 50))
    expected, x = copy.deepcopy(model), torch.randint(0, 50, (8, 4))
    torch.compiler.reset()
    step = apexfx.train_step(model, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), opt_level="O0", inner=inner,
                             optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    changes = {3: nn.Module.eval, 4: lambda model: FROZEN[frozen](model.train())}
    for call, rows in enumerate((8, 3, 5, 8, 8)):
        for each in (model, expected) if call in changes else ():
            changes[call](each)
        step(*((x, x) if rows == 8 else (x[:rows], x[:rows])))  # one tensor twice, or two
        take_step(optimizer, F.cross_entropy(expected(x[:rows]).flatten(0, 1), x[:rows].flatten()))
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_scan_is_compiled_and_proved():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.randn(3, 3)
    expected = copy.deepcopy(model)
    step = step_of(model, scanned, inner="inductor")
    loss = scanned(expected, x, 0)
    loss.backward()
    torch.testing.assert_close(step(x, 0), loss.detach())
    torch.optim.SGD(expected.parameters(), step.optimizer.param_groups[0]["lr"]).step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert "code proved" in str(step.report)
