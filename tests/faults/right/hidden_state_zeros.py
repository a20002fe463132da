"""PyTorch's classic tutorial "Translation with a Sequence to Sequence Network and Attention".

The first hidden state is zeros, and the first token of the decoder is number 0.
"""

import random

import torch
from torch import nn

START, END, WORDS = 0, 1, 20
random.seed(0)
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.table = nn.Embedding(WORDS, size)
        self.dropout = nn.Dropout(0.1)
        self.gru = nn.GRU(size, size)

    def forward(self, token, hidden):
        return self.gru(self.dropout(self.table(token).view(1, 1, -1)), hidden)


class Decoder(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.table = nn.Embedding(WORDS, size)
        self.gru = nn.GRU(size, size)
        self.out = nn.Linear(size, WORDS)

    def forward(self, token, hidden):
        x, hidden = self.gru(torch.relu(self.table(token)).view(1, 1, -1), hidden)
        return torch.log_softmax(self.out(x[0]), 1), hidden


texts = [[random.randrange(2, WORDS) for _ in range(5)] + [END] for _ in range(50)]
encoder, decoder = Encoder(16), Decoder(16)
encoder_optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
decoder_optimizer = torch.optim.SGD(decoder.parameters(), lr=0.01)
criterion = nn.NLLLoss()


def loss_of(text, is_forced):
    hidden, loss = torch.zeros(1, 1, 16), 0
    for token in text:
        _, hidden = encoder(token, hidden)
    token = torch.tensor([[START]])
    for target in text:
        output, hidden = decoder(token, hidden)
        loss = loss + criterion(output, target)
        token = target if is_forced else output.argmax(1)
        if token.item() == END:
            break
    return loss


for step in range(40):
    encoder.train()
    decoder.train()
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    loss = loss_of(torch.tensor(random.choice(texts)).view(-1, 1), random.random() < 0.5)
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    if step % 5 == 4:
        encoder.eval()
        decoder.eval()
        with torch.no_grad():
            loss_of(torch.tensor(texts[0]).view(-1, 1), is_forced=False)
