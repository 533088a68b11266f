"""Programs over images: recognition, detection, segmentation, representation."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.world.script import Script, Update, program

CLASSES = 5


def conv(channels, out, stride=1):
    return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


def images(n=4, size=12):
    return torch.randn(n, 3, size, size)


class Net(nn.Module):
    """A small residual network; `features` is what stands in front of its head."""

    def __init__(self, out=CLASSES):
        super().__init__()
        self.stem, self.body = conv(3, 8), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.down, self.head = conv(8, 16, stride=2), nn.Linear(16, out)

    def features(self, x):
        x = self.stem(x)
        x = F.relu_(self.body(x).add_(x))
        return self.down(x).mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


def sgd(model, lr=0.1):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9, weight_decay=1e-4)


@program()
def mixed_images():
    """Mixup, soft targets, channels last, and an average of the model beside."""
    model = Net().to(memory_format=torch.channels_last)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),
                                                  use_buffers=True)

    def batch(step, carried):
        x, y = images().to(memory_format=torch.channels_last), F.one_hot(torch.randint(CLASSES, (4,)), CLASSES).float()
        share, order = 0.7, torch.randperm(4)
        return share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]

    return Script(model, [Update(lambda model, x, y: F.cross_entropy(model(x), y), sgd(model))], batch,
                  after=lambda *_: average.update_parameters(model))


@program()
def detection():
    """Anchors against boxes whose number differs from image to image; images without any."""
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Sequential(conv(3, 8, 2), conv(8, 16, 2)), nn.Conv2d(16, CLASSES + 4, 1)

        def forward(self, x):
            return self.head(self.backbone(x)).flatten(2).transpose(1, 2)

    model = Detector()
    grid = torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(3.0), indexing="ij"), -1).flatten(0, 1) * 4
    anchors = torch.cat([grid - 1, grid + 5], 1)

    def overlap(a, b):
        low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
        common = (high - low).clamp(min=0).prod(-1)
        area = [(x[:, 2:] - x[:, :2]).prod(-1) for x in (a, b)]
        return common / (area[0][:, None] + area[1][None, :] - common)

    def objective(model, x, targets):
        losses = []
        for out, (boxes, labels) in zip(model(x), targets):
            scores, offsets = out[:, :CLASSES], out[:, CLASSES:]
            wanted = torch.zeros(len(anchors), dtype=torch.long)
            if len(boxes):
                quality, which = overlap(anchors, boxes).max(1)
                positive = quality > 0.2
                wanted[positive] = labels[which[positive]]
                distance = F.smooth_l1_loss(anchors + offsets.float(), boxes[which], reduction="none").mean(1)
                losses.append((distance * positive).sum() / positive.sum().clamp(min=1) * 0.1)
            losses.append(F.cross_entropy(scores, wanted))
        return torch.stack(losses).sum() / len(x)

    def batch(step, carried):
        targets = []
        for number in [(2, 1), (2, 1), (0, 3), (2, 1), (0, 3)][step]:
            corner = torch.rand(number, 2) * 6
            targets.append((torch.cat([corner, corner + 2 + torch.rand(number, 2) * 4], 1), torch.randint(1, CLASSES, (number,))))
        return images(2), targets

    return Script(model, [Update(objective, sgd(model, 0.02))], batch)


@program()
def segmentation_by_u_net():
    """Skips, a transposed convolution, interpolation, focal and dice losses."""
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.down, self.deep = conv(3, 8), conv(8, 16), conv(16, 16)
            self.up, self.merge, self.leave = nn.ConvTranspose2d(16, 16, 2, 2), conv(32, 8), conv(16, 8)
            self.head = nn.Conv2d(8, CLASSES, 1)

        def forward(self, x):
            a = self.enter(x)
            b = self.down(F.max_pool2d(a, 2))
            c = self.merge(torch.cat([self.up(self.deep(F.max_pool2d(b, 2))), b], 1))
            c = F.interpolate(c, size=a.shape[-2:], mode="bilinear", align_corners=False)
            return self.head(self.leave(torch.cat([c, a], 1)))

    model = UNet()

    def objective(model, x, mask):
        logits = model(x)
        cross = F.cross_entropy(logits, mask, reduction="none")
        focal = ((1 - torch.exp(-cross)) ** 2 * cross).mean()
        probabilities, truth = logits.softmax(1), F.one_hot(mask, CLASSES).permute(0, 3, 1, 2)
        dice = 2 * (probabilities * truth).sum((0, 2, 3)) / (probabilities + truth).sum((0, 2, 3)).clamp(min=1e-6)
        return focal + 1 - dice.mean()

    return Script(model, [Update(objective, sgd(model))], lambda step, carried: (images(), torch.randint(CLASSES, (4, 12, 12))))


@program()
def momentum_contrast():
    """Two views, an encoder of keys that follows by momentum, and a queue of old keys."""
    class Contrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = Net(8)
            self.keys = copy.deepcopy(self.encoder).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, one, other):
            query = F.normalize(self.encoder(one), dim=1)
            with torch.no_grad():
                for key, p in zip(self.keys.parameters(), self.encoder.parameters()):
                    key.mul_(0.9).add_(p, alpha=0.1)
                key = F.normalize(self.keys(other), dim=1)
            near = torch.einsum("nc,nc->n", query, key).unsqueeze(-1)
            far = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
            with torch.no_grad():
                self.queue[:, self.place + torch.arange(len(key))] = key.T.to(self.queue.dtype)
                self.place[0] = (self.place[0] + len(key)) % 16
            return torch.cat([near, far], 1) / 0.2

    model = Contrast()

    def objective(model, one, other):
        logits = model(one, other)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    return Script(model, [Update(objective, sgd(model))], lambda step, carried: (images(), images()))


@program()
def contrast_of_two_views():
    """All pairs of a batch; the diagonal is filled in place."""
    model = Net(8)

    def objective(model, one, other):
        z = F.normalize(model(torch.cat([one, other])), dim=1)
        similar = z @ z.t()
        similar.fill_diagonal_(-1e4)
        n = len(one)
        return F.cross_entropy(similar / 0.5, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))

    return Script(model, [Update(objective, sgd(model))], lambda step, carried: (images(), images()))


@program()
def siamese_network():
    """One encoder, called twice; pairs are drawn together or pushed apart."""
    model = Net(8)

    def objective(model, one, other, same):
        distance = F.pairwise_distance(model(one), model(other))
        return torch.where(same, distance, F.relu(1 - distance)).square().mean()

    return Script(model, [Update(objective, sgd(model, 0.02))],
                  lambda step, carried: (images(), images(), torch.tensor([True, False, True, False])))


@program()
def distillation():
    """A frozen teacher in evaluation mode, in the objective's closure."""
    model, teacher = Net(), Net().eval().requires_grad_(False)

    def objective(model, x, labels):
        with torch.no_grad():
            wanted = teacher(x) / 4
        logits = model(x)
        soft = F.kl_div(F.log_softmax(logits / 4, dim=1), F.log_softmax(wanted, dim=1), reduction="batchmean", log_target=True)
        return 0.3 * F.cross_entropy(logits, labels) + 0.7 * 16 * soft

    return Script(model, [Update(objective, sgd(model))], lambda step, carried: (images(), torch.randint(CLASSES, (4,))))


