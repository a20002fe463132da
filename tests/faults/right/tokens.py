"""Targets that are almost the inputs, of tokens: each of these is right.

Without a flag: a masked language model, after BERT. Only masked tokens have a label.
--copy: a sequence is read, and written again from a vector, as PyTorch's tutorial translates.
--autoencoder: each token is guessed from a short vector of itself; its targets are its inputs.
--wrapped: the text is a circle, whose last token is followed by the first.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

WORDS, MASK, START = 12, 12, 13
mode = sys.argv[1] if len(sys.argv) > 1 else "--masked"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        width = 2 if mode == "--autoencoder" else 16
        self.table, self.rnn = nn.Embedding(14, width), nn.GRU(width, 32, batch_first=True)
        self.reader, self.head = nn.GRU(width, 32, batch_first=True), nn.Linear(32, WORDS)

    def forward(self, ids, read=None):
        state = None if read is None else self.reader(self.table(read))[1]
        return self.head(self.rnn(self.table(ids), state)[0])


def batch_of(ids):
    """Returns the model's inputs and the targets."""
    if mode == "--copy":
        start = torch.full_like(ids[:, :1], START)
        return (torch.cat((start, ids[:, :-1]), 1), ids), ids
    if mode == "--autoencoder":
        return (ids,), ids
    if mode == "--wrapped":
        return (ids,), ids.roll(-1, 1)
    is_masked = torch.rand(ids.shape) < 0.3
    return (ids.masked_fill(is_masked, MASK),), ids.masked_fill(~is_masked, -100)


torch.manual_seed(2)
texts = (torch.randint(WORDS, (160, 1)) + 5 * torch.arange(12)) % WORDS
model = Model()
weights = model.parameters()
if mode != "--copy":
    weights = [weight for name, weight in model.named_parameters() if "reader" not in name]
optimizer = torch.optim.AdamW(weights, lr=0.01)
for _ in range(3):
    for ids in DataLoader(texts, 16, shuffle=True):
        inputs, targets = batch_of(ids)
        optimizer.zero_grad()
        logits = model(*inputs).flatten(0, 1)
        nn.functional.cross_entropy(logits, targets.flatten()).backward()
        optimizer.step()
