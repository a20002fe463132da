"""The attention drops at random in validation, too.

TrainCheck's transformers-33844, huggingface/transformers#33844. The FlashAttention2 classes of
M2M100 and of the models that copied it passed their rate of dropout to the kernel at each call.
They did not look at self.training. So the outputs of eval() were random.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class Attention(nn.Module):
    """Attention with dropout of its weights."""

    def __init__(self, fault):
        super().__init__()
        self.inputs = nn.Linear(16, 48)
        self.outputs = nn.Linear(16, 16)
        self.fault = fault

    def forward(self, hidden):
        query, key, value = self.inputs(hidden).chunk(3, dim=-1)
        rate = 0.1 if self.training or self.fault else 0.0
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        return hidden + self.outputs(mixed)


class Net(nn.Module):
    """A transformer of one layer, which names the kind of a text."""

    def __init__(self, fault):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.attention = Attention(fault)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 2)

    def forward(self, tokens):
        hidden = self.attention(self.words(tokens))
        return self.last(self.norm(hidden).mean(1))


def samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (number, 8), generator=generator)
    return TensorDataset(tokens, (tokens.float().mean(1) > 9.5).long())


def validate(model, loader):
    model.eval()
    loss = 0.0
    with torch.no_grad():
        for tokens, labels in loader:
            loss += nn.functional.cross_entropy(model(tokens), labels, reduction="sum").item()
    return loss / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Net(args.fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(256, seed=1), 32, shuffle=True)
    valid_loader = DataLoader(samples(64, seed=2), 32)
    for epoch in range(EPOCHS):
        model.train()
        for tokens, labels in loader:
            loss = nn.functional.cross_entropy(model(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} valid {validate(model, valid_loader):.4f}")


if __name__ == "__main__":
    main()
