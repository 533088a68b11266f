"""Train a convolutional network from a DataLoader for two epochs, and evaluate it after each.

    python convolutions.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


def train_epoch(model, loader, criterion, optimizer, scheduler):
    model.train()
    total = torch.zeros(())
    for images, labels in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
    return total.item() / len(loader)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = sum((model(images).argmax(1) == labels).sum() for images, labels in loader)
    return correct.item() / len(loader.dataset)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    labels = torch.randint(4, (640,))
    images = torch.randn(640, 3, 24, 24) + labels.view(-1, 1, 1, 1) / 4
    train_loader = DataLoader(TensorDataset(images[:512], labels[:512]), batch_size=32, shuffle=True, drop_last=True)
    test_loader = DataLoader(TensorDataset(images[512:], labels[512:]), batch_size=64)
    network = nn.Sequential(block(3, 32), block(32, 32), nn.MaxPool2d(2), block(32, 64), nn.AdaptiveAvgPool2d(1),
                            nn.Flatten(), nn.Linear(64, 4))
    sgd = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, foreach=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 2 * len(train_loader))
    for epoch in range(2):
        mean = train_epoch(network, train_loader, nn.CrossEntropyLoss(), sgd, cosine)
        print(f"epoch {epoch}: loss {mean:.3f}, accuracy {evaluate(network, test_loader):.2f}")
