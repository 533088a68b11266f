"""Losses that hold derivatives, as people publish them: each a model, an objective and a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

Case = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]
LOSSES: dict[str, Callable[[], Case]] = {}
X, FORCE = torch.linspace(-1, 1, 24).sin().view(8, 3), torch.linspace(1, -1, 24).view(8, 3)
ENERGY = torch.linspace(0, 1, 8)[:, None]


def loss(make: Callable[[], Case]) -> Callable[[], Case]:
    LOSSES[make.__name__] = make
    return make


def mlp(norm=None, outputs=1):
    return nn.Sequential(nn.Linear(3, 16), *([norm(16)] if norm else []), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(),
                         nn.Linear(16, outputs))


def derivative(model, x):
    """Return what the model gives, and the gradient of its sum by the input."""
    x = x.detach().requires_grad_()
    out = model(x)
    return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0], x


def forces(model, x, energy, force):
    out, gradient, _ = derivative(model, x)
    return F.mse_loss(out, energy) + F.mse_loss(-gradient, force)


NORMS = {"no": None, "layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm1d,
         "group": lambda channels: nn.GroupNorm(4, channels)}
LOSSES |= {f"forces_with_{name}_norm": lambda norm=norm: (mlp(norm), forces, (X, ENERGY, FORCE)) for name, norm in NORMS.items()}


@loss
def gradient_penalty():
    def objective(critic, real, fake):
        gradient = derivative(critic, (real + fake) / 2)[1]
        return critic(fake).mean() - critic(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()

    return mlp(), objective, (X, FORCE)


@loss
def r1_of_a_convolution():
    def objective(model, images):
        out, gradient, _ = derivative(model, images)
        return F.softplus(-out).mean() + gradient.flatten(1).square().sum(1).mean()

    return (nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1)), objective,
            (torch.linspace(-1, 1, 144).sin().view(4, 1, 6, 6),))


def heat(model, points):
    _, first, points = derivative(model, points)
    second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]
    return (first[:, 1] - 0.1 * second).square().mean()


@loss
def heat_equation():
    return mlp(), heat, (X,)


@loss
def meta_learning():
    def objective(model, x, y, others):
        params = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        return F.mse_loss(functional_call(model, {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads)}, (others,)), y)

    return mlp(), objective, (X, ENERGY, FORCE)


@loss
def norm_of_the_gradient():
    def objective(model, x, y):
        inner = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
        return inner + 0.1 * torch.stack([g.norm() for g in grads]).norm()

    return mlp(nn.LayerNorm), objective, (X, ENERGY)


@loss
def energy_that_is_conserved():
    def objective(model, x, force):
        return F.mse_loss(derivative(model, x)[1].roll(1, 1), force)

    return mlp(), objective, (X, FORCE)


@loss
def forces_on_a_graph():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.edges, self.nodes = nn.Sequential(nn.Linear(1, 8), nn.LayerNorm(8), nn.SiLU()), mlp()

        def forward(self, x, source, target):
            messages = self.edges((x[source] - x[target]).norm(dim=1, keepdim=True))
            return self.nodes(torch.zeros(len(x), 8, dtype=messages.dtype).index_add(0, target, messages)[:, :3])

    def objective(model, x, source, target, force):
        return forces(lambda x: model(x, source, target), x, torch.zeros(len(x), 1), force)

    source, target = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 2]), torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 4, 6])
    return Net(), objective, (X, source, target, FORCE)


@loss
def grad_by_parameters():
    def objective(model, x, y):
        grads = grad(lambda params: F.mse_loss(functional_call(model, params, (x,)), y))(dict(model.named_parameters()))
        return sum(g.square().sum() for g in grads.values())

    return mlp(), objective, (X, ENERGY)


@loss
def score_matching():
    def objective(model, x):
        jacobians = vmap(jacrev(lambda row: model(row[None])[0]))(x)
        return (jacobians.diagonal(dim1=1, dim2=2).sum(1) + 0.5 * model(x).square().sum(1)).mean()

    return mlp(outputs=3), objective, (X,)


@loss
def laplacian():
    def objective(model, x):
        return vmap(jacrev(grad(lambda row: model(row[None])[0, 0])))(x).diagonal(dim1=1, dim2=2).sum(1).square().mean()

    return mlp(), objective, (X,)


@loss
def directional_derivative():
    return mlp(), lambda model, x, direction: jvp(model, (x,), (direction,))[1].square().mean(), (X, FORCE)


@loss
def derivative_by_features():
    def objective(model, x):
        features = model[0](x).float()
        out = model[2:](features).sum() + features.square().sum()
        return torch.autograd.grad(out, features, create_graph=True)[0].square().mean()

    return mlp(), objective, (X,)


class ByWeight(nn.Module):
    """Returns the gradient by a weight, or by a view of it, that is read in float64, too."""

    def __init__(self, shape, viewed):
        super().__init__()
        self.weight, self.viewed = nn.Parameter(torch.linspace(-1, 1, 9).cos().view(shape)), viewed

    def forward(self, x):
        weight = self.weight.view(3, 3) if self.viewed else self.weight
        out = F.linear(x, weight).tanh().sum() + weight.double().pow(3).sum().float()
        return torch.autograd.grad(out, weight, create_graph=True)[0]


for name, shape in (("parameter", (3, 3)), ("view_of_one", (9,))):
    LOSSES[f"derivative_by_a_{name}"] = lambda shape=shape: (
        ByWeight(shape, viewed=len(shape) == 1), lambda model, x: model(x).square().mean(), (X,))


class WrittenNorm:
    """Of a norm of torch's, whose third derivatives are wrong."""

    def forward(self, x):
        of_channels = (-1,) if isinstance(self, nn.LayerNorm) else (-1, *(1 for _ in range(x.dim() - 2)))
        dims = {nn.BatchNorm1d: [d for d in range(x.dim()) if d != 1], nn.LayerNorm: [-1], nn.InstanceNorm1d: [2]}
        dims = next(dims for kind, dims in dims.items() if isinstance(self, kind))
        centered = x - x.mean(dims, keepdim=True)
        normed = centered * (centered.square().mean(dims, keepdim=True) + self.eps).rsqrt()
        return normed * self.weight.view(of_channels) + self.bias.view(of_channels)


def written_out(model):
    """Return a copy of a model, in float64, whose norms are written out."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.LayerNorm, nn.InstanceNorm1d)):
            module.__class__ = type("Written", (WrittenNorm, type(module)), {})
    return model
