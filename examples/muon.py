"""Muon (Jordan et al. 2024) for the matrices of the blocks of gpt.py, AdamW for all else.

Paste it over create_optimizer of gpt.py, but not of hybrid. With two optimizers of your own, such
as those of a generator and a discriminator, take Several.
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
    is_hidden = {p: "blocks." in name and p.dim() == 2 for name, p in model.named_parameters()}
    hidden = [p for p in is_hidden if is_hidden[p]]
    others = [p for p in is_hidden if not is_hidden[p]]
    muon = torch.optim.Muon(hidden, args.learning_rate, adjust_lr_fn="match_rms_adamw")
    return Several(muon, torch.optim.AdamW(others, args.learning_rate, (0.9, 0.99), fused=True))
