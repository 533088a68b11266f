"""What happens to a model under fully_shard between the calls of its step: as FSDP2's own loop has it, on two gloo ranks.

A rank takes seconds to start and each case fractions of one, so that all run on the same two.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import apexfx
from apexfx.errors import RankMismatchError
from tests.distributed.launch import run_ranks
from tests.distributed.sharded_models import Net, batches, perceptron, sharded, whole
from tests.distributed.test_sharded import OPTIMIZERS


class Pair:
    """A model in FSDP2's own loop, and another in a step, for batches that come one by one.

    Args:
        make: returns a model under fully_shard.
    """

    def __init__(self, rank, make=lambda: sharded("mlp"), **options):
        self.models = self.theirs, self.ours = make(), make()
        self.optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in self.models]
        self._batches, self._options = iter(batches(self.ours, 12, rank, 2)), options
        self._step = None

    @property
    def step(self):
        if self._step is None:
            self._step = apexfx.train_step(self.ours, F.cross_entropy, self.optimizers[1],
                                           **{"opt_level": "O0", "inner": "eager", **self._options})
        return self._step

    def train(self, updates=1, calls=1):
        for _ in range(updates):
            for _ in range(calls):
                inputs, targets = next(self._batches)
                self.step(inputs, targets)
                (F.cross_entropy(self.theirs(inputs), targets) / calls).backward()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()

    def evaluate(self):
        return list(map(evaluation, self.models))

    def each(self, change):
        for model, optimizer in zip(self.models, self.optimizers):
            change(model, optimizer)

    def check(self):
        torch.testing.assert_close(*map(whole, (self.ours.state_dict(), self.theirs.state_dict())), rtol=0, atol=0)


def evaluation(model):
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, 7))
    model.train()
    return output


def evaluated(pair):
    """An evaluation leaves FSDP2's root whole; what reads the step's state anew is then given rows all the same."""
    pair.evaluate()
    pair.train()
    for change in (lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.3),
                   lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))):
        pair.evaluate()
        pair.each(change)
        pair.train()
    pair.evaluate()
    pair.step.load_state_dict(copy.deepcopy(pair.step.state_dict()))
    pair.train()
    torch.testing.assert_close(*pair.evaluate(), rtol=0, atol=0)


def evaluated_before(pair):
    assert pair.step
    pair.evaluate()
    pair.train()


def flushed(pair):
    """What is whole when flush() writes the rows is not taken for the model afterwards."""
    for _ in range(2):
        inputs, targets = next(pair._batches)
        pair.step(inputs, targets)
        (F.cross_entropy(pair.theirs(inputs), targets) / 2).backward()
        pair.evaluate()
    pair.theirs.reshard()
    pair.step.flush()
    pair.optimizers[0].step()
    torch.testing.assert_close(*pair.evaluate(), rtol=0, atol=0)


def unshards(pair):
    """A gather of whole parameters that is under way when a step is called."""
    for _ in range(2):
        pair.each(lambda model, _: model.unshard(async_op=True))
        pair.train()
    torch.testing.assert_close(*pair.evaluate(), rtol=0, atol=0)


def freezes(pair):
    """A graph that was captured before, and runs again, adds up where the gradients are accumulated now."""
    pair.train(calls=2)
    for trains in (False, True):
        pair.each(lambda model, _: model.blocks[0].requires_grad_(trains))
        pair.train(calls=2)
    state = copy.deepcopy(pair.step.state_dict())
    pair.step(*next(pair._batches))
    pair.step.load_state_dict(state)
    pair.train(calls=2)


def of_the_model(model, optimizer, trains):
    model.head.requires_grad_(trains)


def of_the_optimizer(model, optimizer, trains):
    for p in optimizer.param_groups[0]["params"][-2:]:
        p.requires_grad_(trains)


def of_both_and_back(model, optimizer, trains):
    for freezes, value in ((of_the_model, trains), (of_the_optimizer, not trains), (of_the_model, trains)):
        freezes(model, optimizer, value)


def set_after_an_evaluation(pair):
    """FSDP2 leaves its root whole, where what is set is lost with the whole parameters; in its own loop it is not whole."""
    pair.step.capture(torch.ones(2, 7), torch.zeros(2, dtype=torch.long))
    for place, change in enumerate((of_the_model, of_the_optimizer, of_both_and_back)):
        for trains in (False, True):
            with torch.set_grad_enabled(place == 1):  # an evaluation may keep what a backward would read
                pair.each(lambda model, _: model(torch.ones(2, 7)))
            pair.theirs.reshard()
            pair.each(lambda model, _: model.state_dict() if place == 0 else None)
            pair.each(lambda *each: change(*each, trains))
            with torch.no_grad():
                pair.each(lambda model, _: model.head.weight.mul_(0.5))
            pair.train()
            pair.check()


def frozen_while_whole(rank):
    """What is frozen while whole parameters are there is told, before a step is made and after it; then it can be set again."""
    for level, whole_before in (("O0", True), ("O2", False)):
        model = sharded("mlp")
        made = lambda: apexfx.train_step(model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()),  # noqa: E731
                                         opt_level=level, inner="eager")
        batch = batches(model, 1, rank, 2)[0]
        if whole_before:
            model.eval()(batch[0])
            call = made
        else:
            (step := made())(*batch)
            model.unshard()
            call = lambda: step(*batch)  # noqa: E731
        model.train().head.requires_grad_(False)
        with pytest.raises(ValueError, match="requires_grad of parameter 'weight'.* call model.reshard\\(\\), and then"):
            call()
        model.reshard()
        model.head.requires_grad_(False)
        before = whole(model.head.state_dict())
        (made() if whole_before else step)(*batch)
        torch.testing.assert_close(whole(model.head.state_dict()), before, rtol=0, atol=0)


def two_in_a_group():
    torch.manual_seed(0)
    model = Net(perceptron(), perceptron())
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.first, model.head])
    return fully_shard(model)


class Encodes(Net):
    def encode(self, x):
        return super().forward(x)

    def forward(self, x):
        return self.encode(x)


def with_a_method():
    torch.manual_seed(0)
    model = Encodes(perceptron())
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    return model


def reduces_in_float32(rank):
    """Gradients that are summed in float32 keep what that has more than a half."""
    steps = {}
    for kind in (None, torch.float32):
        model = sharded("mlp", mp_policy=MixedPrecisionPolicy(reduce_dtype=kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O2", inner="eager")
        step(*batches(model, 1, rank, 2)[0])
        momenta = [optimizer.state[p]["momentum_buffer"].full_tensor() for p in model.parameters()]
        steps[kind] = sum((x != x.bfloat16().float()).sum().item() for x in momenta)
    assert steps[torch.float32] > steps[None] == 0, steps


class OneOfTwo(nn.Module):
    """Two weights of one size; the loss depends on the one that the batch names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(7, 3)), nn.Parameter(torch.ones(7, 3))

    def forward(self, x, which):
        return sum(x @ (p if name == which else p.detach()) for name, p in (("a", self.a), ("b", self.b)))


