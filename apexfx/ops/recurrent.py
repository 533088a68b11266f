"""lstm, gru, rnn_tanh, rnn_relu: a recurrent layer as one op, whatever the length of the sequence, and its derivative as another.

    apexfx::gru(x (T, N, I), hx [(L * D, N, H)], params, ...) -> y (T, N, D * H), hy, cy, recording
    apexfx::gru_backward(grad_y, grad_hy, grad_cy, y, hy, cy, recording, x, hx, params, ...) -> gradients

for L layers, each in D directions. torch's own functions compute both, so the bits are those of eager: the forward keeps what
autograd has recorded while the tensor `recording` lives, and the backward runs that. Where it is gone (a checkpoint, a second
backward) the backward runs the forward again: each result follows from the arguments alone. For the same reason dropout between
layers is not in the op, but beside one op a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import WeakTensorKeyDictionary, recording_autograd, storage_address
from ..config import HALVES
from ._define import define

_RECORDED = WeakTensorKeyDictionary()  # recording -> (inputs, outputs)

_OPTIONS = ("Tensor x, Tensor? batch_sizes, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, bool train, "
            "bool bidirectional, bool batch_first, bool[] needs_grad")


class RecurrentLayer:
    """One of torch's four kinds of recurrent layers.

    The arguments of the op are those of torch's function, but for dropout, and

        x: (T, N, I), or with `batch_first` (N, T, I); packed, with `batch_sizes`, (sum of batch_sizes, I).
        hx: h0, for "lstm" h0 and c0.
        needs_grad: for x and each of hx and params whether the backward is to compute its gradient.

    Args:
        name: of torch's function: "lstm", "gru", "rnn_tanh" or "rnn_relu".
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.op = define(f"{name}({_OPTIONS}) -> (Tensor y, Tensor hy, Tensor cy, Tensor recording)",
                         check=self._check, fake=self._fake)(self._forward)
        self.backward = define(
            f"{name}_backward(Tensor? grad_y, Tensor? grad_hy, Tensor? grad_cy, Tensor y, Tensor hy, Tensor cy, "
            f"Tensor recording, {_OPTIONS}) -> Tensor[]", check=lambda *_: None, fake=self._fake_backward)(self._backward)
        torch.library.register_autograd(f"apexfx::{name}", self._differentiate, setup_context=self._setup_context)
        torch.library.register_autograd(f"apexfx::{name}_backward", self._refuse)  # or the second derivative would be 0

    def __call__(self, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Do as torch's function of that name, packed or not; dropout between layers is an op of its own."""
        packed = isinstance(arguments[1], Tensor) and self.name != "lstm" or isinstance(arguments[1], tuple)
        batch_sizes, *arguments = arguments if packed else (None, *arguments)
        hx, params, has_biases, num_layers, dropout, train, bidirectional, *batch_first = arguments
        hx = list(hx) if self.name == "lstm" else [hx]
        # What another graph has computed in low precision: autocast takes it.
        hx = [h.float() if x.dtype == torch.float32 and h.dtype in HALVES else h for h in hx]
        if not (dropout and train):
            return self._layers(x, batch_sizes, hx, params, has_biases, num_layers, train, bidirectional, *batch_first)
        rows, count, states = 1 + bidirectional, len(params) // num_layers, []
        for layer in range(num_layers):
            x = F.dropout(x, dropout) if layer else x
            x, *state = self._layers(x, batch_sizes, [h[layer * rows:(layer + 1) * rows] for h in hx],
                                     params[layer * count:(layer + 1) * count], has_biases, 1, train, bidirectional, *batch_first)
            states.append(state)
        return x, *(torch.cat(parts) for parts in zip(*states))

    def _layers(self, x, batch_sizes, hx, params, has_biases, num_layers, train, bidirectional, batch_first=False) -> Any:
        needs_grad = [torch.is_grad_enabled() and t.requires_grad for t in (x, *hx, *params)]
        results = self.op(x, batch_sizes, hx, params, has_biases, num_layers, train, bidirectional, batch_first, needs_grad)
        return results[: 1 + len(hx)]

    # ---- the ops --------------------------------------------------------------------------------------------------------------

    def _check(self, x: Tensor, batch_sizes: Tensor | None, hx: Sequence[Tensor], params: Sequence[Tensor], *_: Any) -> None:
        dtypes = sorted({str(t.dtype) for t in (x, *hx, *params)})
        if len(dtypes) > 1:
            raise TypeError(f"apexfx::{self.name}: x is {x.dtype}, the state {hx[0].dtype}, the first weight {params[0].dtype}; "
                            f"expected one dtype and not {len(dtypes)} ({', '.join(dtypes)})")

    def _forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        recording = arguments[0].new_zeros(1)
        if any(arguments[-1]):
            inputs, outputs = _RECORDED[recording] = self._record(*arguments)
        else:
            outputs = self._torch(*arguments[:-1])
        batch_first = arguments[-2]
        y, *state = outputs
        y = y.detach().transpose(0, 1).contiguous().transpose(0, 1) if batch_first else y.detach().contiguous()
        cy = state[1].detach().contiguous() if len(state) > 1 else y.new_empty(0)
        return y, state[0].detach().contiguous(), cy, recording

    def _torch(self, x, batch_sizes, hx, params, has_biases, num_layers, train, bidirectional, batch_first) -> tuple[Tensor, ...]:
        if batch_sizes is not None and batch_sizes[0] != hx[0].shape[1]:
            raise ValueError(f"apexfx::{self.name}: the state is of {hx[0].shape[1]} sequences, and {int(batch_sizes[0])} are "
                             "packed")
        state = tuple(hx) if self.name == "lstm" else hx[0]
        shape = (batch_sizes, state) if batch_sizes is not None else (state,)
        last = () if batch_sizes is not None else (batch_first,)
        return getattr(torch, self.name)(x, *shape, tuple(params), has_biases, num_layers, 0.0, train, bidirectional, *last)

    def _record(self, x, batch_sizes, hx, params, *options_and_needs_grad) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the inputs, leaves of a graph that autograd has recorded, and the outputs."""
        *options, needs_grad = options_and_needs_grad
        with recording_autograd():
            inputs = [t.detach().requires_grad_(needed) for t, needed in zip((x, *hx, *params), needs_grad)]
            x, hx, params = inputs[0], inputs[1:1 + len(hx)], inputs[1 + len(hx):]
            return inputs, self._torch(x, batch_sizes, hx, params, *options)

    def _fake(self, x, batch_sizes, hx, params, has_biases, num_layers, train, bidirectional, batch_first, needs_grad) -> Any:
        width = hx[0].shape[-1] * (1 + bidirectional)
        steps = x.shape[:-1] if not batch_first else (x.shape[1], x.shape[0])
        y = x.new_empty((*steps, width))
        hy, cy = (h.new_empty(h.shape) for h in (*hx, hx[0].new_empty(0))[:2])
        return y.transpose(0, 1) if batch_first else y, hy, cy, x.new_empty(1)

    def _backward(self, grad_y, grad_hy, grad_cy, y, hy, cy, recording, *arguments: Any) -> list[Tensor]:
        inputs, outputs = _RECORDED.pop(recording, None) or self._record(*arguments)
        reached = [(o, g) for o, g in zip(outputs, (grad_y, grad_hy, grad_cy)) if g is not None]
        needed = [t for t in inputs if t.requires_grad]
        grads = torch.autograd.grad([o for o, _ in reached], needed, [g for _, g in reached], allow_unused=True)
        results: dict[int, Tensor] = {}  # by memory: torch returns one gradient for both biases
        for t, gradient in zip(needed, grads):
            gradient = torch.zeros_like(t) if gradient is None else gradient.contiguous()
            address = storage_address(gradient.untyped_storage())
            results[address if address not in results else -len(results)] = gradient.clone() if address in results else gradient
        return list(results.values())

    @staticmethod
    def _fake_backward(grad_y, grad_hy, grad_cy, y, hy, cy, recording, x, batch_sizes, hx, params, *options: Any) -> list[Tensor]:
        return [t.new_empty(t.shape) for t, needed in zip((x, *hx, *params), options[-1]) if needed]

    # ---- autograd -------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, batch_sizes, hx, params, *ctx.options = inputs
        ctx.num_states = len(hx)
        ctx.mark_non_differentiable(output[-1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, x, batch_sizes, *hx, *params)

    def _refuse(self, ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"apexfx: the loss holds a derivative through torch.{self.name}, whose op has no second one; loop "
                           "over cells (nn.LSTMCell, GRUCell, RNNCell), or differentiate what does not go through the layer")

    def _differentiate(self, ctx: Any, grad_y, grad_hy, grad_cy, _: Any) -> tuple[Any, ...]:
        *output, x, batch_sizes = ctx.saved_tensors[:6]
        hx, params = ctx.saved_tensors[6:6 + ctx.num_states], ctx.saved_tensors[6 + ctx.num_states:]
        computed = iter(self.backward(grad_y, grad_hy, grad_cy, *output, x, batch_sizes, hx, params, *ctx.options))
        grads = [next(computed) if needed else None for needed in ctx.options[-1]]
        return grads[0], None, grads[1:1 + len(hx)], grads[1 + len(hx):], *(None for _ in ctx.options)


lstm, gru, rnn_tanh, rnn_relu = map(RecurrentLayer, ("lstm", "gru", "rnn_tanh", "rnn_relu"))
