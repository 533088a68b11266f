"""What public repositories train, in their shape: tables, point clouds, state spaces, trajectories, tags, codes, forecasts."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.world.script import Script, Update, program


class Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim=-1):
        ctx.dim = dim
        x = x - x.max(dim=dim, keepdim=True)[0]
        ranks = torch.arange(1, x.size(dim) + 1, dtype=x.dtype)
        descending = torch.sort(x, descending=True, dim=dim)[0]
        sums = descending.cumsum(dim) - 1
        support = (ranks * descending > sums).sum(dim=dim).unsqueeze(dim)
        threshold = sums.gather(dim, support - 1) / support.to(x.dtype)
        out = torch.clamp(x - threshold, min=0)
        ctx.save_for_backward(support, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        support, out = ctx.saved_tensors
        grad = grad.clone()
        grad[out == 0] = 0
        mean = grad.sum(dim=ctx.dim) / support.to(out.dtype).squeeze(ctx.dim)
        return torch.where(out != 0, grad - mean.unsqueeze(ctx.dim), grad), None


class GhostNorm(nn.Module):
    def __init__(self, width, virtual_batch_size=4):
        super().__init__()
        self.norm, self.virtual_batch_size = nn.BatchNorm1d(width, momentum=0.02), virtual_batch_size

    def forward(self, x):
        chunks = x.chunk(int(np.ceil(x.shape[0] / self.virtual_batch_size)), 0)
        return torch.cat([self.norm(chunk) for chunk in chunks], dim=0)


@program()
def tables_by_attention():
    """TabNet: ghost batch norms over slices of a batch, sparse masks by a function with its own backward."""
    class Layer(nn.Module):
        def __init__(self, inputs, width, shared=None):
            super().__init__()
            self.linear, self.norm = shared or nn.Linear(inputs, 2 * width, bias=False), GhostNorm(2 * width)

        def forward(self, x):
            gate, out = self.norm(self.linear(x)).chunk(2, 1)
            return out * torch.sigmoid(gate)

    class TabNet(nn.Module):
        def __init__(self, inputs=6, width=4, steps=2):
            super().__init__()
            self.norm, self.width = nn.BatchNorm1d(inputs, momentum=0.01), width
            shared = nn.Linear(inputs, 4 * width, bias=False)
            self.transformers = nn.ModuleList(Layer(inputs, 2 * width, shared) for _ in range(steps + 1))
            self.attention = nn.ModuleList(nn.Sequential(nn.Linear(width, inputs, bias=False), GhostNorm(inputs))
                                           for _ in range(steps))
            self.head = nn.Linear(width, 3, bias=False)

        def forward(self, x):
            x = self.norm(x)
            prior, entropy, out = torch.ones(x.shape).to(x.device), 0, 0
            attended = self.transformers[0](x)[:, self.width:]
            for attention, transformer in zip(self.attention, self.transformers[1:]):
                mask = Sparsemax.apply(attention(attended) * prior, -1)
                entropy += torch.mean(torch.sum(torch.mul(mask, torch.log(mask + 1e-5)), dim=1))
                prior = torch.mul(1.3 - mask, prior)
                h = transformer(torch.mul(mask, x))
                out = torch.add(out, F.relu(h[:, :self.width]))
                attended = h[:, self.width:]
            return self.head(out), entropy / len(self.attention)

    model = TabNet()

    def objective(model, x, y):
        logits, entropy = model(x)
        return F.cross_entropy(logits.float(), y) - 1e-3 * entropy

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3), clip=1.0)],
                  lambda step, carried: (torch.randn(10, 6), torch.randint(3, (10,))))


@program()
def point_clouds():
    """PointNet: clouds turned by matrices that are computed of them, which are kept near to orthogonal."""
    class Transform(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.k = k
            self.convs = nn.ModuleList([nn.Conv1d(k, 8, 1), nn.Conv1d(8, 16, 1)])
            self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(16)])
            self.last = nn.Linear(16, k * k)

        def forward(self, x):
            for conv, norm in zip(self.convs, self.norms):
                x = F.relu(norm(conv(x)))
            x = torch.max(x, 2, keepdim=True)[0].view(-1, 16)
            eye = torch.from_numpy(np.eye(self.k).flatten().astype(np.float32)).view(1, self.k * self.k).repeat(len(x), 1)
            if x.is_cuda:
                eye = eye.cuda()
            return (self.last(x) + eye).view(-1, self.k, self.k)

    class PointNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn, self.turn_features = Transform(3), Transform(8)
            self.first, self.second = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 16, 1)
            self.norm, self.last_norm = nn.BatchNorm1d(8), nn.BatchNorm1d(16)
            self.head = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))

        def forward(self, x):
            x = torch.bmm(x.transpose(2, 1), self.turn(x)).transpose(2, 1)
            x = F.relu(self.norm(self.first(x)))
            matrix = self.turn_features(x)
            x = torch.bmm(x.transpose(2, 1), matrix).transpose(2, 1)
            x = self.last_norm(self.second(x))
            return F.log_softmax(self.head(torch.max(x, 2)[0]), dim=1), matrix

    model = PointNet()

    def objective(model, points, label):
        logs, matrix = model(points.transpose(2, 1))
        eye = torch.eye(matrix.size(1))[None]
        near = torch.mean(torch.norm(torch.bmm(matrix, matrix.transpose(2, 1)) - eye, dim=(1, 2)))
        return F.nll_loss(logs, label) + near * 0.001

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))],
                  lambda step, carried: (torch.randn(6, 12, 3), torch.randint(4, (6,))))


@program()
def selective_state_space():
    """Mamba: a recurrence whose matrices depend on the input, scanned in a loop; a causal convolution; tied embeddings."""
    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

    class Block(nn.Module):
        def __init__(self, width=8, inner=16, states=4, rank=2):
            super().__init__()
            self.inner, self.rank = inner, rank
            self.norm, self.in_proj = Norm(width), nn.Linear(width, inner * 2, bias=False)
            self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
            self.x_proj, self.dt_proj = nn.Linear(inner, rank + states * 2, bias=False), nn.Linear(rank, inner)
            self.A_log = nn.Parameter(torch.log(torch.arange(1, states + 1).repeat(inner, 1)))
            self.D, self.out_proj = nn.Parameter(torch.ones(inner)), nn.Linear(inner, width, bias=False)

        def forward(self, x):
            length = x.shape[1]
            h, gate = self.in_proj(self.norm(x)).transpose(1, 2).split([self.inner, self.inner], dim=1)
            h = self.scan(F.silu(self.conv(h)[:, :, :length])) * F.silu(gate)
            return self.out_proj(h.transpose(1, 2)) + x

        def scan(self, u):
            A, (batch, inner, length), states = -torch.exp(self.A_log.float()), u.shape, self.A_log.shape[1]
            delta, B, C = self.x_proj(u.transpose(1, 2)).split([self.rank, states, states], dim=-1)
            delta = F.softplus(self.dt_proj(delta))
            decay = torch.exp(torch.einsum("bld,dn->bdln", delta, A.to(delta.dtype)))
            inputs = torch.einsum("bld,bln,bdl->bdln", delta, B, u)
            x, ys = torch.zeros((batch, inner, states)), []
            for i in range(length):
                x = decay[:, :, i] * x + inputs[:, :, i]
                ys.append(torch.einsum("bdn,bn->bd", x, C[:, i, :].to(x.dtype)))
            return torch.stack(ys, dim=2) + u * self.D.float()[:, None]

    class Mamba(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layers, self.norm = nn.Embedding(12, 8), nn.ModuleList([Block(), Block()]), Norm(8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    model = Mamba()

    def objective(model, ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, betas=(0.9, 0.95))
    return Script(model, [Update(objective, optimizer, clip=1.0)], lambda step, carried: (torch.randint(12, (3, 7)),))


@program(train_step="depends on a number .*F.mse_loss")
def trajectories():
    """Decision Transformer: returns, states and actions in turns as tokens; rows that pad are left out of the loss by a mask."""
    class Block(nn.Module):
        def __init__(self, width, length):
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
            self.first, self.second, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)
            self.register_buffer("mask", torch.tril(torch.ones((length, length))).view(1, 1, length, length))

        def forward(self, x):
            batch, length, width = x.shape
            q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
            weights = q @ k.transpose(2, 3) / (width // 2) ** 0.5
            weights = weights.masked_fill(self.mask[..., :length, :length] == 0, float("-inf"))
            h = (self.drop(F.softmax(weights, dim=-1)) @ v).transpose(1, 2).contiguous().view(batch, length, width)
            x = self.first(x + self.drop(self.out(h)))
            return self.second(x + self.mlp(x))

    class DecisionTransformer(nn.Module):
        def __init__(self, width=8, context=5):
            super().__init__()
            self.width, self.blocks = width, nn.Sequential(*(Block(width, 3 * context) for _ in range(2)))
            self.time, self.norm = nn.Embedding(20, width), nn.LayerNorm(width)
            self.of_return, self.of_state, self.of_action = nn.Linear(1, width), nn.Linear(4, width), nn.Linear(2, width)
            self.action = nn.Sequential(nn.Linear(width, 2), nn.Tanh())

        def forward(self, times, states, actions, returns):
            batch, length, _ = states.shape
            time = self.time(times)
            h = torch.stack((self.of_return(returns) + time, self.of_state(states) + time, self.of_action(actions) + time), dim=1)
            h = self.blocks(self.norm(h.permute(0, 2, 1, 3).reshape(batch, 3 * length, self.width)))
            return self.action(h.reshape(batch, length, 3, self.width).permute(0, 2, 1, 3)[:, 1])

    model = DecisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-4, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: min((steps + 1) / 3, 1))

    def objective(model, times, states, actions, returns, mask):
        wanted, found = torch.clone(actions).detach(), model(times, states, actions, returns)
        return F.mse_loss(found.reshape(-1, 2)[mask.view(-1,) > 0].float(), wanted.view(-1, 2)[mask.view(-1,) > 0])

    def batch(step, carried):
        mask = torch.arange(5) < torch.randint(2, 6, (4, 1))
        return torch.randint(20, (4, 5)), torch.randn(4, 5, 4), torch.randn(4, 5, 2), torch.randn(4, 5, 1), mask.long()

    return Script(model, [Update(objective, optimizer, clip=0.25)], batch, after=lambda model, step: scheduler.step())


@program()
def tags_of_a_sentence():
    """BiLSTM-CRF, as torch's tutorial has it: one sentence a step, a score by loops over words and tags."""
    class Tagger(nn.Module):
        def __init__(self, tags=4):
            super().__init__()
            self.words, self.lstm = nn.Embedding(20, 6), nn.LSTM(6, 4, num_layers=1, bidirectional=True)
            self.to_tags, self.tags = nn.Linear(8, tags), tags
            self.transitions = nn.Parameter(torch.randn(tags, tags))
            self.transitions.data[tags - 2, :] = -100.0
            self.transitions.data[:, tags - 1] = -100.0

        @staticmethod
        def log_sum_exp(x):
            largest = x[0, torch.max(x, 1)[1].item()]
            return largest + torch.log(torch.sum(torch.exp(x - largest.view(1, -1).expand(1, x.size()[1]))))

        def partition(self, features):
            forward = torch.full((1, self.tags), -100.0)
            forward[0][self.tags - 2] = 0.0
            for feature in features:
                forward = torch.cat([self.log_sum_exp(
                    forward + self.transitions[tag].view(1, -1) + feature[tag].view(1, -1).expand(1, self.tags)).view(1)
                    for tag in range(self.tags)]).view(1, -1)
            return self.log_sum_exp(forward + self.transitions[self.tags - 1])

        def score(self, features, tags):
            score, tags = torch.zeros(1), torch.cat([torch.tensor([self.tags - 2], dtype=torch.long), tags])
            for i, feature in enumerate(features):
                score = score + self.transitions[tags[i + 1], tags[i]] + feature[tags[i + 1]]
            return score + self.transitions[self.tags - 1, tags[-1]]

        def forward(self, sentence, tags):
            out, _ = self.lstm(self.words(sentence).view(len(sentence), 1, -1))
            features = self.to_tags(out.view(len(sentence), 8)).float()
            return self.partition(features) - self.score(features, tags)

    model = Tagger()

    def objective(model, sentence, tags):
        return model(sentence, tags).sum()

    return Script(model, [Update(objective, torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4))],
                  lambda step, carried: (torch.randint(20, (3,)), torch.randint(2, (3,))))


