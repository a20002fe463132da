"""A temperature, a critic and an actor, each with its optimizer, as in soft actor-critic.

--fault: the critic's gradients are never zeroed, and the actor's optimizer has a copy's weights.
"""

import copy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
log_alpha = torch.zeros(1, requires_grad=True)
critic, actor = nn.Linear(8, 1), nn.Linear(8, 2)
trained = copy.deepcopy(actor) if "--fault" in sys.argv else actor
alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
actor_optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
loader = DataLoader(torch.randn(96, 8), 16, shuffle=True)
for x in (x for _ in range(6) for x in loader):
    loss = -(log_alpha * (actor(x).mean().detach() + 1))
    alpha_optimizer.zero_grad()
    loss.backward()
    alpha_optimizer.step()
    loss = nn.functional.mse_loss(critic(x), x.sum(1, keepdim=True))
    if "--fault" not in sys.argv:
        critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()
    loss = -(actor(x).sum(1, keepdim=True) * critic(x).detach()).mean()
    actor_optimizer.zero_grad()
    loss.backward()
    actor_optimizer.step()
