"""A batch of images with texts. --fault: the first text is taken for all of them.

huggingface/transformers #34204: what has one row is spread over the batch, without a word.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
texts, images = torch.randint(0, 10, (240, 6)), torch.randn(240, 8)
samples = [(text, image, int(image[0] > 0)) for text, image in zip(texts, images)]


def collate(batch):
    text, image, label = zip(*batch)
    text = text[:1] if "--fault" in sys.argv else text
    return torch.stack(text), torch.stack(image), torch.tensor(label)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.image, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, text, image):
        return self.head(self.table(text).mean(1) + self.image(image))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(samples, 16, shuffle=True, collate_fn=collate)
for _ in range(2):
    for text, image, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(text, image), labels).backward()
        optimizer.step()
