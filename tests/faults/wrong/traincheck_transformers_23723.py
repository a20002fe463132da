"""After a long prompt, more tokens are generated than max_new_tokens allows.

TrainCheck's transformers-23723, huggingface/transformers#23723. Whisper's generate() added the
length of the prompt to max_new_tokens, and cut the prompt to half of the context afterwards. So
after a prompt that had been cut, generation went on for as many tokens more as were cut.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
CONTEXT = 24
MAX_NEW_TOKENS = 5


class Model(nn.Module):
    """A recurrent model of texts."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.memory = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, tokens):
        hidden, _ = self.memory(self.words(tokens))
        return self.head(hidden)

    @torch.no_grad()
    def generate(self, prompt, max_new_tokens, fault):
        """Return the new tokens that follow the last half context of a prompt."""
        tokens = prompt[:, -CONTEXT // 2 :]
        length = tokens.shape[1] + max_new_tokens
        if fault:
            length = prompt.shape[1] + max_new_tokens
        start = tokens.shape[1]
        while tokens.shape[1] < length:
            following = self(tokens)[:, -1].argmax(1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens[:, start:]


def texts(number, seed):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 20, (number, 1), generator=generator)
    return (starts + 3 * torch.arange(CONTEXT + 1)) % 20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Model()
    data = texts(256, seed=1)
    data = TensorDataset(data[:, :-1], data[:, 1:])
    prompts = texts(8, seed=2)[:, :20]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        model.train()
        for tokens, targets in DataLoader(data, 32, shuffle=True):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        new = model.generate(prompts, MAX_NEW_TOKENS, args.fault)
        print(f"epoch {epoch} loss {loss.item():.4f} new tokens {new.shape[1]}")


if __name__ == "__main__":
    main()
