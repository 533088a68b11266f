"""Small models of every kind that people train: what `transform()` must capture, train and evaluate at O0-O3.

Every model is deterministic (no dropout), so that one run can be compared with another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apexfx


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        build: makes the module.
        batch: batch size -> keyword arguments of `forward`, without the labels.
        labels: batch size -> integer labels, given to `loss`; None where the model computes its loss itself.
        needs: a module that must be importable, or "".
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    labels: Callable[[int], Tensor] | None
    needs: str = ""

    def loss(self, model: nn.Module, batch: dict[str, Any], labels: Tensor | None) -> Tensor:
        """Return the training loss as a float32 scalar."""
        out = model(**batch)
        if labels is None:
            return out.loss
        logits = getattr(out, "logits", out)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def outputs(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return the logits."""
        out = model(**batch)
        return getattr(out, "logits", out)


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.skip = shortcut if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x if self.skip is None else self.skip(x)
        return F.relu(y, inplace=True)


class ResidualCNN(nn.Module):
    """A residual network with in-place adds, (N, 3, H, W) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.within = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    """MLP-mixer, (N, 3, 16, 16) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, 24), MixerBlock(16, 24))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class EmbeddingLSTM(nn.Module):
    """Embedding, two LSTM layers, a linear layer: (N, T) tokens -> (N, T, 50)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(24, 50)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class LoopedGRU(nn.Module):
    """A GRU cell in a Python loop over time, (N, T, 8) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 24, device=x.device)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


def _double_conv(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
                         nn.Conv2d(out, out, 3, padding=1), nn.InstanceNorm2d(out, affine=True), nn.LeakyReLU(0.1))


class UNet(nn.Module):
    """Two levels, skip connections, a transposed convolution and an interpolation: (N, 3, H, W) -> (N, H, W, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _double_conv(3, 8), _double_conv(8, 16), _double_conv(16, 16)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.up2, self.up1 = _double_conv(32, 8), _double_conv(16, 8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.up2(torch.cat([self.up(self.bottom(F.max_pool2d(b, 2))), b], 1))
        c = F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up1(torch.cat([c, a], 1))).permute(0, 2, 3, 1)


class ViT(nn.Module):
    """Class token, learnt positions, two pre-norm encoder layers of torch's: (N, 3, 16, 16) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(0.02 * torch.randn(1, 17, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])


def _hugging_face(model: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        model_class = getattr(transformers, model)
        made = model_class.config_class(**config)
        # Newer releases read this from the config although no config has it by default.
        made.decoder_start_token_id = 0
        return model_class(made)

    return build


def _images(size: int, name: str = "x") -> Callable[[int], dict[str, Any]]:
    return lambda n: {name: torch.randn(n, 3, size, size)}


def _tokens(name: str, *, mask: bool = False, labels: bool = False) -> Callable[[int], dict[str, Any]]:
    def batch(n: int) -> dict[str, Any]:
        tokens = torch.randint(1, 50, (n, 12))
        out = {name: tokens}
        if mask:
            out["attention_mask"] = torch.ones_like(tokens)
            out["attention_mask"][0, 8:] = 0
        if labels:
            out["labels"] = tokens
        return out

    return batch


def _classes(*shape: int, classes: int = 10) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(0, classes, (n, *shape))


_TEXT = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

ZOO: dict[str, Entry] = {
    "residual_cnn": Entry(ResidualCNN, _images(16), _classes()),
    "mlp_mixer": Entry(Mixer, _images(16), _classes()),
    "lstm": Entry(EmbeddingLSTM, _tokens("tokens"), _classes(12, classes=50)),
    "gru_loop": Entry(LoopedGRU, lambda n: {"x": torch.randn(n, 5, 8)}, _classes()),
    "unet": Entry(UNet, _images(16), _classes(16, 16, classes=5)),
    "vit": Entry(ViT, _images(16), _classes()),
    "bert": Entry(_hugging_face("BertForSequenceClassification", hidden_size=32, num_hidden_layers=2, num_labels=10,
                                num_attention_heads=2, intermediate_size=64, **_TEXT, **_NO_DROPOUT),
                  _tokens("input_ids", mask=True), _classes(), "transformers"),
    "gpt2": Entry(_hugging_face("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=2, n_positions=64, use_cache=False,
                                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_TEXT),
                  _tokens("input_ids", mask=True, labels=True), None, "transformers"),
    "llama": Entry(_hugging_face("LlamaForCausalLM", hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                 num_key_value_heads=1, intermediate_size=64, use_cache=False, **_TEXT),
                   _tokens("input_ids", mask=True, labels=True), None, "transformers"),
    "t5": Entry(_hugging_face("T5ForConditionalGeneration", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
                              use_cache=False, dropout_rate=0.0, **_TEXT),
                _tokens("input_ids", mask=True, labels=True), None, "transformers"),
    "swin": Entry(_hugging_face("SwinForImageClassification", image_size=32, patch_size=2, embed_dim=16, depths=[2, 1],
                                num_heads=[2, 2], window_size=4, num_labels=10, drop_path_rate=0.0, **_NO_DROPOUT),
                  _images(32, "pixel_values"), _classes(), "transformers"),
    "convnext": Entry(_hugging_face("ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[1, 1],
                                    num_stages=2, image_size=32, num_labels=10),
                      _images(32, "pixel_values"), _classes(), "transformers"),
}  # fmt: skip


@dataclass
class Run:
    """Three training steps and an evaluation of one model.

    Attributes:
        losses: one a step.
        logits: in eval mode after the steps, float64.
        grad_dtypes: those of the parameters that differ from their parameter's: none, where all is well.
        num_graphs: of `train_step()`, if that has trained it.
    """

    losses: list[float]
    logits: Tensor
    grad_dtypes: list[str]
    num_graphs: int


def train(entry: Entry, model: nn.Module, *, loss_scale: float | None = None, **options: Any) -> Run:
    """Train `model` by three steps of SGD on data that depends only on the step, then evaluate it on other data.

    Args:
        options: of `train_step()`, which trains it where there are any.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    update = options and apexfx.train_step(model, optimizer=optimizer, objective=entry.loss, loss_scale=loss_scale, **options)
    losses, odd = [], []
    model.train()
    for place in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(place)
            batch, labels = entry.batch(4), entry.labels(4) if entry.labels else None
        if update:
            losses.append(update(batch, labels).item())
            continue
        loss = entry.loss(model, batch, labels)
        optimizer.zero_grad()
        (loss * (loss_scale or 1.0)).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                odd += [name] if p.grad.dtype != p.dtype else []
                p.grad.div_(loss_scale or 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        logits = entry.outputs(model, entry.batch(4)).double()
    return Run(losses, logits, odd, len(update.report.graphs) if update else 0)