@program()
def redundancy_of_two_views():
    """Barlow Twins: a diagonal written through its view, the rest weighed by a mask in place, a norm made in the loss."""
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8, bias=False))

    def objective(model, one, other):
        a, b = model(one), model(other)
        norm = nn.BatchNorm1d(8, affine=False).to(a.device)
        c = (norm(a.float()).T @ norm(b.float()).to(a.dtype).float()).div_(one.size(0))
        off = c.flatten()[:-1].view(7, 9)[:, 1:].flatten().pow(2).sum()
        weighed = (c - torch.eye(8)).pow(2)
        weighed[~torch.eye(8).bool()] *= 0.05
        return torch.diagonal(c).add_(-1).pow_(2).sum() + 0.005 * off + weighed.sum()

    return Script(model, [Update(objective, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))],
                  lambda step, carried: (x := torch.randn(12, 6), x + 0.1 * torch.randn(12, 6)))


@program(train_step="Data-dependent branching.*torch.any")
def residual_codes():
    """Residual vector quantization with codes that follow averages, and are drawn anew where few points use them."""
    class Codebook(nn.Module):
        def __init__(self, codes=5, width=4):
            super().__init__()
            self.register_buffer("codes", torch.randn(codes, width))
            self.register_buffer("sizes", torch.ones(codes))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x):
            x, codes = x.float(), self.codes
            flat = x.reshape(-1, x.shape[-1])
            index = (-torch.cdist(flat, codes)).argmax(dim=-1)
            one_hot = F.one_hot(index, len(codes)).type(x.dtype)
            found = F.embedding(index, codes).view(x.shape)
            if self.training:
                self.sizes.data.lerp_(one_hot.sum(0), 0.2)
                self.sums.data.lerp_((one_hot.t() @ flat.detach()).float(), 0.2)
                smooth = (self.sizes + 1e-5) / (self.sizes.sum() + len(codes) * 1e-5) * self.sizes.sum()
                self.codes.data.copy_(self.sums / smooth.unsqueeze(1))
                self.expire(flat)
            return x + (found - x).detach(), F.mse_loss(found.detach(), x)

        def expire(self, flat):
            few = self.sizes < 0.3
            if not torch.any(few):
                return
            drawn = flat.detach()[torch.arange(len(self.sizes)) % len(flat)]
            self.codes.data.copy_(torch.where(few[:, None], drawn, self.codes))

    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 6)
            self.books = nn.ModuleList([Codebook(), Codebook()])

        def forward(self, x):
            left, out, losses = self.encoder(x), 0.0, []
            for book in self.books:
                found, loss = book(left)
                left, out = left - found.detach(), out + found
                losses.append(loss)
            return self.decoder(out), torch.stack(losses)

    model = Coder()

    def objective(model, x):
        out, commitment = model(x)
        return F.l1_loss(out.float(), x) + 0.25 * commitment.sum()

    return Script(model, [Update(objective, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))],
                  lambda step, carried: (torch.randn(8, 6),))


