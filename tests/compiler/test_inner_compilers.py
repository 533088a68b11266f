"""Graphs that Inductor, left alone, computes wrongly without a word."""

from __future__ import annotations

import copy

import torch
from torch import nn

import apexfx


class Codebook(nn.Module):
    """Reads a buffer, and then moves it by a product of matrices, as an autoencoder its codes."""

    def __init__(self, share=0.1):
        super().__init__()
        self.encode, self.share = nn.Linear(4, 3), share
        self.register_buffer("codes", torch.eye(3))

    def forward(self, x):
        z = self.encode(x)
        read = (z * self.codes.exp()).tanh().sum()
        with torch.no_grad():
            self.codes.mul_(1 - self.share).add_(z.t() @ z, alpha=self.share)
        return read


def test_a_buffer_is_read_and_then_moved_by_a_scaled_product():
    torch.manual_seed(0)
    reference, x = Codebook(), torch.randn(3, 4)
    model = apexfx.transform(copy.deepcopy(reference), opt_level="O0", inner="inductor")
    for each in (reference, model):
        each(x).backward()
    torch.testing.assert_close(model.codes, reference.codes)
    torch.testing.assert_close(model.encode.weight.grad, reference.encode.weight.grad)
