"""A student learns a teacher's probabilities, after PyTorch's tutorial on knowledge distillation.

The teacher is in eval(), without gradients, and in no optimizer. Losses are of softmax and log.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
teacher = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).eval()
student = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for _ in range(3):
    for inputs, labels in loader:
        with torch.no_grad():
            soft = F.softmax(teacher(inputs) / 2, dim=1)
        logits = student(inputs)
        loss = F.kl_div(F.log_softmax(logits / 2, dim=1), soft, reduction="batchmean")
        loss = loss + F.cross_entropy(logits, soft) + F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
