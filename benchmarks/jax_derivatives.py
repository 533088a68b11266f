"""The programs of derivatives.py as jax.jit + optax would train them; run by it, in an environment that has jax.

    python benchmarks/jax_derivatives.py PROGRAM FILE.npz

FILE holds torch's parameters by name, and the batch as `batch.0`, `batch.1`, ...; stdin and stdout are those of jax_models.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import optax
from jax_models import Arrays, laid_out, layer_norm, linear, serve


def net(p: Arrays, x: jax.Array) -> jax.Array:
    """Three linear layers and SiLU, behind the first of which a layer norm may be."""
    normalized = "1.weight" in p
    x = linear(p, "0", x)
    x = jax.nn.silu(layer_norm(p, "1", x) if normalized else x)
    return linear(p, "5" if normalized else "4", jax.nn.silu(linear(p, "3" if normalized else "2", x)))


def gradient(p: Arrays, x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: net(p, x).sum())(x)


def mse(a: jax.Array, b: jax.Array) -> jax.Array:
    return ((a - b) ** 2).mean()


def forces(p: Arrays, x: jax.Array, energy: jax.Array, force: jax.Array) -> jax.Array:
    out, pull = jax.vjp(partial(net, p), x)
    return mse(out, energy) + mse(-pull(jax.numpy.ones_like(out))[0], force)


def heat_equation(p: Arrays, points: jax.Array) -> jax.Array:
    (_, first), second = jax.value_and_grad(lambda x: (lambda g: (g[:, 0].sum(), g))(gradient(p, x)), has_aux=True)(points)
    return ((first[:, 1] - 0.1 * second[:, 0]) ** 2).mean()


def gradient_penalty(p: Arrays, real: jax.Array, fake: jax.Array) -> jax.Array:
    norm = jax.numpy.linalg.norm(gradient(p, (real + fake) / 2), axis=1)
    return net(p, fake).mean() - net(p, real).mean() + 10 * ((norm - 1) ** 2).mean()


def meta_learning(p: Arrays, x: jax.Array, y: jax.Array, others: jax.Array) -> jax.Array:
    grads = jax.grad(lambda p: mse(net(p, x), y))(p)
    return mse(net({name: value - 0.1 * grads[name] for name, value in p.items()}, others), y)


def score_matching(p: Arrays, x: jax.Array) -> jax.Array:
    jacobians = jax.vmap(jax.jacrev(lambda row: net(p, row[None])[0]))(x)
    return (jacobians.trace(axis1=1, axis2=2) + 0.5 * (net(p, x) ** 2).sum(1)).mean()


PROGRAMS: dict[str, Callable[..., jax.Array]] = {
    program.__name__: program for program in (forces, heat_equation, gradient_penalty, meta_learning, score_matching)}


def main(program: str, path: str) -> None:
    held = dict(np.load(path))
    batch = tuple(held.pop(name) for name in sorted(held) if name.startswith("batch."))
    params = {name: laid_out(name, value) for name, value in held.items()}
    optimizer = optax.adamw(1e-3, weight_decay=0.01)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, moments, *batch):
        loss, gradients = jax.value_and_grad(PROGRAMS[program])(params, *batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    serve(step, (params, optimizer.init(params)), batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