def another_is_reached(rank):
    """A rank whose loss depends on another parameter of the same size does not have its gradient added to that."""
    model = fully_shard(OneOfTwo())
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             accumulate=2)
    with pytest.raises(RankMismatchError, match="a is trained on rank 0 and not on rank 1"):
        step((torch.ones(4, 7), "ab"[rank]), torch.zeros(4, dtype=torch.long))


CASES = {
    "evaluated": (evaluated, {}),
    "evaluated before the first call": (evaluated_before, {}),
    "flushed": (flushed, {"accumulate": 4}),
    "a gather is pending": (unshards, {}),
    "frozen between": (freezes, {"accumulate": 2}),
    "set after an evaluation": (set_after_an_evaluation, {}),
    "frozen while whole": (frozen_while_whole, None),
    "two modules in a group": (Pair.train, {"make": two_in_a_group}),
    "another method": (Pair.train, {"make": with_a_method}),
    "summed in float32": (reduces_in_float32, None),
    "another parameter is reached": (another_is_reached, None),
}


def between_calls(rank, world_size, names):
    for name in names:
        case, options = CASES[name]
        try:
            if options is None:
                case(rank)
            else:
                case(pair := Pair(rank, **options))
                pair.check()
        except BaseException as error:
            error.add_note(f"case: {name}")
            raise


@pytest.mark.long
@pytest.mark.parametrize("names", [
    pytest.param([*CASES], id="all", marks=pytest.mark.long), pytest.param(["frozen between"], id="one")])
def test_what_happens_between_calls_is_as_in_a_loop_of_fsdp2(names):
    run_ranks(between_calls, 2, names)
