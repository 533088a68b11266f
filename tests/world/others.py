"""Programs that fit in no drawer: reinforcement, graphs, equations, meta-learning, pictures."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.world.script import Script, Update, program


def mlp(inputs, out, width=16, activation=nn.Tanh):
    return nn.Sequential(nn.Linear(inputs, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, out))


@program()
def proximal_policy_optimization():
    """A rollout by the policy as it is, advantages, then a clipped update of policy and value."""
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = mlp(4, 3), mlp(4, 1)

        def forward(self, seen, action=None):
            choice = torch.distributions.Categorical(logits=self.actor(seen).float())
            action = choice.sample() if action is None else action
            return action, choice.log_prob(action), choice.entropy(), self.critic(seen).float().squeeze(-1)

    model = Agent()

    def batch(step, carried):
        seen, rewards = torch.randn(16, 4), torch.randn(16)
        with torch.no_grad():
            action, log_prob, _, value = model(seen)
        advantages, last = torch.zeros(16), 0.0
        for t in reversed(range(16)):
            after = value[t + 1] if t < 15 else 0.0
            advantages[t] = last = rewards[t] + 0.99 * after - value[t] + 0.95 * 0.99 * last
        return seen, action, log_prob, advantages, advantages + value, value

    def objective(model, seen, action, old_log_prob, advantages, returns, old_value):
        _, log_prob, entropy, value = model(seen, action)
        ratio = (log_prob - old_log_prob).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        clipped = old_value + (value - old_value).clamp(-0.2, 0.2)
        critic = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
        return policy - 0.01 * entropy.mean() + 0.5 * critic

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3), clip=0.5)], batch)


@program()
def q_learning():
    """Temporal differences against a network that is copied now and then."""
    model = mlp(4, 3, activation=nn.ReLU)
    target = copy.deepcopy(model).requires_grad_(False)

    def objective(model, seen, action, reward, then, done):
        value = model(seen).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = target(then).max(1).values
        return F.smooth_l1_loss(value.float(), reward + 0.99 * best * ~done)

    def follow(_, step):
        if step % 2:
            target.load_state_dict(model.state_dict())

    def batch(step, carried):
        return torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8), torch.randn(8, 4), torch.rand(8) < 0.2

    return Script(model, [Update(objective, torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-2))], batch, after=follow)


@program()
def graph_network():
    """Messages along edges are added at their targets, by two spellings; graphs have unequal numbers of nodes."""
    class GNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update, self.gate = nn.Linear(8, 16), nn.Linear(24, 8), nn.Linear(16, 1)
            self.head = nn.Linear(8, 3)

        def forward(self, x, edges, graph, num_graphs):
            source, target = edges
            messages = F.relu(self.message(x[source]))
            weight = torch.exp(self.gate(messages))
            total = torch.zeros(len(x), 1, dtype=weight.dtype).index_add_(0, target, weight)
            summed = torch.zeros(len(x), 16, dtype=messages.dtype).scatter_add_(
                0, target[:, None].expand(-1, 16), (messages * weight / (total[target] + 1e-6)).to(messages.dtype))
            x = F.relu(self.update(torch.cat([x, summed], 1)))
            pooled = torch.zeros(num_graphs, 8, dtype=x.dtype).scatter_reduce(
                0, graph[:, None].expand(-1, 8), x, "mean", include_self=False)
            return self.head(pooled)

    model = GNN()

    def batch(step, carried):
        nodes = torch.tensor([5, 4 + step % 2, 6])
        graph = torch.repeat_interleave(torch.arange(3), nodes)
        edges = torch.randint(len(graph), (2, 20))
        return torch.randn(len(graph), 8), edges, graph, 3, torch.randint(3, (3,))

    return Script(model, [Update(lambda model, *inputs: F.cross_entropy(model(*inputs[:-1]), inputs[-1]),
                                 torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))], batch)


@program()
def differential_equation():
    """A classical Runge-Kutta solver with a fixed step, through which gradients go."""
    class ODE(nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = mlp(2, 2)

        def forward(self, y, times):
            states = [y]
            for i in range(2):
                h = times[i + 1] - times[i]
                one = self.slope(y ** 3)
                two = self.slope((y + h / 2 * one) ** 3)
                three = self.slope((y + h / 2 * two) ** 3)
                four = self.slope((y + h * three) ** 3)
                y = y + h / 6 * (one + 2 * two + 2 * three + four)
                states.append(y)
            return torch.stack(states)

    model = ODE()
    return Script(model, [Update(lambda model, y, times, wanted: (model(y, times) - wanted).abs().mean(),
                                 torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-2))],
                  lambda step, carried: (torch.randn(6, 2), torch.linspace(0, 1, 3), torch.randn(3, 6, 2)))


@program()
def radiance_field():
    """Positions as sines, densities, and a picture by products along rays."""
    model = mlp(3 * 6, 4, activation=nn.ReLU)

    def objective(model, origin, direction, colour):
        depth = torch.linspace(0.5, 2.0, 8)
        points = origin[:, None] + direction[:, None] * depth[:, None]
        phase = points[..., None] * 2.0 ** torch.arange(3)
        out = model(torch.cat([phase.sin(), phase.cos()], -1).flatten(-2)).float()
        opaque = 1 - torch.exp(-F.softplus(out[..., 3]) * 0.2)
        through = torch.cumprod(torch.cat([torch.ones(len(out), 1), 1 - opaque + 1e-10], 1), 1)[:, :-1]
        return F.mse_loss(((opaque * through)[..., None] * out[..., :3].sigmoid()).sum(1), colour)

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))],
                  lambda step, carried: (torch.randn(6, 3), torch.randn(6, 3), torch.rand(6, 3)))


@program(transform="and its graphs have one backward")
def meta_learning():
    """A step of descent on each task, through which the start is trained."""
    class Learner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(1, 1)

        def forward(self, x):
            return self.net(x)

    model = Learner()

    def objective(model, x, y, query, wanted):
        losses, start = [], dict(model.named_parameters())
        for task in range(len(x)):
            inner = F.mse_loss(torch.func.functional_call(model, start, (x[task],)), y[task])
            slopes = torch.autograd.grad(inner, list(start.values()), create_graph=True)
            adapted = {name: p - 0.1 * slope for (name, p), slope in zip(start.items(), slopes)}
            losses.append(F.mse_loss(torch.func.functional_call(model, adapted, (query[task],)), wanted[task]))
        return torch.stack(losses).mean()

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))],
                  lambda step, carried: tuple(torch.randn(2, 6, 1) for _ in range(4)))


@program(train_step="calls a closure .* several times")
def style_transfer():
    """A picture is trained through a frozen network, by Gram matrices."""
    class Picture(nn.Module):
        def __init__(self):
            super().__init__()
            self.pixels = nn.Parameter(torch.randn(1, 3, 8, 8))
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
            self.net.requires_grad_(False)

        def forward(self):
            return self.net(self.pixels)

    model = Picture()

    def gram(x):
        x = x.flatten(2)
        return x @ x.transpose(1, 2) / x[0].numel()

    def objective(model, content, style):
        features = model()
        return F.mse_loss(features, content) + 10 * F.mse_loss(gram(features), style)

    optimizer = torch.optim.LBFGS([model.pixels], lr=0.5, max_iter=4)

    def loop(objective, optimizer, model, *batch):
        def closure():
            optimizer.zero_grad()
            loss = objective(model, *batch)
            loss.backward()
            return loss

        return optimizer.step(closure)

    content, style = torch.randn(1, 8, 8, 8), torch.eye(8)[None]
    return Script(model, [Update(objective, optimizer, loop=loop)], lambda step, carried: (content, style))
