"""Models in every style on one process: an override of the precision by module path reaches that module and no other.

What the graphs compute in is read off the ops as they run, by the storage of the parameters: by no name of the package's.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import apexfx
from apexfx._torch import TorchDispatchMode, tree_leaves
from apexfx.compiler.inner_compilers import INNER
from tests.model_styles import make

# Their parameters are used by others; an embedding only looks up, which is no arithmetic.
NOT_CALLED = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict, nn.Embedding)


class Observer(TorchDispatchMode):
    """Notes, for each parameter, the ops that it enters and its dtype there; casts and views of it count as itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: dict[str, list[tuple[str, torch.dtype]]] = {}
        self._names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        self._kept: list[Tensor] = []  # that no storage takes the address of another

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self._kept += made
        for tensor in given:
            name = self._names.get(tensor.untyped_storage().data_ptr())
            if name is None:
                continue
            entered = self.seen.setdefault(name, [])
            if len(given) == 1:  # a cast, a view, twice the weight
                self._names.update((t.untyped_storage().data_ptr(), name) for t in made)
            else:
                entered.append((str(op), tensor.dtype))
        return out


def observed(monkeypatch, style, model, **options):
    """Run a training forward; return what the graphs computed in, by parameter, and the report."""
    observer = Observer(model)
    eager = INNER["eager"]

    def compiled(gm, example_inputs, backward):
        run = eager(gm, example_inputs, backward)

        def observed(*args):
            with observer:
                return run(*args)

        return observed

    torch.compiler.reset()
    with monkeypatch.context() as patch:
        patch.setitem(INNER, "eager", compiled)
        made = apexfx.transform(model, inner="eager", **options)
        made(style.batch(0, 0))
    return observer.seen, made.report


def path_of(style, model):
    """Return the registered path of a module whose parameters are its own."""
    owners = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(p), []).append(name)
    called = {path: module for path, module in model.named_modules()
              if path and "parametrizations" not in path and not isinstance(module, NOT_CALLED)}
    paths = [path for path, module in called.items() if [*module.parameters()] and all(
        name.startswith(f"{path}.") for p in module.parameters() for name in owners[id(p)])]
    return random.Random(style.seed).choice(paths)


def check(monkeypatch, seed):
    style, level = make(seed), ("O1", "O2")[seed % 2]
    source = style.model()
    path = path_of(style, source)
    before, report = observed(monkeypatch, style, style.model(), opt_level=level)
    after, overridden = observed(monkeypatch, style, style.model(), opt_level=level, precision={path: "float32"})
    where = f"seed {seed}, {level}, precision of {path}: {style.description}"
    check_casts(style, source, before, report, where)
    assert before.keys() == after.keys(), where
    said = f"precision[{path!r}] does not reach" in str(overridden)
    by_method = {"bound methods", "forward called"} & style.traits  # without a call of the module
    assert not said or by_method or "functional call of copies" in style.traits, where  # copies are made outside of the module
    assert not overridden.uncovered() or not any(name.startswith(f"{path}.") for name in before), where
    for name in before:
        if name.startswith(f"{path}."):
            if said and by_method and after[name] == before[name]:
                continue
            assert after[name] == [(op, torch.float32) for op, _ in before[name]], f"{name}: {after[name]}; {where}"
        else:  # what promotes follows its other input, which the override has made float32
            assert fixed(after[name]) == fixed(before[name]), f"{name}: {before[name]} -> {after[name]}; {where}"


def fixed(entered):
    return [row for row in entered if row[0] not in ("aten.mul.Tensor", "aten.add.Tensor")]


def check_casts(style, source, entered, report, where):
    """Every linear layer that ran computes in half, or the report knows that no graph holds it, and says so."""
    source(style.batch(0, 0)).sum().backward()
    used = {name for name, p in source.named_parameters() if p.grad is not None}
    captured = {name for graph in report.graphs for name in graph.parameters}
    assert entered.keys() <= captured, where
    if left_to_eager := used - entered.keys():
        assert not left_to_eager & captured and any("no captured graph" in n for n in report.notes), where
    for name, rows in entered.items():
        for op, dtype in rows:
            assert "addmm" not in op or dtype == torch.bfloat16, f"{name} computes in {dtype}; {where}"


def test_an_override_reaches_its_module(monkeypatch):
    for seed in range(4):
        check(monkeypatch, seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1240, 40))
def test_an_override_reaches_its_module_in_many(first, monkeypatch):
    for seed in range(first, first + 40):
        check(monkeypatch, seed)
