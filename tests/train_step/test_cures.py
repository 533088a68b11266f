"""What an error says to write is run: it trains what the program trained that was refused."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.func import hessian, jacfwd, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import apexfx
from tests.optimizers import foreign_optimizers as foreign
from tests.tables import table

Program = dict[str, Any]


class Cure(NamedTuple):
    """A program that is refused, and what its error says to write.

    Attributes:
        program: (cured) -> the arguments of `train_step`, where `optimizer` is a function of the model, and besides: `batch`,
            (x, number of the call) -> what a call is given; `transform`, for a loop with a transformed model; `context`, of all
            calls; `eager`, what is otherwise in the loop that is compared with.
        said: of the error.
        as_cured: whether the loop trains what is cured: eager draws other numbers by the program, raises, or is wrong.
        also_in_pieces: whether fallback='transform' is a cure, too.
        in_table: whether it is a row of the table of docs/refused.md; its function is called `use` then.
        limit: how many graphs a function may have.
        rel: of losses.
    """

    program: Callable[[bool], Program]
    said: str
    as_cured: bool = False
    also_in_pieces: bool = False
    in_table: bool = False
    inner: str = "eager"
    limit: int = 8
    rel: float = 1e-5


CURES: dict[str, Cure] = {}


def cure(said: str, **options: Any) -> Callable[[Callable[[bool], Program]], Callable[[bool], Program]]:
    def register(program: Callable[[bool], Program]) -> Callable[[bool], Program]:
        CURES[program.__name__] = Cure(program, said, **options)
        return program

    return register


class Net(nn.Module):
    """A linear layer, and `use(self, what it returns, the batch)`."""

    def __init__(self, use: Callable[..., Any] = lambda net, h, x: h, layer: nn.Module | None = None, **kept: Any) -> None:
        super().__init__()
        self.layer, self.use = layer or nn.Linear(4, 4), use
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: Any, *more: Any) -> Any:
        return self.use(self, self.layer(x), x, *more)


def square(model, *batch):
    return model(*batch).square().sum()


def penalty(energy, x):
    return torch.autograd.grad(energy, x, create_graph=True)[0].square().sum()


def with_position(loss):
    return lambda model, x: loss(model, x.detach().requires_grad_())


def sgd(*more, lr=0.1):
    return lambda model: torch.optim.SGD([*model.parameters(), *more], lr=lr)


def double(x, k):
    return (x.double(),)


# ---- the loss ----------------------------------------------------------------------------------------------------------------


@cure("has a history.*detach")
def an_input_with_a_history(cured):
    encoder = nn.Linear(4, 4)
    return {"batch": lambda x, k: (encoder(x).detach() if cured else encoder(x),)}


@cure("calls backward.. itself.*add that loss")
def a_backward_of_its_own(cured):
    def objective(model, x):
        own = model(x).abs().sum()
        if cured:
            return square(model, x) + own
        own.backward()
        return square(model, x) + own.detach()

    return {"objective": objective}


@cure("needs create_graph=True", as_cured=True)
def a_derivative_without_create_graph(cured):
    return {"objective": with_position(lambda model, x: torch.autograd.grad(
        square(model, x), x, create_graph=cured)[0].square().sum())}


@cure("have the loss function reduce it")
def a_loss_that_is_no_scalar(cured):
    return {"objective": lambda model, x: model(x).square().sum(() if cured else 0), "eager": {"objective": square}}


@cure("take .abs.., .real or .imag")
def a_complex_loss(cured):
    def objective(model, x, real=cured):
        loss = torch.complex(model(x), x).square().sum()
        return loss.real if real else loss

    return {"objective": objective, "eager": {"objective": lambda model, x: objective(model, x, True)}}


@cure("What takes the model itself is an objective")
def a_loss_fn_of_the_model(cured):
    if cured:
        return {"objective": square}
    return {"objective": None, "loss_fn": square, "batch": lambda x, k: (x, x),
            "eager": {"objective": lambda model, x, y: square(model, x)}}


@cure(r"Add Mean\(scalar, 1\)")
def a_mean_and_a_scalar(cured):
    def objective(model, x):
        loss, scalar = apexfx.Mean(square(model, x), 6), model(x).abs().sum()
        return loss + (apexfx.Mean(scalar, 1) if cured else scalar)

    return {"objective": objective, "eager": {"objective": lambda model, x: square(model, x) / 6 + model(x).abs().sum()}}


@cure("or its total by a tensor")
def a_mean_that_a_tensor_weighs(cured):
    def objective(model, x, w):
        return apexfx.Mean(w * square(model, x), 6) if cured else apexfx.Mean(square(model, x), 6) * w

    return {"objective": objective, "batch": lambda x, k: (x, torch.tensor(k / 2)),
            "eager": {"objective": lambda model, x, w: w * square(model, x) / 6}}


@cure(r"give all of them one count: Mean\(a \+ b, count\)")
def two_means_that_accumulate(cured):
    def objective(model, x):
        one, other = square(model, x), model(x).abs().sum()
        return apexfx.Mean(one + 2 * other, 24) if cured else apexfx.Mean(one, 24) + apexfx.Mean(other, 12)

    return {"objective": objective, "accumulate": 2}


@cure(r"Mean\(loss, 1\) for a scalar")
def a_mean_or_a_scalar(cured):
    def objective(model, x, k):
        return square(model, x) if k % 2 and not cured else apexfx.Mean(square(model, x), 1)

    return {"objective": objective, "batch": lambda x, k: (x, k), "accumulate": 2}


@cure(r"tensor of this step in the attribute 'aux' .*Clear what the forward or a hook keeps.*aux = loss \+ model\.aux, None",
      also_in_pieces=True)
def a_part_of_the_loss_that_is_kept(cured):
    def keep(net, h, x):
        net.aux = h.abs().sum()
        return h

    def objective(model, x):
        loss = square(model, x)
        if cured:
            loss, model.aux = loss + model.aux, None
            return loss
        return loss + model.aux

    return {"model": Net(keep, aux=None), "objective": objective}


@cure("tensor of this step in the attribute 'hidden' .*Clear what the forward or a hook keeps")
def a_hidden_state_that_a_hook_keeps(cured):
    def objective(model, x):
        loss = square(model, x) + model.hidden.abs().sum()
        if cured:
            model.hidden = None
        return loss

    net = Net(hidden=None)
    net.layer.register_forward_hook(lambda layer, inputs, out: setattr(net, "hidden", out))
    return {"model": net, "objective": objective}


@cure("a hook is registered inside of the step.*Register it before the step is made")
def a_hook_that_the_forward_registers(cured):
    def doubles(layer, inputs, out):
        return 2 * out

    def use(net, h, x):
        if cured:
            return h
        handle = net.layer.register_forward_hook(doubles)
        out = net.layer(x)
        handle.remove()
        return out

    net = Net(use)
    if cured:
        net.layer.register_forward_hook(doubles)
    return {"model": net}


@cure("keep tensor.detach")
def a_state_with_its_history(cured):
    def keep(net, h, x):
        h = h + 0.5 * net.state.detach()
        net.state = h.detach() if cured else h
        return h

    return {"model": Net(keep, state=torch.zeros(6, 4))}


# ---- derivatives -------------------------------------------------------------------------------------------------------------


@cure("Differentiate backward: jacrev", as_cured=True)  # of torch's jacfwd through a layer norm the gradient is wrong
def a_jacobian_forward(cured):
    jacobian = jacrev if cured else jacfwd
    return {"model": Net(layer=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))),
            "objective": lambda model, x: jacobian(model)(x[0]).square().sum()}


@cure("Differentiate backward: jacrev", as_cured=True)  # of torch's layer norm the third derivative is wrong
def a_hessian(cured):
    second = (lambda f: jacrev(torch.func.grad(f))) if cured else hessian
    layer, norm = nn.Linear(4, 4), nn.LayerNorm(4).requires_grad_(False)
    by_hand = Net(lambda net, h, x: (h - h.mean()) / (h.var(correction=0) + 1e-5).sqrt(), layer)
    return {"model": Net(lambda net, h, x: net.norm(h), layer, norm=norm), "eager": {"model": by_hand},
            "objective": lambda model, x: second(lambda x: model(x).tanh().sum())(x[0]).square().sum()}


@cure("Leave the checkpoint out")
def a_derivative_of_a_checkpoint(cured):
    return {"objective": with_position(lambda model, x: penalty(
        (model(x) if cured else checkpoint(model, x, use_reentrant=False)).square().sum(), x))}


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].exp()


@cure("write it of ops that have derivatives")
def a_derivative_through_a_function(cured):
    return {"objective": with_position(lambda model, x: penalty((model(x).exp() if cured else Exp.apply(model(x))).sum(), x))}


@cure("whose derivative is wrong there in torch; call that of torch.nn.functional, an instance norm without")
def a_third_derivative(cured):  # which is wrong in eager for both
    def loss(model, x):
        first = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return penalty(first.square().sum(), x)

    def by_group_norm(model, x):
        model.norm = nn.GroupNorm(4, 4).double()
        return with_position(loss)(model, x)

    return {"model": Net(lambda net, h, x: net.norm(h.T[None]).tanh(), norm=nn.InstanceNorm1d(
        4, track_running_stats=not cured)).double(), "batch": double, "optimizer": sgd(lr=0.001),
        "objective": with_position(loss), "eager": {"objective": by_group_norm}}


@cure(r"loop over cells \(nn.LSTMCell")
def a_derivative_through_an_lstm(cured):
    lstm, cell = nn.LSTM(4, 4), nn.LSTMCell(4, 4)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in lstm.state_dict().items()})

    def by_cells(net, h, x):
        outputs, state = [], None
        for row in h:
            state = net.cell(row[None], state)
            outputs.append(state[0])
        return torch.cat(outputs)

    model = Net(by_cells, cell=cell) if cured else Net(lambda net, h, x: net.lstm(h)[0], lstm=lstm)
    return {"model": model, "batch": lambda x, k: (x[:2],),
            "objective": with_position(lambda model, x: penalty(square(model, x), x))}


@cure("use memory_efficient=False", as_cured=True)
def a_derivative_through_an_efficient_norm(cured):
    return {"model": Net(layer=apexfx.normalization.FusedRMSNorm(4, memory_efficient=not cured)),
            "objective": with_position(lambda model, x: penalty(square(model, x), x))}


@cure("has one backward; train_step|have one backward; train_step")
def a_penalty_through_transform(cured):
    return {"objective": with_position(lambda model, x: penalty(square(model, x), x)), "transform": not cured}


@cure(r"Write x.detach\(\).requires_grad_\(\)")
def requires_grad_of_the_batch(cured):
    def objective(model, x):
        x = x.detach().requires_grad_() if cured else x.requires_grad_()
        return penalty(square(model, x), x) + square(model, x)

    return {"objective": objective}


@cure(r"batch = \{\*\*batch, 'pos': pos\}")
def positions_in_a_dictionary(cured):
    def objective(model, batch):
        if cured:
            batch = {**batch, "pos": batch["pos"].detach().requires_grad_()}
        else:
            batch["pos"] = batch["pos"].detach().requires_grad_()
        return penalty(square(model, batch["pos"]), batch["pos"])

    return {"objective": objective, "batch": lambda x, k: ({"pos": x},)}


@cure("apply it outside of them")
def a_function_under_vmap(cured):
    class ExpOfRows(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    return {"objective": lambda model, x: (
        ExpOfRows.apply(model(x)) if cured else vmap(lambda row: ExpOfRows.apply(row))(model(x))).sum()}


# ---- the model and its memory ------------------------------------------------------------------------------------------------


@cure("Use sparse=False")
def an_embedding_with_sparse_gradients(cured):
    return {"model": nn.Embedding(10, 4, sparse=not cured), "batch": lambda x, k: (torch.arange(k, k + 5),)}


@cure("train with apexfx.transform")
def an_embedding_that_renormalizes(cured):
    return {"model": nn.Embedding(10, 4, max_norm=0.5), "batch": lambda x, k: (torch.arange(k, k + 5),), "transform": cured}


@cure("write it between two steps, under torch.no_grad")
def a_parameter_that_is_clamped(cured):
    def clamp():
        with torch.no_grad():
            model.layer.weight.clamp_(-0.1, 0.1)

    class Clamped(Net):
        def forward(self, x):
            with torch.no_grad():
                self.layer.weight.clamp_(-0.1, 0.1)
            return self.layer(x)

    model = Net() if cured else Clamped()
    return {"model": model, "batch": lambda x, k: (clamp() if cured else None, x)[1:]}


@cure("register one Parameter under both names")
def two_parameters_over_one_memory(cured):
    head = nn.Linear(4, 4)
    model = Net(lambda net, h, x: net.head(h.tanh()), head=head)
    head.weight = model.layer.weight if cured else nn.Parameter(model.layer.weight.data)
    return {"model": model}


@cure(r"give it a copy \(.clone")
def an_input_over_the_memory_of_a_parameter(cured):
    model = Net()
    bias = model.layer.bias.detach()
    return {"model": model, "objective": lambda model, x, bias: (model(x) + bias).square().sum(),
            "batch": lambda x, k: (x, bias.clone() if cured else bias)}


@cure("use h.detach()")
def a_parameter_made_of_an_activation(cured):
    def use(net, h, x):
        made = h.detach() if cured else nn.Parameter(h)
        h.mul_(2)
        return h.sin() * made.detach()

    return {"model": Net(use), "transform": True}


@cure("write x.data.copy_")
def data_that_is_replaced(cured):
    def use(net, h, x):
        if cured:
            net.mean.data.copy_(x.mean(0))
        else:
            net.mean.data = x.mean(0)
        net.mean.add_(1)
        return h * net.mean

    return {"model": Net(use, mean=nn.Buffer(torch.zeros(4)))}


def counted(net, h, x, k):
    net.seen.add_(k)
    return h * net.seen.float()


@cure("Keep it in float32")
def a_number_of_float64(cured):
    return {"model": Net(counted, seen=nn.Buffer(torch.zeros((), dtype=torch.float32 if cured else torch.float64))),
            "batch": lambda x, k: (x, 0.5 * k + 0.5)}


@cure(r"or in shape \[1\]")
def a_number_of_float64_in_a_shape(cured):
    return {"model": Net(counted, seen=nn.Buffer(torch.zeros([1] if cured else [], dtype=torch.float64))),
            "batch": lambda x, k: (x, 0.1 * k + 0.1)}


@cure(r"give x.resolve_neg\(\)", inner="inductor")
def an_input_to_be_negated(cured):
    def batch(x, k):
        x = torch.complex(x, x).conj().imag
        return (x.resolve_neg() if cured else x,)

    return {"objective": lambda model, x: square(model, x.mul_(2)), "batch": batch}


@cure(r"write x\[..., start::step\]")
def a_write_through_windows(cured):
    def use(net, h, x):
        h = h.repeat(1, 2)
        if cured:
            h[..., 1::3] *= 2
        else:
            h[..., 1:].unfold(1, 1, 3).mul_(2)
        return h

    return {"model": Net(use)}


@cure("leave that dropout out")
def a_write_through_a_dropout_that_drops_nothing(cured):
    def use(net, h, x):
        m = h if cured else F.dropout(h, 0.0)
        m += x
        return m * h

    return {"model": Net(use)}


@cure(r"write m = m \+ x in the place of m \+= x, which leaves its input", as_cured=True)
def a_write_through_a_dropout_in_evaluation(cured):
    def use(net, h, x):
        m = F.dropout(h, 0.5, training=False)
        if cured:
            m = m + x
        else:
            m += x
        return m * h

    return {"model": Net(use)}


@cure(r"write torch.linalg.solve\(a.mH @ a, a.mH\)")
def a_complex_pseudoinverse(cured):
    def use(net, h, x):
        a = torch.complex(h, h.tanh() + x)
        return ((torch.linalg.solve(a.mH @ a, a.mH) if cured else torch.linalg.pinv(a)) @ torch.complex(x, x.sin())).abs()

    return {"model": Net(use).double(), "batch": double}


@cure("make the step with keep_grads=True")
def a_forward_that_reads_grad(cured):
    def use(net, h, x):
        return h * (1.0 if net.layer.weight.grad is None else net.layer.weight.grad.mean())

    return {"model": Net(use), "optimizer": sgd(lr=0.01), "keep_grads": cured}


@cure("use those of torch.nn.utils.parametrizations")
def weight_norm(cured):
    return {"model": (parametrizations.weight_norm if cured else nn.utils.weight_norm)(nn.Linear(4, 4))}


@cure("prune keep the weight.*a parametrization of your own that multiplies by the mask.*fallback='transform'",
      also_in_pieces=True)
def pruning(cured):
    layer, mask = nn.Linear(4, 4), torch.arange(16.0).reshape(4, 4) % 3
    if cured:
        parametrize.register_parametrization(layer, "weight", Net(lambda net, h, x: x * mask, layer=nn.Identity()))
    else:
        prune.custom_from_mask(layer, "weight", mask)
    return {"model": Net(layer=layer)}


@cure("pass fallback='transform'")
def spectral_norm_in_pieces(cured):
    return {"model": Net(layer=nn.utils.spectral_norm(nn.Linear(4, 4))), **({"fallback": "transform"} if cured else {})}


@cure("whose spectral_norm begins by other vectors", as_cured=True)
def spectral_norm(cured):
    return {"model": Net(layer=(parametrizations if cured else nn.utils).spectral_norm(nn.Linear(4, 4)))}


@cure("Leave the checkpoint out there, which in eager sets that twice", as_cured=True)
def spectral_norm_in_a_checkpoint(cured):
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    return {"model": Net(lambda net, h, x: h if cured else checkpoint(net.layer, x, use_reentrant=False), layer=layer)}


@cure("Checkpoint without dropout")
def dropout_in_a_checkpoint(cured):
    def objective(model, x):
        if cured:
            return F.dropout(checkpoint(model, x, use_reentrant=False)).square().sum()
        return checkpoint(lambda x: F.dropout(model(x)), x, use_reentrant=False).square().sum()

    return {"objective": objective}


@cure("x.as_subclass")
def an_input_of_a_subclass(cured):
    class Image(torch.Tensor):
        pass

    return {"batch": lambda x, k: (x if cured else x.as_subclass(Image),)}


@cure("run the lazy module once first", as_cured=True)
def a_lazy_module(cured):
    model = nn.Sequential(nn.LazyLinear(4))
    if cured:
        model(torch.ones(1, 4))
    return {"model": model}


@cure("put it into a torch.nn.Sequential")
def a_batch_norm_alone(cured):
    norm = nn.BatchNorm1d(4, momentum=None)
    return {"model": nn.Sequential(norm) if cured else norm}


# ---- Python: numbers, locks, hooks -------------------------------------------------------------------------------------------


@cure(r"choose by torch.where\(torch.rand\(\(\)\) < p, a, b\)", as_cured=True)
def a_choice_by_chance(cured):
    def objective(model, x):
        out = model(x)
        if cured:
            return torch.where(torch.rand(()) < 0.5, out.sum(), out.square().sum())
        return out.sum() if random.random() < 0.5 else out.square().sum()

    return {"objective": objective}


@cure(r"Choose by torch.where\(condition, a, b\)", also_in_pieces=True)
def a_choice_by_a_number_that_is_read(cured):
    def objective(model, x):
        loss = square(model, x)
        if cured:
            return torch.where(loss > 0.5, loss / 2, loss)
        return loss / 2 if loss.item() > 0.5 else loss

    return {"objective": objective}


@cure(r"draw outside, and give the step the number", as_cured=True)
def a_factor_by_chance(cured):
    return {"objective": lambda model, x: square(model, x) * (1 + (torch.randint(1, 3, ()) if cured else random.randint(1, 2)))}


@cure(r"np.random of NumPy.*Draw by torch.rand\(\(\)\)", as_cured=True)
def a_number_of_numpy(cured):
    return {"objective": lambda model, x: square(model, x) * (torch.rand(()) if cured else np.random.rand())}


@cure(r"np.random of NumPy.*draw outside, and give the step the number as a tensor, which compiles once", limit=1)
def a_mixup_by_numpy(cured):
    def objective(model, x, *drawn):
        share = drawn[0] if drawn else float(np.random.beta(0.2, 0.2))
        return square(model, share * x + (1 - share) * x.flip(0))

    return {"objective": objective, "batch": lambda x, k: (x, torch.tensor(np.random.beta(0.2, 0.2))) if cured else (x,)}


@cure("is a random.Random.* outside and give the number as a tensor")
def a_generator_of_its_own(cured):
    numbers = random.Random(0)
    return {"model": Net(lambda net, h, x, *drawn: h * (drawn[0] if drawn else net.numbers.random()), numbers=numbers),
            "batch": lambda x, k: (x, torch.tensor(numbers.random())) if cured else (x,)}


@cure(r"Call next\(\) outside")
def an_iterator(cured):
    numbers = itertools.count(1) if cured else iter([1.0, 2.0, 3.0, 4.0])
    return {"objective": lambda model, x, *n: square(model, x) * (n[0] if n else next(numbers)),
            "batch": lambda x, k: (x, torch.tensor(float(next(numbers)))) if cured else (x,)}


LOCK = threading.Lock()


@cure("a lock is taken.*Leave it out")
def a_lock(cured):
    def objective(model, x):
        with contextlib.nullcontext() if cured else LOCK:
            return square(model, x)

    return {"objective": objective}


@cure("remove it, or register a hook on a tensor in the forward")
def a_backward_hook_on_a_module(cured):
    return hooked(cured)


@cure("register a hook on a tensor in the forward")
def a_backward_hook_under_transform(cured):
    return {**hooked(cured), "transform": True}


def hooked(cured):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    if cured:
        model[0].register_forward_hook(lambda module, args, out: out.register_hook(lambda g: g * 0.5) and None)
    else:
        model[0].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
    return {"model": model}


@cure("register it on the modules of the model")
def a_hook_on_all_modules(cured):
    def twice(module, args, out):
        return 2 * out if isinstance(module, nn.Linear) else None

    model = Net()
    if cured:
        model.layer.register_forward_hook(twice)
    return {"model": model, **({} if cured else {"context": lambda: nn.modules.module.register_module_forward_hook(twice)})}


@cure("remove it, or train with apexfx.transform")
def a_hook_on_an_input(cured):
    def batch(x, k):
        x.requires_grad_().register_hook(lambda g: None)
        return (x,)

    return {"batch": batch, "transform": cured}


@cure("leave it out .memory_budget=")
def tensors_that_are_saved_elsewhere(cured):
    return {} if cured else {"context": torch.autograd.graph.save_on_cpu}


@cure("or pass fallback='transform'")
def tensors_that_are_saved_elsewhere_in_pieces(cured):
    return {"context": torch.autograd.graph.save_on_cpu, **({"fallback": "transform"} if cured else {})}


@cure("pass fallback='transform', where it sees the model's backward")
def anomalies(cured):
    return {"context": lambda: torch.autograd.set_detect_anomaly(True), **({"fallback": "transform"} if cured else {})}


@cure("make the step with opt_level='O1'", rel=2e-2)
def autocast_of_float16(cured):
    autocast = {"context": lambda: torch.autocast("cpu", torch.float16)}
    return {"opt_level": "O1", "dtype": torch.float16, "loss_scale": 1.0} if cured else autocast


@cure("to amp.initialize.*pass compile=True|leave it out, opt_level= of the step does it", rel=2e-2)
def a_model_of_amp(cured):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if not cured:
        model, optimizer = apexfx.amp.initialize(model, optimizer, opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    return {"model": model, "optimizer": lambda model: optimizer, "opt_level": "O1", "dtype": torch.bfloat16}


@cure("apply them to the module that the transformed one was made from")
def a_vmap_of_a_transformed_model(cured):
    source = Net()
    return {"model": source, "objective": lambda model, x: vmap(source if cured else model)(x).square().sum(), "transform": True}


@cure(r"for each value of more\[0\]: give it as a tensor, hold it in a buffer", limit=3)
def a_number_that_changes_under_transform(cured):
    return {"model": Net(lambda net, h, x, k: h * (k if cured else [1.0, 2.0, 3.0, 4.0][k])), "transform": True,
            "batch": lambda x, k: (x, torch.tensor(k + 1.0) if cured else k)}


@cure("train with apexfx.transform")
def a_hook_on_a_parameter(cured):
    model = Net()
    model.layer.weight.register_hook(lambda g: g * 0.5)
    return {"model": model, "transform": cured}


class Halves(apexfx.Part):
    def apply(self, end):
        end.set_gradients([g * 0.5 for g in end.gradients()])


@cure("a part reads or changes them in the step")
def hooks_that_change_gradients(cured):
    model = Net()
    for p in model.parameters() if not cured else ():
        p.register_hook(lambda g: g * 0.5)
    return {"model": model, **({"parts": [Halves()]} if cured else {})}


@cure("each for other values .* for each value of k .batch.1..: give it as a tensor, hold it in a buffer", limit=3)
def a_number_that_changes(cured):
    return {"objective": lambda model, x, k: square(model, x) * (k if cured else [1.0, 2.0, 3.0, 4.0][k]),
            "batch": lambda x, k: (x, torch.tensor(k + 1.0) if cured else k)}


@cure(r"a number that differs from call to call.*x \*\* torch.tensor\(k\)")
def a_power_that_changes(cured):
    return {"objective": lambda model, x, k: (model(x) ** (torch.tensor(k) if cured else k)).mean(),
            "batch": lambda x, k: (x, k + 2)}


# ---- optimizers --------------------------------------------------------------------------------------------------------------


@cure(r"optimizer=\[one, other\], modules=\[module\]")
def a_module_of_no_optimizer(cured):
    other = nn.Linear(4, 1)

    def both(model):
        return [torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(other.parameters(), lr=0.01)]

    return {"objective": lambda model, x: other(model(x)).square().sum(), "eager": {"optimizer": both},
            **({"optimizer": both, "modules": [other]} if cured else {})}


@cure(r"Freeze them by requires_grad_\(False\)")
def a_module_that_is_not_trained(cured):
    other = nn.Linear(4, 1).requires_grad_(not cured)
    return {"objective": lambda model, x: other(model(x)).square().sum()}


@cure(r"register parameters that are in no module in one \(torch.nn.ParameterList\)")
def a_parameter_of_no_module(cured):
    scale = nn.Parameter(torch.ones(4))
    return {"objective": lambda model, x: (model(x) * scale).square().sum(), "optimizer": sgd(scale, lr=0.01),
            **({"modules": [nn.ParameterList([scale])]} if cured else {})}


@cure("train with apexfx.transform.. and the optimizer's own step")
def an_optimizer_with_a_closure(cured):
    return {"optimizer": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1), "transform": cured}


@cure("which clips the gradients of all by one norm", as_cured=True)
def an_optimizer_that_clips(cured):
    def both(model):
        return [apexfx.optimizers.FusedLAMB([model.layer.weight], lr=0.01, max_grad_norm=None if cured else 1.0),
                torch.optim.SGD([model.layer.bias], lr=0.1)]

    return {"model": Net(), "optimizer": both, "eager": {"clip": 1.0}, **({"max_grad_norm": 1.0} if cured else {})}


@cure(r"give it copy.deepcopy\(optimizer.state_dict\(\)\)", as_cured=True)
def optimizers_over_one_state(cured):
    def both(model):
        optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.01, momentum=0.9) for place in (0, 2)]
        square(model, torch.ones(1, 4)).backward()
        optimizers[0].step()
        state = optimizers[0].state_dict()
        optimizers[1].load_state_dict(copy.deepcopy(state) if cured else state)
        return optimizers

    return {"model": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), "optimizer": both}


@cure("OfSome.step.*train with apexfx.transform")
def an_optimizer_that_reads_all_gradients(cured):
    return {"model": Net(lambda net, h, x, k: net.other(h) if k % 2 else h, other=nn.Linear(4, 4)), "transform": cured,
            "batch": lambda x, k: (x, k), "optimizer": lambda model: foreign.OfSome(model.parameters(), lr=0.001)}


@cure("Use opt_level='O2' on a float32 model", rel=5e-3)
def parameters_of_float16(cured):
    model = Net(lambda net, h, x: h.float())
    return {"model": model if cured else model.half(), "batch": lambda x, k: (x if cured else x.half(),), "keep_grads": True,
            "loss_scale": 8.0, **({"opt_level": "O2", "dtype": torch.float16} if cured else {})}


@cure("leave out max_grad_norm, loss_scale and safeguard")
def complex_parameters(cured):
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    return {"model": Net(lambda net, h, x: (h.to(torch.complex64) @ net.weight).abs(), weight=weight), "safeguard": not cured}


# ---- the table of docs/refused.md, in its order ------------------------------------------------------------------------------


def in_words(said: str, **options: Any) -> Callable[[Callable[[bool], Program]], Callable[[bool], Program]]:
    """Register a row of the table: its error says what the page says."""
    return cure(re.escape(said), in_table=True, **{"also_in_pieces": True, **options})


def returned(model, x):
    return model(x)


FLAG = True
NUMBER, BRANCH = "depends on a number that is known when the graph runs only", "Data-dependent branching"


@in_words(NUMBER)
def a_branch_on_the_number_of_rows(cured):
    def use(net, h, x):
        if cured:
            mask = h[:, 0] > 0
            return torch.where(mask[:, None], h, 0).sum() / mask.sum().clamp(min=1)
        rows = h[h[:, 0] > 0]
        if n := rows.shape[0]:
            return rows.sum() / n
        return h.sum() * 0

    return {"model": Net(use), "objective": returned}


@in_words(BRANCH)
def a_branch_on_data_and_a_flag(cured):
    def use(net, h, x):
        if cured:
            return torch.where((h > 1).any() & FLAG, h.sum(), h.mean())
        return h.sum() if (h > 1).any() and FLAG else h.mean()

    return {"model": Net(use), "objective": returned}


@in_words(BRANCH)
def a_while_on_data(cured):
    def use(net, h, x):
        for _ in range(8 if cured else 0):
            h = torch.where(h.abs().max() > 0.5, h / 2, h)
        while not cured and h.abs().max() > 0.5:
            h = h / 2
        return h.sum()

    return {"model": Net(use), "objective": returned}


@in_words(BRANCH)
def a_branch_in_a_loop_over_rows(cured):
    def use(net, h, x):
        out = torch.where(h[:, 0] > 0, h.sum(1), -h.mean(1)).sum() if cured else 0.0
        for row in () if cured else h:
            out = out + row.sum() if row[0] > 0 else out - row.mean()
        return out

    return {"model": Net(use), "objective": returned}


@in_words(NUMBER)
def a_range_over_a_number_of_data(cured):
    def use(net, h, x):
        n, out = (h[:, 0] > 0).sum(), h.mean()
        for i in range(len(h) if cured else int(n)):
            out = out + (torch.where(i < n, i * h.sum(), 0) if cured else i * h.sum())
        return out

    return {"model": Net(use), "objective": returned}


@in_words("the number is read at")
def a_loss_that_compares_a_size_of_data(cured):
    def use(net, h, x):
        number = 6 if cured else int((h[:, 0] > -9).sum())
        return F.mse_loss(torch.zeros(number, 4).index_add(0, torch.arange(6), h.float()), torch.ones(6, 4))

    return {"model": Net(use), "objective": returned}


@in_words(NUMBER)
def rows_by_two_masks(cured):
    def use(net, h, x):
        number = torch.arange(6)
        mask = number > 2
        return F.mse_loss(h[mask].float(), torch.ones(6, 4)[mask if cured else number > 2])

    return {"model": Net(use), "objective": returned}


@in_words(BRANCH)
def an_error_on_data(cured):
    def use(net, h, x):
        if not cured and h.isnan().any():
            raise ValueError("not a number")
        return h.sum()

    return {"model": Net(use), "objective": returned}


@in_words("Tensor.tolist() with non-integer tensor")
def a_list_of_floats(cured):
    def use(net, h, x):
        return h.sum() * (h.detach()[0].sum() if cured else sum(h.detach()[0].tolist()))

    return {"model": Net(use), "objective": returned}


@in_words("Tensor.random_ op", as_cured=True, also_in_pieces=False)
def numbers_drawn_in_place(cured):
    def use(net, h, x):
        return (h * (torch.randint(2, (4,)) if cured else torch.zeros(4).random_(2))).sum()

    return {"model": Net(use), "objective": returned}


@in_words("random.choice() of Python is called")
def a_choice_of_python(cured):
    def use(net, h, x):
        return h.sum() * (torch.tensor([2.0, 2.0])[torch.randint(2, ())] if cured else random.choice([2.0, 2.0]))

    return {"model": Net(use), "objective": returned}


@in_words("print() of Python is called")
def a_print(cured):
    def use(net, h, x):
        if not cured:
            print("sum", h.shape)
        return h.sum()

    return {"model": Net(use), "objective": returned}


@in_words(NUMBER)
def an_adaptive_softmax(cured):
    def use(net, h, x):
        return F.nll_loss(net.softmax.log_prob(h), torch.arange(6)) if cured else net.softmax(h, torch.arange(6)).loss

    return {"model": Net(use, softmax=nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2])), "objective": returned}


@in_words("output shape depends on input Tensor data", also_in_pieces=False)  # it is the cure
def a_ctc_loss(cured):
    def use(net, h, x):
        return F.ctc_loss(h.log_softmax(1)[:, None], torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))

    return {"model": Net(use), "objective": returned, **({"fallback": "transform"} if cured else {})}


# ---- Inductor and transform --------------------------------------------------------------------------------------------------

if torch.__version__ < "2.14":
    def permuted(cured, rows=torch.randperm, **options):
        return {"objective": lambda model, x: model(x[rows(len(x))]).square().mean(0).sum(), **(options if cured else {})}

    @cure("take them by torch.rand", inner="inductor", as_cured=True)
    def rows_by_a_permutation(cured):
        return permuted(cured, (lambda n: torch.rand(n).argsort()) if cured else torch.randperm)

    @cure("give inner_options={'pattern_matcher': False}", inner="inductor")
    def rows_by_a_permutation_without_patterns(cured):
        return permuted(cured, inner_options={"pattern_matcher": False})


def mean_of_rows(h):
    rows = h[h[:, 0] > 0]
    return rows.sum() / rows.shape[0] if rows.shape[0] else h.sum() * 0


@cure("under @torch.compiler.disable")
def a_branch_on_rows_under_transform(cured):
    mean = torch.compiler.disable(mean_of_rows) if cured else mean_of_rows
    return {"model": Net(lambda net, h, x: mean(h)), "transform": True}


@cure("Use a mask or torch.where in the place of the branch")
def a_branch_on_rows_by_a_mask(cured):
    def mean(net, h, x):
        mask = h[:, 0] > 0
        return torch.where(mask[:, None], h, 0).sum() / mask.sum().clamp(min=1)

    return {"model": Net(mean if cured else lambda net, h, x: mean_of_rows(h)), "transform": True}


# ---- the tests ---------------------------------------------------------------------------------------------------------------


def made(row: Cure, *, cured: bool, eager: bool = False) -> Program:
    torch.manual_seed(0)
    program = {"objective": square, "batch": lambda x, k: (x,), "optimizer": sgd(), "transform": False,
               "context": contextlib.nullcontext, **row.program(cured)}
    own = program.pop("eager", {})
    program |= own if eager else {}
    program.setdefault("model", None)
    if program["model"] is None:
        torch.manual_seed(0)
        program["model"] = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    program["optimizer"] = program["optimizer"](program["model"])
    return program


def batches(program: Program):
    for k in range(4):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(k)
        yield program["batch"](torch.randn(6, 4), k)


def trained_by_a_loop(program: Program) -> list[float]:
    optimizers = program["optimizer"] if isinstance(program["optimizer"], list) else [program["optimizer"]]
    calls, losses = program.get("accumulate", 1), []
    for number, batch in enumerate(batches(program), 1):
        for each in optimizers if number % calls == 1 % calls and "keep_grads" not in program else ():
            each.zero_grad()
        with program["context"]():
            loss = program["objective"](program["model"], *batch)
            loss = loss.value if isinstance(loss, apexfx.Mean) else loss
            for each in optimizers if "keep_grads" in program else ():
                each.zero_grad()
            (loss / calls).backward()
        losses.append(loss.item())
        if "clip" in program:
            nn.utils.clip_grad_norm_(program["model"].parameters(), program["clip"])
        for each in optimizers if number % calls == 0 else ():
            each.step(*([lambda: loss] if isinstance(each, torch.optim.LBFGS) else []))
    return losses


def trained(program: Program, inner: str) -> list[float]:
    torch.compiler.reset()
    if program["transform"]:
        return trained_by_a_loop({**program, "model": apexfx.transform(program["model"], opt_level="O0", inner=inner)})
    options = {name: value for name, value in program.items() if name not in ("batch", "transform", "context")}
    step, losses = apexfx.train_step(**{"opt_level": "O0", "inner": inner, **options}), []
    for batch in batches(program):
        with program["context"]():
            losses.append(step(*batch).item())
    return losses


@table(6, "name", CURES)
def test_a_cure_trains_what_the_program_trained(name):
    row = CURES[name]
    with torch._dynamo.config.patch(recompile_limit=row.limit):
        with pytest.raises((ValueError, RuntimeError, TypeError, FailOnRecompileLimitHit), match=f"(?s){row.said}") as failed:
            trained(made(row, cured=False), row.inner)
        assert not row.in_table or isinstance(failed.value, apexfx.NotOneGraph) and "in use: " in str(failed.value)
        expected = trained_by_a_loop(made(row, cured=row.as_cured, eager=True))
        assert trained(made(row, cured=True), row.inner) == pytest.approx(expected, rel=row.rel)
        if row.also_in_pieces:
            assert trained({**made(row, cured=False), "fallback": "transform"}, row.inner) == pytest.approx(expected, rel=row.rel)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a_part_of_the_loss_that_is_kept", "positions_in_a_dictionary", "data_that_is_replaced",
                                  "weight_norm", "a_backward_hook_on_a_module", "pruning", "a_complex_pseudoinverse"])
def test_a_cure_trains_so_under_inductor(name):
    row = CURES[name]
    assert trained(made(row, cured=True), "inductor") == pytest.approx(
        trained_by_a_loop(made(row, cured=row.as_cured, eager=True)), rel=row.rel)
