"""transform(methods=...): methods other than forward as graphs, and what is said of those that are none."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import apexfx
from tests.tables import table


class Agent(nn.Module):
    """As PPO and CLIP have them: methods that the loop calls, one of which forward calls, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)

    def encode(self, x, *, scale=1.0):
        return self.norm(self.body(x)).tanh() * scale

    def act(self, x):
        return self.actor(self.encode(x)).log_softmax(-1), self.critic(self.encode(x, scale=2.0))

    def forward(self, x):
        return self.critic(self.encode(x))

    @staticmethod
    def loss(out):
        return sum(each.float().pow(2).mean() for each in (out if isinstance(out, tuple) else (out,)))


def made(source=None, **options):
    return apexfx.transform(source or Agent(), **{"opt_level": "O0", "inner": "eager", "methods": ("act", "encode"), **options})


def trained(model):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for call in (model.act, model, lambda x: model.encode(x, scale=0.5)):
        Agent.loss(call(x)).backward()
    return [p.grad for p in model.parameters()] + list(model.buffers())


@pytest.mark.long
@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
                         ids=["made", "copied", "pickled"])
def test_named_methods_run_as_graphs(again):
    model = again(made())
    torch.testing.assert_close(trained(model), trained(Agent()))
    assert len(model.report.graphs) == 3 and not model.report.notes
    trained(model)
    assert len(model.report.graphs) == 3


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_named_methods_are_cast_as_the_forward(level):
    model = made(opt_level=level, fullgraph=True)
    trained(model)
    assert all("bf16" in model.print_readable(graph=graph, print_output=False) for graph in range(3))


def test_a_method_that_the_forward_calls_is_no_call_of_its_own():
    model = made(methods=("encode",), fullgraph=True)
    model(torch.randn(5, 4))
    assert len(model.report.graphs) == 1


class Policy(Agent):
    """Methods that call the model itself, and one another."""

    def act(self, x):
        out = self(x)
        return out * 2, self.critic(self.encode(x))

    def encode(self, x, *, scale=1.0):
        return torch.tanh(self.body(x)) * scale

    def again(self, x):
        return self.act(x)[0] + Agent.__call__(self, x) + self.forward(x)


@table(1, "level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["act", "again"])
def test_a_method_that_calls_the_model_is_one_graph(name, level):
    model, x = made(Policy(), methods=("act", "again"), opt_level=level, fullgraph=True), torch.randn(5, 4)
    for call in (getattr(model, name), model, getattr(model, name)):
        out = call(x)
    expected = getattr(Policy(), name)(x)
    assert len(model.report.graphs) == 2 and isinstance(model, Policy) and type(model) is not Policy
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if level == "O0" else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(out, expected, check_dtype=False, **tolerance)


@pytest.mark.long
def test_an_outer_compile_goes_around_a_method():
    model, x = made(), torch.randn(5, 4)
    compiled = torch.compile(lambda x: model.act(x)[1] + 1, backend="eager")
    torch.testing.assert_close(compiled(x), model.act(x)[1] + 1)
    assert len(model.report.graphs) == 1


@pytest.mark.parametrize("call", [lambda model: model.act, lambda model: model.body])
def test_a_backward_without_a_graph_is_said_once(call):
    model = made(methods=())
    for _ in range(2):
        Agent.loss(call(model)(torch.randn(5, 4))).backward()
    assert len(model.report.notes) == 1 and "other than forward (act, encode)" in model.report.notes[0]


@pytest.mark.long
def test_a_backward_behind_a_graph_is_not_remarked():
    model = made(methods=())
    for call in (model, model.act):
        Agent.loss(call(torch.randn(5, 4))).backward()
    assert not any("a backward" in note for note in model.report.notes)


@pytest.mark.parametrize("name", ["forward", "train", "body", "missing", "loss_"])
def test_what_is_no_method_is_refused(name):
    with pytest.raises(ValueError, match="is no method of Agent's own beside its forward; it has act, encode"):
        made(methods=(name,))


def test_methods_of_torchs_own_modules_are_no_advice():
    model = apexfx.transform(nn.Sequential(nn.Linear(4, 1)), opt_level="O0", inner="eager")
    model[0](torch.randn(5, 4)).sum().backward()
    assert "a method other than forward, or a submodule by itself" in model.report.notes[0]
    assert "methods=" not in model.report.notes[0]


@pytest.mark.parametrize("make", [
    lambda model: torch.compile(model, backend="apex", options={"methods": ("act",)})(torch.randn(5, 4)),
    lambda model: apexfx.train_step(model, Agent.loss, torch.optim.SGD(model.parameters(), lr=0.1), methods=("act",)),
])
def test_methods_belong_to_transform(make):
    with pytest.raises(Exception, match=r"methods= belongs to apexfx.transform\(\)"):
        make(Agent())
