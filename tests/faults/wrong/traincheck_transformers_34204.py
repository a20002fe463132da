"""The processor makes one text of a batch that has fifty.

TrainCheck's transformers-34204, huggingface/transformers#34204. PixtralProcessor was given a list
of texts and a list of images. It took the images for those of a single text. So it returned the
tokens of the first text only, beside the pixels of all images. The shapes still fit, since one row
is broadcast over the others.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 4
WORDS = 20


class Questions(Dataset):
    """Pictures with a question. The answer depends on both."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.pixels = torch.randn(400, 3, 4, 4, generator=generator)
        self.tokens = torch.randint(0, WORDS, (400, 6), generator=generator)
        is_bright = self.pixels.mean((1, 2, 3)) > 0
        is_even = self.tokens[:, 0] % 2 == 0
        self.answers = (is_bright == is_even).long()

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return self.tokens[index], self.pixels[index], self.answers[index]


class Processor:
    """Make a batch of texts and images. With the fault, all images belong to the first text."""

    def __init__(self, fault):
        self.fault = fault

    def __call__(self, samples):
        texts, images, answers = zip(*samples)
        images_of_texts = [images] if self.fault else [[image] for image in images]
        tokens = [text for text, _ in zip(texts, images_of_texts)]
        pixels = [image for group in images_of_texts for image in group]
        return torch.stack(tokens), torch.stack(pixels), torch.stack(answers)


class Net(nn.Module):
    """A small model of texts and images."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.text = nn.Linear(6 * 16, 32)
        self.picture = nn.Linear(48, 32)
        self.answer = nn.Sequential(nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, tokens, pixels):
        text = self.text(self.words(tokens).flatten(1))
        return self.answer(text + self.picture(pixels.flatten(1)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Questions(), 50, shuffle=True, collate_fn=Processor(args.fault))
    for epoch in range(EPOCHS):
        for tokens, pixels, answers in loader:
            loss = nn.functional.cross_entropy(model(tokens, pixels), answers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
