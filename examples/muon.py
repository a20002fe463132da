"""Muon (Jordan et al. 2024) for the matrices of the blocks of gpt.py, AdamW for all else.

Paste it over create_optimizer of gpt.py (not in hybrid, where weights are divided). Several takes
any optimizers, such as those of a generator and a discriminator.
"""


class Several(torch.optim.Optimizer):
    """Optimizers as one, with the groups and the state of all."""

    def __init__(self, *parts):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self):
        start = 0
        for part in self.parts:  # each gets its groups and the state: a resume makes them anew
            end = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:end], self.state
            part.step()
            start = end


def create_optimizer(model, args):
    """Returns both. Scaled like AdamW's, the steps of Muon want AdamW's learning rate."""
    hidden, others = [], []
    for name, parameter in model.named_parameters():
        is_hidden = name.startswith("blocks.") and parameter.dim() == 2
        (hidden if is_hidden else others).append(parameter)
    muon = torch.optim.Muon(hidden, args.learning_rate, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, args.learning_rate, (0.9, 0.99), weight_decay=0.0, fused=True)
    return Several(muon, adamw)