@program()
def super_resolution():
    """Sub-pixel convolution; features of a frozen network are compared as well."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(8), nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2))
    features = nn.Sequential(conv(3, 8), conv(8, 8)).eval().requires_grad_(False)

    def objective(model, small, large):
        out = model(small) + F.interpolate(small, scale_factor=2, mode="bicubic")
        return F.l1_loss(out, large) + 0.1 * F.mse_loss(features(out), features(large))

    def batch(step, carried):
        large = images(4, 12)
        return F.avg_pool2d(large, 2), large

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))], batch)


@program()
def masked_autoencoder():
    """A random quarter of the patches is seen; the rest is told from positions, and the loss reads the rest alone."""
    class MAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.position = nn.Linear(27, 16), nn.Parameter(torch.randn(1, 16, 16) * 0.02)
            self.token = nn.Parameter(torch.zeros(1, 1, 16))
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.decoder, self.head = copy.deepcopy(self.encoder), nn.Linear(16, 27)

        def forward(self, patches, noise):
            order = noise.argsort(1)
            back, seen = order.argsort(1), order[:, :4]
            x = self.embed(patches) + self.position
            x = self.encoder(x.gather(1, seen[..., None].expand(-1, -1, 16)))
            x = torch.cat([x, self.token.expand(len(x), 12, -1)], 1)
            x = x.gather(1, back[..., None].expand(-1, -1, 16)) + self.position
            hidden = torch.ones_like(noise)
            hidden[:, :4] = 0
            return self.head(self.decoder(x)), hidden.gather(1, back)

    model = MAE()

    def objective(model, x, noise):
        patches = x.unfold(2, 3, 3).unfold(3, 3, 3).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 16, 27)
        out, hidden = model(patches, noise)
        mean, var = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        loss = ((out - (patches - mean) / (var + 1e-6) ** 0.5) ** 2).mean(-1)
        return (loss * hidden).sum() / hidden.sum()

    return Script(model, [Update(objective, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, betas=(0.9, 0.95)))],
                  lambda step, carried: (images(), torch.rand(4, 16)))


@program()
def sharpness_aware_minimization():
    """Two backwards: up by the gradient, then the update by the gradient there."""
    model = Net()

    def objective(model, x, labels):
        return F.cross_entropy(model(x), labels)

    def loop(objective, optimizer, model, x, labels):
        objective(model, x, labels).backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        up = [p.grad * (0.05 / (norm + 1e-12)) for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, up)
        optimizer.zero_grad()
        loss = objective(model, x, labels)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, up)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def in_a_step(model, x, labels):
        parameters = dict(model.named_parameters())
        up = torch.autograd.grad(objective(model, x, labels), list(parameters.values()))
        norm = torch.stack([g.norm() for g in up]).norm()
        there = {name: p + (g * (0.05 / (norm + 1e-12))).detach() for (name, p), g in zip(parameters.items(), up)}
        return F.cross_entropy(torch.func.functional_call(model, there, (x,)), labels)

    return Script(model, [Update(objective, sgd(model), loop=loop, in_a_step=in_a_step)],
                  lambda step, carried: (images(), torch.randint(CLASSES, (4,))))


@program()
def faces_by_angular_margin():
    """A margin is put at the label's cosine by index; the classes' vectors belong to the loss."""
    class Faces(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.centers = Net(8), nn.Parameter(torch.randn(CLASSES, 8))

        def forward(self, x, labels):
            cosine = F.linear(F.normalize(self.net(x)), F.normalize(self.centers)).clamp(-0.99, 0.99)
            rows = torch.arange(len(x))
            own, margin = cosine[rows, labels], torch.zeros_like(cosine)
            margin[rows, labels] = torch.cos(torch.acos(own.float()) + 0.2).to(cosine.dtype) - own
            return F.cross_entropy(8 * (cosine + margin), labels)

    model = Faces()
    return Script(model, [Update(lambda model, x, labels: model(x, labels), sgd(model))],
                  lambda step, carried: (images(), torch.randint(CLASSES, (4,))))
