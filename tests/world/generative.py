"""Programs that generate: adversarial networks, diffusion, autoencoders, flows."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.world.script import Script, Update, program

SIZE, NOISE = 8, 4


class Pair(nn.Module):
    """A generator and a discriminator, each called as a network of its own."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator


def convolutional(norm=lambda layer: layer):
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.Unflatten(1, (8, 2, 2)), nn.ConvTranspose2d(8, 8, 4, 2, 1),
                              nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh())
    discriminator = nn.Sequential(norm(nn.Conv2d(1, 8, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True), norm(nn.Conv2d(8, 8, 4, 2, 1)),
                                  nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), norm(nn.Linear(32, 1)))
    return Pair(generator, discriminator)


@contextlib.contextmanager
def frozen(net):
    net.requires_grad_(False)
    yield
    net.requires_grad_(True)


def adversarial(model, judge, fool):
    adam = [torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-3)
            for net in (model.discriminator, model.generator)]
    return Script(model, [Update(judge, adam[0]), Update(fool, adam[1], around=lambda: frozen(model.discriminator))],
                  lambda step, carried: (torch.randn(4, 1, SIZE, SIZE), torch.randn(4, NOISE)),
                  nets=("generator", "discriminator"))


def judge_by_logits(model, real, noise):
    fake = model.generator(noise).detach()
    yes, no = model.discriminator(real), model.discriminator(fake)
    return (F.binary_cross_entropy_with_logits(yes, torch.ones_like(yes))
            + F.binary_cross_entropy_with_logits(no, torch.zeros_like(no)))


def fool_by_logits(model, real, noise):
    logits = model.discriminator(model.generator(noise))
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def fool_by_scores(model, real, noise):
    return -model.discriminator(model.generator(noise)).mean()


@program()
def adversarial_networks():
    return adversarial(convolutional(), judge_by_logits, fool_by_logits)


@program()
def adversarial_networks_with_spectral_norm():
    def judge(model, real, noise):
        fake = model.generator(noise).detach()
        return F.relu(1 - model.discriminator(real)).mean() + F.relu(1 + model.discriminator(fake)).mean()

    return adversarial(convolutional(spectral_norm), judge, fool_by_scores)


@program(transform="and its graphs have one backward")
def adversarial_networks_with_gradient_penalty():
    """The gradient by the input is itself differentiated."""
    def judge(model, real, noise):
        fake = model.generator(noise).detach()
        between = torch.lerp(real, fake.float(), torch.full((4, 1, 1, 1), 0.3)).requires_grad_()
        slope, = torch.autograd.grad(model.discriminator(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return model.discriminator(fake).mean() - model.discriminator(real).mean() + 10 * penalty

    return adversarial(convolutional(), judge, fool_by_scores)


class Denoiser(nn.Module):
    """Predicts the noise from a noisy image and its time."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.enter, self.norm, self.leave = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 3, padding=1)
        self.register_buffer("kept", (1 - torch.linspace(1e-4, 0.2, 20)).cumprod(0))

    def forward(self, x, t):
        frequencies = torch.exp(-torch.arange(4, device=x.device) * 2.0)
        phase = t[:, None].float() * frequencies[None]
        moment = self.time(torch.cat([phase.sin(), phase.cos()], dim=-1))
        return self.leave(F.silu(self.norm(self.enter(x)) + moment[:, :, None, None]))


@program()
def diffusion():
    """Noise by a schedule at random times, and an average of the model that samples would come from."""
    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)

    def objective(model, x):
        t = torch.randint(0, 20, (len(x),))
        noise = torch.randn_like(x)
        kept = model.kept[t][:, None, None, None]
        out = model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t)
        weight = torch.minimum(kept / (1 - kept), torch.tensor(5.0)) / 5
        return (weight * (out - noise) ** 2).mean()

    def follow(_, step):
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)

    return Script(model, [Update(objective, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), clip=1.0)],
                  lambda step, carried: (torch.randn(4, 1, SIZE, SIZE),), after=follow)


@program()
def variational_autoencoder():
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.mean, self.log_var = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
            self.leave = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

        def encode(self, x):
            h = F.relu(self.enter(x))
            return self.mean(h), self.log_var(h)

        def forward(self, x):
            mean, log_var = self.encode(x.view(-1, 64))
            std = torch.exp(0.5 * log_var)
            noise = torch.randn(std.shape)
            return self.leave(mean + noise * std), mean, log_var

    model = VAE()

    def objective(model, x):
        out, mean, log_var = model(x)
        likelihood = F.binary_cross_entropy_with_logits(out, x.view(-1, 64), reduction="sum")
        return (likelihood - 0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())) / len(x)

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))],
                  lambda step, carried: (torch.rand(8, 1, SIZE, SIZE),))


@program()
def autoencoder_with_a_codebook():
    """Codes are chosen by distance, gradients go straight through, and the codebook is an average written in the forward."""
    class VQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = nn.Conv2d(1, 4, 2, 2), nn.ConvTranspose2d(4, 1, 2, 2)
            self.register_buffer("codes", torch.randn(6, 4))
            self.register_buffer("counts", torch.ones(6))

        def forward(self, x):
            z = self.enter(x)
            flat = z.permute(0, 2, 3, 1).reshape(-1, 4).float()
            distance = flat.square().sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.square().sum(1)
            chosen = F.one_hot(distance.argmin(1), 6).float()
            quantized = (chosen @ self.codes).view(len(x), *z.shape[2:], 4).permute(0, 3, 1, 2)
            if self.training:
                with torch.no_grad():
                    self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                    self.codes.lerp_((chosen.t() @ flat) / self.counts[:, None], 0.1)
            commitment = F.mse_loss(z.float(), quantized.detach())
            return self.leave(z + (quantized - z).detach()), commitment

    model = VQ()

    def objective(model, x):
        out, commitment = model(x)
        return F.mse_loss(out, x) + 0.25 * commitment

    return Script(model, [Update(objective, torch.optim.SGD(model.parameters(), lr=0.2))],
                  lambda step, carried: (torch.randn(4, 1, SIZE, SIZE),))


@program()
def flow_of_couplings():
    """Halves of the dimensions scale and move each other; the likelihood has the logarithm of a determinant."""
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(weight_norm(nn.Linear(3, 16)), nn.Tanh(), weight_norm(nn.Linear(16, 6)))
                                        for _ in range(4))
            self.mix = nn.Parameter(torch.linalg.qr(torch.randn(6, 6))[0])

        def forward(self, x):
            log_det = torch.slogdet(self.mix)[1] * x.new_ones(len(x))
            x = x @ self.mix
            for i, layer in enumerate(self.layers):
                a, b = x.chunk(2, 1) if i % 2 else x.chunk(2, 1)[::-1]
                scale, move = layer(a).chunk(2, 1)
                scale = torch.tanh(scale)
                x, log_det = torch.cat([a, b * scale.exp() + move], 1), log_det + scale.sum(1)
            return x, log_det

    model = Flow()

    def objective(model, x):
        z, log_det = model(x)
        normal = torch.distributions.Normal(0.0, 1.0, validate_args=False)
        return -(normal.log_prob(z.float()).sum(1) + log_det).mean()

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3), clip=5.0)],
                  lambda step, carried: (torch.randn(8, 6),))
