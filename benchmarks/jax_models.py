"""The small models of train_step.py as jax.jit + optax would train them; run by jax_step.py, in an environment that has jax.

    python benchmarks/jax_models.py MODEL FILE.npz

FILE holds torch's parameters by name, and the batch as `x` and `y`. Every line of stdin asks for so many steps, and is answered
by the seconds they took and the last loss, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

Arrays = dict[str, Any]


def linear(p: Arrays, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def perceptron(p: Arrays, state: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    for layer in range(0, 40, 2):
        x = jax.nn.relu(linear(p, f"{layer}", x))
    return linear(p, "40", x), state


def convolution(p: Arrays, name: str, x: jax.Array, stride: int) -> jax.Array:
    y = jax.lax.conv_general_dilated(x, p[f"{name}.weight"], (stride, stride), ((1, 1), (1, 1)),
                                     dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + p[f"{name}.bias"]


def batch_norm(p: Arrays, state: Arrays, name: str, x: jax.Array) -> tuple[jax.Array, Arrays]:
    mean, variance, n = x.mean((0, 1, 2)), x.var((0, 1, 2)), x.size // x.shape[-1]
    running = {f"{name}.running_mean": mean, f"{name}.running_var": variance * (n / (n - 1))}
    state = state | {key: 0.9 * state[key] + 0.1 * value for key, value in running.items()}
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"], state


def small_cnn(p: Arrays, state: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    x, state = batch_norm(p, state, "1", convolution(p, "0", x, 1))
    x, state = batch_norm(p, state, "4", convolution(p, "3", jax.nn.relu(x), 2))
    x = jax.nn.relu(x).reshape(len(x), -1)
    return linear(p, "9", jax.nn.relu(linear(p, "7", x))), state


def layer_norm(p: Arrays, name: str, x: jax.Array) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def attention(p: Arrays, name: str, x: jax.Array, heads: int = 4) -> jax.Array:
    batch, positions, width = x.shape
    qkv = (x @ p[f"{name}.in_proj_weight"] + p[f"{name}.in_proj_bias"]).reshape(batch, positions, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    return linear(p, f"{name}.out_proj", jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


def encoder(p: Arrays, state: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    for layer in ("0.layers.0", "0.layers.1"):
        x = layer_norm(p, f"{layer}.norm1", x + attention(p, f"{layer}.self_attn", x))
        x = layer_norm(p, f"{layer}.norm2", x + linear(p, f"{layer}.linear2", jax.nn.relu(linear(p, f"{layer}.linear1", x))))
    return linear(p, "2", x.reshape(len(x), -1)), state


MODELS: dict[str, Callable[[Arrays, Arrays, jax.Array], tuple[jax.Array, Arrays]]] = {
    "mlp": perceptron, "cnn": small_cnn, "encoder": encoder}


def laid_out(name: str, value: np.ndarray) -> np.ndarray:
    """Return torch's parameter as jax's operations take it: (in, out), or HWIO of a convolution."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0).copy()
    return value.T.copy() if value.ndim == 2 else value


def first_linear_behind_images(p: Arrays, name: str, channels: int) -> None:
    """Reorder the rows of a weight that reads flattened images: torch's are (C, H, W), jax's (H, W, C)."""
    rows, out = p[name].shape
    side = round((rows // channels) ** 0.5)
    p[name] = p[name].reshape(channels, side, side, out).transpose(1, 2, 0, 3).reshape(rows, out).copy()


def main(model: str, path: str) -> None:
    held = dict(np.load(path))
    x, y = held.pop("x"), held.pop("y")
    state = {name: value for name, value in held.items() if "running" in name}
    params = {name: laid_out(name, value) for name, value in held.items() if "running" not in name and "tracked" not in name}
    if model == "cnn":
        x = x.transpose(0, 2, 3, 1).copy()
        first_linear_behind_images(params, "7.weight", 32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, moments, x, y):
        def loss_fn(params):
            logits, new_state = MODELS[model](params, state, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new_state

        (loss, new_state), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), new_state, moments, loss

    serve(step, (params, state, optimizer.init(params)), (x, y))


def serve(step: Callable[..., tuple[Any, ...]], carried: tuple[Any, ...], batch: tuple[Any, ...]) -> None:
    """Run steps, which return what they carry on and a loss, as stdin asks for them."""
    carried, batch = jax.device_put((carried, batch))
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            *carried, loss = step(*carried, *batch)
        jax.block_until_ready((carried, loss))
        print(json.dumps({"seconds": time.perf_counter() - begin, "loss": float(loss)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
