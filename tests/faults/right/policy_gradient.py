"""REINFORCE, after pytorch/examples/reinforcement_learning: a batch is what the policy has played.

In an episode without any reward, the advantage is 0, and so are all gradients.
"""

import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for episode in range(40):
    state, chances, rewards = torch.randn(1, 4), [], []
    for _ in range(6):
        choice = torch.distributions.Categorical(logits=policy(state))
        action = choice.sample()
        chances.append(choice.log_prob(action))
        rewards.append(float(action == (state[0, 0] > 0)) if episode % 7 else 0.0)
        state = 0.5 * state + torch.randn(1, 4)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    loss = -(torch.cat(chances) * (returns - returns.mean())).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
