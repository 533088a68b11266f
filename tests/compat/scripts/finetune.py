"""A fine-tuning loop in the way language-model scripts used Apex: FusedAdam, accumulation, checkpoints of all three states."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", type=str, default="O2")
parser.add_argument("--output", type=str, required=True)
parser.add_argument("--accumulation", type=int, default=2)
args = parser.parse_args()


class Classifier(nn.Module):
    def __init__(self, layer_norm):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.norm = layer_norm(32)
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.norm(self.layer(self.embedding(input_ids))).mean(1))
        outputs = (logits,)
        if labels is not None:
            outputs = (nn.functional.cross_entropy(logits.float(), labels),) + outputs
        return outputs


def build():
    torch.manual_seed(0)
    if args.fp16:
        try:
            from apex.normalization import FusedLayerNorm as LayerNorm
            from apex.optimizers import FusedAdam as Adam
        except ImportError:
            raise ImportError("Please install apex to use fp16 training.")
    else:
        from torch.nn import LayerNorm
        from torch.optim import AdamW as Adam
    model = Classifier(LayerNorm)
    grouped = [
        {"params": [p for n, p in model.named_parameters() if "bias" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0},
    ]
    optimizer = Adam(grouped, lr=2e-3)
    if args.fp16:
        from apex import amp

        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    return model, optimizer


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (16, 12), generator=generator)
    return ids, (ids[:, 0] < 32).long()


def train(model, optimizer, first, last):
    from apex import amp

    losses = []
    for step in range(first, last):
        for micro in range(args.accumulation):
            ids, labels = batch(step * args.accumulation + micro)
            loss = model(ids, labels=labels)[0] / args.accumulation
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer) if args.fp16 else model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


model, optimizer = build()
from apex import amp  # noqa: E402

first = train(model, optimizer, 0, 20)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, args.output)
expected = train(model, optimizer, 20, 25)

model, optimizer = build()
checkpoint = torch.load(args.output)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
amp.load_state_dict(checkpoint["amp"])
assert train(model, optimizer, 20, 25) == expected
assert expected[-1] < first[0]
print("resumed at the same loss")
