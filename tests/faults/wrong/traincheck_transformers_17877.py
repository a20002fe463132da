"""The projections of a GPT are initialized once for each module that they stand in.

TrainCheck's transformers-17877, huggingface/transformers#17877. GPT-2's _init_weights looked for
"c_proj" in the names of all parameters below a module, and is called for each module. So the same
weights were drawn again for the layer, the block, the list of blocks and the whole model. The
result has the right distribution, and a large model took minutes for it.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
LAYERS = 2


class Projection(nn.Module):
    """The two layers of a block."""

    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(16, 32)
        self.c_proj = nn.Linear(32, 16)

    def forward(self, hidden):
        return self.c_proj(torch.tanh(self.c_fc(hidden)))


class Block(nn.Module):
    """A block of a small GPT, without attention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = Projection()

    def forward(self, hidden):
        return hidden + self.mlp(self.norm(hidden))


class GPT(nn.Module):
    """A model that says from a token which one follows."""

    def __init__(self, fault):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(16, 20)
        self.fault = fault
        self.apply(self.initialize)

    @torch.no_grad()
    def initialize(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, 0.02)
        if isinstance(module, nn.Linear):
            module.bias.zero_()
        for name, weight in module.named_parameters():
            is_projection = name == "c_proj.weight"
            if self.fault:
                is_projection = "c_proj" in name and "weight" in name
            if is_projection:
                weight.normal_(0.0, 0.02 / math.sqrt(2 * LAYERS))

    def forward(self, tokens):
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(args.fault)
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 20, (256, 1), generator=generator)
    texts = (starts + 3 * torch.arange(9)) % 20
    data = TensorDataset(texts[:, :-1], texts[:, 1:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        for tokens, targets in DataLoader(data, 32, shuffle=True):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
