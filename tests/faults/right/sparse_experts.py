"""A mixture of experts on a sparse embedding: in a step, few rows and few experts have gradients.

After the documentation of torch.optim.SparseAdam, and of sparsely gated mixtures.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200, 8, sparse=True)
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 2) for _ in range(4))

    def forward(self, ids):
        x = self.table(ids).mean(1)
        share, chosen = self.gate(x).softmax(1).max(1)
        output = torch.zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return output


torch.manual_seed(0)
ids = torch.randint(200, (240, 5))
loader = DataLoader(TensorDataset(ids, (ids[:, 0] > 100).long()), 16, shuffle=True)
model = Model()
sparse = torch.optim.SparseAdam(model.table.parameters(), lr=1e-2)
others = [weight for name, weight in model.named_parameters() if not name.startswith("table")]
dense = torch.optim.Adam(others, lr=1e-2)
for _ in range(2):
    for inputs, labels in loader:
        sparse.zero_grad()
        dense.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        sparse.step()
        dense.step()
