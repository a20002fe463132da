"""Tell how much memory a training will take, before it starts.

    python tools/memory.py multigpu/gpt.py --d_model 1024 --n_heads 16 --num_layers 24
    python tools/memory.py --processes 8 --memory 80 multigpu/mine.py   # your own copy of a script

After the script come its flags. The script's own functions make the model, the optimizer and a
batch. One step is taken with tensors that have shapes and types, but no memory. So a model of
any size takes only seconds. The script is imported, and its code runs: name one that you trust.

A row is what one process holds at the worst moment of a step, in GB. --batch_size is global:

    weights, gradients, optimizer    FSDP divides them over the processes
    gathered      what FSDP has whole at a time: the weights of two blocks, the gradients of one,
                  and both of what is in no block, such as the embedding
    activations   the batch, what the forward pass keeps for the backward pass, and the temporary
                  tensors of a step. With checkpoints (--checkpoint_activations in
                  hybrid/gpt_fsdp.py), a block keeps only its input, and its forward pass runs twice

DDP keeps its gradients from step to step. Those of FSDP appear while the activations disappear, so
its total has the larger of the two. With --grad_accum_steps, FSDP keeps whole gradients. They are
not counted here.

Two things are not counted: the libraries, such as CUDA's 0.5 to 1 GB a process, and gaps between
tensors. Allow a tenth more for the gaps. A machine without a GPU counts what its CPU would hold.
With --precision bf16, a GPU has some activations in fp32. torch.compile needs less. For FSDP, the
model must have a list of blocks, model.blocks. From Python, call
count(script, flags, processes, checkpoints).
"""

import argparse
import importlib.util
import sys
import weakref
from functools import partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

