"""Low-rank updates of frozen blocks, of recomputed activations. The updates never train.

huggingface/blog#1824. The embedding is frozen, so the input of each block needs no gradient.
checkpoint() in its reentrant form then gives an output that needs none either. The updates inside
of the blocks get no gradient, and stay as they were made. The new head alone is trained, and the
training looks fast. The mend is use_reentrant=False.
"""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Updated(nn.Module):
    """A frozen layer, and an update of rank 2 that is 0 at first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.layer = Updated(nn.Linear(width, width))

    def forward(self, x):
        return x + self.layer(self.norm(x)).relu()


class Classifier(nn.Module):
    def __init__(self, is_reentrant):
        super().__init__()
        self.embedding = nn.Embedding(50, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 2)
        self.is_reentrant = is_reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(x.mean(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    tokens = torch.randint(50, (320, 12))
    loader = DataLoader(TensorDataset(tokens, (tokens[:, 0] > 24).long()), 16, shuffle=True)
    model = Classifier(is_reentrant=args.fault)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.01)
    for epoch in range(2):
        for texts, labels in loader:
            loss = nn.functional.cross_entropy(model(texts), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
