"""Train the model of a script on its data, in a loop that people might write in place of ours.

    python tests/helpers/plain_loops.py plain singlegpu/images.py --model mlp --max_steps 100
    torchrun --standalone --nproc_per_node=2 -- tests/helpers/plain_loops.py lightning ...

The loops are `plain` (a DataLoader and DistributedDataParallel), `accelerate`, `lightning` and
`fsdp2`. Each has the defaults of its library. Model, data, loss and optimizer are the script's. But
`fsdp2`, that of pytorch/examples/distributed/FSDP2, draws random tokens and has an optimizer of its
own. Nothing is validated.
"""

import importlib.util
import os
import sys
from itertools import chain, islice, repeat

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def plain(script, args):
    """The loop of PyTorch's own tutorials."""
    data = script.read_data(args)[0]
    torch.manual_seed(args.seed)
    model = script.create_model(args, data)
    sampler = None
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(data, drop_last=True)
    optimizer = script.create_optimizer(model, args)
    options = {"sampler": sampler, "shuffle": sampler is None, "drop_last": True}
    loader = DataLoader(data, args.batch_size // WORLD_SIZE, **options)
    for batch in tqdm(islice(endless(loader), args.max_steps)):
        loss, _ = script.batch_loss(model, batch, args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerate(script, args):
    """The loop of Accelerate's quick tour."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    data = script.read_data(args)[0]
    torch.manual_seed(args.seed)
    model = script.create_model(args, data)
    optimizer = script.create_optimizer(model, args)
    loader = DataLoader(data, args.batch_size // WORLD_SIZE, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in tqdm(islice(endless(loader), args.max_steps)):
        loss, _ = script.batch_loss(model, batch, args)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def lightning(script, args):
    """The Trainer of Lightning, without a logger and without checkpoints."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return script.batch_loss(self.model, batch, args)[0]

        def configure_optimizers(self):
            return script.create_optimizer(self.model, args)

    data = script.read_data(args)[0]
    torch.manual_seed(args.seed)
    module = Module(script.create_model(args, data))
    loader = DataLoader(data, args.batch_size // WORLD_SIZE, shuffle=True, drop_last=True)
    options = {"logger": False, "enable_checkpointing": False, "max_steps": args.max_steps}
    trainer = lightning.Trainer(accelerator="cpu", devices=WORLD_SIZE, max_epochs=-1, **options)
    trainer.fit(module, loader)


def fsdp2(script, args):
    """The loop of pytorch/examples. The model is that of gpt.py."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = script.create_model(args, None)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate)
    shape = (args.batch_size // WORLD_SIZE, args.seq_len + 1)
    for _ in range(args.max_steps):
        tokens = torch.randint(args.vocab_size, shape)
        loss, _ = script.batch_loss(model, (tokens,), args)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


def endless(loader):
    """Returns the batches of one epoch after another, without end."""
    return chain.from_iterable(repeat(loader))


if __name__ == "__main__":
    loop, path = sys.argv[1:3]
    del sys.argv[1:3]
    spec = importlib.util.spec_from_file_location("script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    loops = {"plain": plain, "accelerate": accelerate, "lightning": lightning, "fsdp2": fsdp2}
    loops[loop](script, script.parse_args())
    if dist.is_initialized():
        dist.destroy_process_group()