COLUMNS = ("weights", "gradients", "optimizer", "gathered", "activations")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, until Python frees them."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.sizes = weakref.WeakKeyDictionary()  # of each storage in use. Tensors may share one

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {id(x.untyped_storage()) for x in tensors_in((args, kwargs))}
        made = function(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            if id(storage) not in known and storage not in self.sizes:
                size = storage.nbytes()
                self.sizes[storage] = size
                weakref.finalize(storage, self.free, size)
                self.now += size
                self.most = max(self.most, self.now)
        return made

    def free(self, size):
        self.now -= size


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load_script(path):
    """Returns a script as a module. Its code runs."""
    spec = importlib.util.spec_from_file_location("script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def parse_flags(script, flags):
    """Returns the flags of the script, as its own parser reads them."""
    own = sys.argv
    sys.argv = [script.__file__, *map(str, flags)]
    try:
        return script.parse_args()
    finally:
        sys.argv = own


def read_batch(script, args, processes):
    """Returns the training data, and a micro-batch of one process."""
    data, _ = script.read_data(args)
    size = args.batch_size // processes // getattr(args, "grad_accum_steps", 1)
    if size == 0:
        sys.exit(f"--batch_size {args.batch_size} is too small for {processes} processes")
    indices = [number % len(data) for number in range(size)]
    return data, next(iter(script.create_loader(data, [indices], args)))


def take_step(script, args, data, batch, checkpoints, is_sharded=False):
    """Takes a step with tensors without memory. Returns model, optimizer, bytes of activations.

    In 16 bits, autocast keeps a copy of each weight until the backward pass is over. FSDP does not:
    it gathers weights in 16 bits, which counts elsewhere. It also updates only its shards.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = TYPES.get(args.precision)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, torch.device(device):
        model = create_model(script, args, data, dtype if is_sharded else None)
        batch = tree_map(partial(without_memory, fake, device), batch)
        optimizer = script.create_optimizer(model, args)
        for weight in model.parameters():  # DDP keeps the gradients between steps
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        optimizer.step()  # the first step makes the state of the optimizer
        for block in getattr(model, "blocks", ()) if checkpoints else ():
            options = {"use_reentrant": False, "preserve_rng_state": False}
            block.forward = partial(checkpoint, block.forward, **options)
        has_autocast = dtype is not None and not is_sharded
        with LiveBytes() as live:
            with torch.autocast(device.type, dtype, enabled=has_autocast):
                loss, _ = script.batch_loss(model, batch, args)
            loss.backward()
            del loss
            if not is_sharded:
                optimizer.step()
    return model, optimizer, live.most


def without_memory(fake, device, value):
    """Returns a tensor of this shape and type without memory, and other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(fake.from_tensor(value), device=device)


def create_model(script, args, data, dtype):
    """Returns the script's model, in this type if there is one, as FSDP computes with it."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype or default)
    model = script.create_model(args, data).train()
    torch.set_default_dtype(default)
    if dtype is not None:
        model.register_forward_pre_hook(partial(cast_inputs, dtype))
    return model


def cast_inputs(dtype, model, inputs):
    """Casts the inputs of a model that are tensors, and no whole numbers, as FSDP does."""

    def cast(value):
        is_cast = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_cast else value

    return tree_map(cast, inputs)


def count(script, flags, processes=1, checkpoints=False):
    """Returns {column: bytes} for a process of DDP, and what divided() needs for one of FSDP.

    "blocks" and "others" are numbers of elements: in each block, and in no block.

    `script` is a module with the functions of a training script.
    """
    args = parse_flags(script, flags)
    args.num_workers = 0
    data, batch = read_batch(script, args, processes)
    model, optimizer, activations = take_step(script, args, data, batch, checkpoints)
    states = [value for state in optimizer.state.values() for value in tensors_in(state)]
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    kept = [*model.parameters(), *model.buffers()]
    blocks = getattr(model, "blocks", ())
    of_shards = 0
    if blocks:  # which FSDP needs
        *_, of_shards = take_step(script, args, data, batch, checkpoints, is_sharded=True)
    in_blocks = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    dtype = TYPES.get(args.precision, torch.float32)
    counted = {
        "weights": bytes_of(kept),
        "gradients": bytes_of(learned),
        "optimizer": bytes_of(states),
        "gathered": 0,
        "activations": activations + bytes_of(tensors_in(batch)),
    }
    counted["total"] = sum(counted.values())
    return counted | {
        "blocks": in_blocks,
        "others": sum(weight.numel() for weight in model.parameters()) - sum(in_blocks),
        "bytes of a gathered weight": dtype.itemsize,
        "activations of shards": of_shards + bytes_of(tensors_in(batch)),
    }


def divided(counted, processes):
    """Returns {column: bytes} for a process of FSDP, from what count() says of DDP.

    At a time, the weights of two blocks and the gradients of one are whole. So are weights and
    gradients of all that is in no block. They have the type of the computation.
    """
    found = {name: counted[name] / processes for name in COLUMNS}
    largest = max(counted["blocks"])
    gathered = 3 * largest + 2 * counted["others"]
    found["gathered"] = gathered * counted["bytes of a gathered weight"]
    found["activations"] = counted["activations of shards"]
    # The shards of the gradients appear one by one, while the activations disappear.
    found["total"] = sum(found.values()) - min(found["gradients"], found["activations"])
    return found


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--processes", type=int, default=4, help="GPUs that share a batch")
    add("--memory", type=float, default=0, help="GB of a GPU, to show which rows fit; 0: do not")
    add("script", help="a training script, such as multigpu/gpt.py; it is imported")
    add("flags", nargs=argparse.REMAINDER, help="flags of the script")
    options = parser.parse_args()
    if not Path(options.script).is_file():
        parser.error(f"there is no script {options.script}")
    script = load_script(options.script)

    # DDP. If the model has blocks, also DDP with checkpoints, and FSDP without and with them.
    rows = {}
    try:
        plain = count(script, options.flags, options.processes)
    except DynamicOutputShapeException as error:  # as of an LSTM: it packs texts
        sys.exit(f"{options.script} computes with values, and here are only shapes: {error}")
    rows["DDP"] = plain
    if plain["blocks"]:
        spared = count(script, options.flags, options.processes, checkpoints=True)
        rows["DDP, checkpoints"] = spared
        rows["FSDP"] = divided(plain, options.processes)
        rows["FSDP, checkpoints"] = divided(spared, options.processes)

    # The table, in GB.
    parameters = plain["others"] + sum(plain["blocks"])
    limit = f"; fits: 1.1 x total + 1 is at most {options.memory:g}" if options.memory else ""
    print(f"{parameters:,} parameters, {options.processes} processes, GB in each{limit}:")
    names = [*COLUMNS, "total"]
    print(f"{'':20}" + "".join(f"{name:>13}" for name in names))
    for title, row in rows.items():
        values = [row[name] / 1e9 for name in names]
        line = f"{title:20}" + "".join(f"{value:13.3f}" for value in values)
        if options.memory:  # a tenth more for gaps between tensors, and 1 GB for CUDA itself
            line += "  fits" if 1.1 * values[-1] + 1 <= options.memory else "  does not fit"
        print(line)
    if plain["blocks"]:
        print("FSDP's total has the larger of gradients and activations, not both.")


if __name__ == "__main__":
    main()