@program()
def forecasts_by_quantiles():
    """Temporal Fusion Transformer: selected variables, an LSTM that decodes from what one has encoded, a loss by quantiles."""
    class Gated(nn.Module):
        def __init__(self, width, out=None, context=False):
            super().__init__()
            out = out or width
            self.first, self.second, self.gate = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 2 * out)
            self.context = nn.Linear(width, width, bias=False) if context else None
            self.skip = nn.Linear(width, out) if out != width else nn.Identity()
            self.norm, self.drop = nn.LayerNorm(out), nn.Dropout(0.1)

        def forward(self, x, context=None):
            h = self.first(x)
            if context is not None:
                h = h + self.context(context)
            return self.norm(self.skip(x) + F.glu(self.gate(self.drop(self.second(F.elu(h)))), dim=-1))

    class Selection(nn.Module):
        def __init__(self, variables, width):
            super().__init__()
            self.embeds = nn.ModuleList(nn.Linear(1, width) for _ in range(variables))
            self.each, self.flat = nn.ModuleList(Gated(width) for _ in range(variables)), Gated(variables * width, variables)

        def forward(self, x):
            parts = [embed(x[..., i:i + 1]) for i, embed in enumerate(self.embeds)]
            weights = torch.softmax(self.flat(torch.cat(parts, dim=-1)), dim=-1).unsqueeze(-2)
            parts = torch.stack([gated(part) for gated, part in zip(self.each, parts)], dim=-1)
            return (weights * parts).sum(dim=-1)

    class Fusion(nn.Module):
        def __init__(self, width=8, horizon=3):
            super().__init__()
            self.horizon, self.kind = horizon, nn.Embedding(4, width)
            self.past, self.future, self.enriched = Selection(3, width), Selection(2, width), Gated(width, context=True)
            self.encoder, self.decoder = nn.LSTM(width, width, batch_first=True), nn.LSTM(width, width, batch_first=True)
            self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
            self.last, self.out = Gated(width), nn.Linear(width, 3)

        def forward(self, kind, past, future):
            kind = self.kind(kind)
            state = kind.unsqueeze(0)
            encoded, state = self.encoder(self.past(past), (state, torch.zeros_like(state)))
            decoded, _ = self.decoder(self.future(future), state)
            h = self.enriched(torch.cat([encoded, decoded], dim=1), kind.unsqueeze(1))
            length = h.size(1)
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)[-self.horizon:]
            attended, _ = self.attention(h[:, -self.horizon:], h, h, attn_mask=mask)
            return self.out(self.last(attended + h[:, -self.horizon:]))

    model, quantiles = Fusion(), [0.1, 0.5, 0.9]

    def objective(model, kind, past, future, wanted):
        found, losses = model(kind, past, future).float(), []
        assert not wanted.requires_grad and found.size(0) == wanted.size(0)
        for i, q in enumerate(quantiles):
            errors = wanted - found[..., i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
        return torch.mean(torch.sum(torch.cat(losses, dim=1), dim=1))

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3), clip=0.5)],
                  lambda step, carried: (torch.randint(4, (4,)), torch.randn(4, 5, 3), torch.randn(4, 3, 2), torch.randn(4, 3)))
