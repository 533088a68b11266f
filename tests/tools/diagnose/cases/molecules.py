"""Fit energies of molecules; atoms of all molecules of a batch are in one tensor, with the number of the molecule beside it.

    python molecules.py
"""

import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS, MOLECULES, ATOMS, WIDTH = 30, 16, 12, 32


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, features, molecule):
        number = int(molecule[-1].item()) + 1  # expected: graph break
        pooled = features.new_zeros(number, WIDTH).index_add(0, molecule, F.silu(self.message(features)))
        return features + F.silu(self.update(torch.cat([features, pooled[molecule]], -1)))


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(10, WIDTH), nn.Linear(3, WIDTH)
        self.interactions = nn.ModuleList(Interaction() for _ in range(2))
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, species, positions, molecule):
        features = self.embedding(species) + F.silu(self.position(positions))
        for interaction in self.interactions:
            features = interaction(features, molecule)
        energies = self.energy(features).squeeze(-1)
        return energies.new_zeros(MOLECULES).index_add(0, molecule, energies)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.compile(Potential())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    species, positions = torch.randint(10, (4, MOLECULES * ATOMS)), torch.randn(4, MOLECULES * ATOMS, 3)
    molecule, targets = torch.arange(MOLECULES).repeat_interleave(ATOMS), torch.randn(4, MOLECULES)
    start, losses = time.perf_counter(), []
    for step in range(STEPS):
        loss = F.mse_loss(model(species[step % 4], positions[step % 4], molecule), targets[step % 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 10 == 9:
            print(f"step {step + 1}: loss {torch.stack(losses).mean():.3f}, {time.perf_counter() - start:.1f} s")
            losses.clear()


if __name__ == "__main__":
    main()
