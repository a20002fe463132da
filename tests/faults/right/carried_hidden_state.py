"""Truncated backpropagation through time, after pytorch/examples/word_language_model.

The hidden state is carried from batch to batch, and detached. Batches come in their order.
"""

import torch
from torch import nn

torch.manual_seed(0)
text = (torch.arange(8 * 6 * 30) * 7 % 12 + torch.randint(2, (8 * 6 * 30,))) % 12
columns = text.view(8, -1).T  # (T, B)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.table = nn.Dropout(0.2), nn.Embedding(12, 16)
        self.rnn, self.head = nn.LSTM(16, 16, 2, dropout=0.2), nn.Linear(16, 12)

    def forward(self, ids, hidden):
        output, hidden = self.rnn(self.drop(self.table(ids)), hidden)
        return self.head(self.drop(output)), hidden


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
train, val = columns[:150], columns[150:]
for _ in range(2):
    model.train()
    hidden = (torch.zeros(2, 8, 16), torch.zeros(2, 8, 16))
    for start in range(0, len(train) - 6, 6):
        hidden = tuple(state.detach() for state in hidden)
        logits, hidden = model(train[start : start + 6], hidden)
        optimizer.zero_grad()
        targets = train[start + 1 : start + 7]
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if start % 30 == 24:
            model.eval()
            with torch.no_grad():
                model(val, (torch.zeros(2, 8, 16), torch.zeros(2, 8, 16)))
            model.train()
