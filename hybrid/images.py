r"""Train an image classifier whose layers are split over the GPUs of a process, and with DDP.

    torchrun --standalone --nproc_per_node=2 -- hybrid/images.py --num_stages 2    # 4 GPUs, or CPUs
    sbatch --nodes=4 --gpus-per-node=4 slurm/hybrid_images.slurm --model vgg11

For a model that does not fit on one GPU: while one stage works, the GPUs of the others wait. The
script reads and writes the snapshots of multinode/images.py. A process first builds the whole model
in RAM, and moves each stage to its GPU.

For your own data and model, replace the first section, as in multinode/images.py. The model must
be an nn.Sequential, which is split between its layers, or a VGG or ResNet of torchvision.
`diff multinode/images.py hybrid/images.py` shows what the split adds.
"""

import argparse
import contextlib
import faulthandler
import itertools
import json
import math
import os
import random
import resource
import signal
import sys
import textwrap
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
)
from torchvision import datasets, models
from torchvision.transforms import v2
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================
# Shapes: N images of a split, B of a batch, C channels, H height, W width, K classes.


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default="cnn", help="or mlp, or a network of torchvision: resnet18, vgg11, ...")
    add("--pretrained", action="store_true", help="start from torchvision's weights for ImageNet")
    add("--dataset", default="synthetic", help="or mnist, cifar10, a folder with train/CLASS/*.jpg")
    add("--data_dir", default="data", help="folder of the data; mnist and cifar10 are downloaded")
    add("--image_size", type=int, default=224, help="photos are cropped to this height and width")
    add("--dropout", type=float, default=0.0, help="dropout probability in cnn and mlp")
    args = parse_run_args(parser, epochs=2, batch_size=64, num_workers=None)
    if args.pretrained and args.model in ("mlp", "cnn"):
        parser.error(f"--pretrained: there are no weights for {args.model}")
    if args.num_workers is None:  # decoding photos takes longer than a step
        has_photos = os.path.isdir(f"{folder_of(args)}/train")
        args.num_workers = min(4, len(os.sched_getaffinity(0))) if has_photos else 0
    return args


def folder_of(args):
    """Returns data_dir/dataset if that is a folder, else dataset as a path."""
    folder = os.path.join(args.data_dir, args.dataset)
    return folder if os.path.isdir(folder) else args.dataset


class Images(TensorDataset):
    """Images (N, C, H, W) uint8 and their labels (N,), 0 to K - 1."""

    def __init__(self, images, labels):
        super().__init__(images, labels.long())
        self.classes = range(int(self.tensors[1].max()) + 1)

    def __getitems__(self, indices):
        """Returns a whole batch: images (B, C, H, W) uint8 and labels (B,)."""
        images, labels = (tensor.numpy()[indices] for tensor in self.tensors)  # NumPy is faster
        return torch.from_numpy(images), torch.from_numpy(labels)


class Photos(datasets.ImageFolder):
    """Files FOLDER/CLASS/*.jpg: each an image (3, H, W) uint8 and the number of its class."""

    def __init__(self, folder, *transforms):
        transform = v2.Compose([*transforms, v2.PILToTensor()])
        super().__init__(folder, transform, loader=read_photo, is_valid_file=is_photo)

    def find_classes(self, folder):
        classes, _ = super().find_classes(folder)
        classes = [name for name in classes if not name.startswith(".")]  # not .ipynb_checkpoints
        return classes, {name: number for number, name in enumerate(classes)}


def is_photo(path):
    is_hidden = any(name.startswith(".") for name in path.split(os.sep)[-2:])
    endings = (*datasets.folder.IMG_EXTENSIONS, ".gif", ".jfif")
    return path.lower().endswith(endings) and not is_hidden


def read_photo(path):
    try:
        photo = Image.open(path)
        photo.getexif()  # reads the tags, and keeps them
        photo.info.pop("exif", None)  # else it is written anew, which fails if a tag is damaged
        photo = ImageOps.exif_transpose(photo)  # upright
        if photo.mode.startswith(("I", "F")):  # convert() would clip these
            raise ValueError("it has more than 8 bits a channel. make_images.py scales 16 bits")
        return photo.convert("RGB")
    except Exception as error:  # a damaged file can fail anywhere
        raise OSError(f"cannot read {path}: {error}") from error


def read_data(args):
    """Returns the data to train on and to validate on, two map-style datasets."""
    try:
        train_data, val_data = read_images(args, "train"), read_images(args, "test")
        shapes = train_data[0][0].shape, val_data[0][0].shape
    except Exception as error:  # a damaged file can fail anywhere
        sys.exit(f"cannot read {args.dataset} in {args.data_dir}: {str(error) or repr(error)}")
    if not 2 <= len(train_data.classes) <= len(train_data):
        counts = f"{len(train_data.classes)} classes of {len(train_data)} images"
        sys.exit(f"{args.dataset}: {counts}, not two classes or more with an image each")
    if val_data.classes != train_data.classes[: len(val_data.classes)]:  # val may lack the last
        differ = sorted({*train_data.classes} ^ {*val_data.classes})
        sys.exit(f"{args.dataset}: only one of its two splits has the classes {differ}")
    if shapes[0] != shapes[1]:
        sys.exit(f"{args.dataset}: images of its two splits differ in shape")
    return train_data, val_data


def read_images(args, split):
    """Returns the images of a split, "train" or "test". The test split serves for validation."""
    if args.dataset == "synthetic":
        return synthetic_images(60_000 if split == "train" else 10_000)
    if args.dataset == "mnist":
        source = datasets.MNIST(args.data_dir, split == "train", download=True)
        return Images(source.data[:, None], source.targets)
    if args.dataset == "cifar10":
        source = datasets.CIFAR10(args.data_dir, split == "train", download=True)
        images = source.data.transpose(0, 3, 1, 2)  # from (N, H, W, C)
        return Images(torch.tensor(images), torch.tensor(source.targets))
    folder = folder_of(args)
    if os.path.isdir(f"{folder}/train"):
        size = args.image_size
        if split == "train":
            return Photos(f"{folder}/train", v2.RandomResizedCrop(size), v2.RandomHorizontalFlip())
        return Photos(f"{folder}/val", v2.Resize(size * 8 // 7), v2.CenterCrop(size))  # 256, 224
    if not os.path.exists(f"{folder}/{split}_images.npy"):
        raise ValueError(f"{folder} holds neither train/CLASS/*.jpg nor {split}_images.npy")
    # Files of make_images.py are mapped: they may be larger than memory.
    images = torch.from_numpy(np.load(f"{folder}/{split}_images.npy", mmap_mode="c"))
    labels = torch.from_numpy(np.load(f"{folder}/{split}_labels.npy"))
    if images.dim() == 3:
        images = images[:, None]  # one channel
    if images.dtype != torch.uint8 or images.dim() != 4 or 0 in images.shape:
        shape = f"{images.dtype} {tuple(images.shape)}"
        raise ValueError(f"{split} images are {shape}, not uint8 (N, C, H, W) from 0 to 255")
    if images[:256].max() < 2:
        raise ValueError(f"{split} images are all 0 or 1, not 0 to 255")
    if images.shape[3] in (1, 3, 4) and images.shape[1] not in (1, 3, 4):
        raise ValueError(f"{split} images are (N, H, W, C). Use images.transpose(0, 3, 1, 2)")
    if labels.dim() != 1 or labels.is_floating_point() or labels.long().min() < 0:
        shape = f"{labels.dtype} {tuple(labels.shape)}"
        raise ValueError(f"{split} labels are {shape}, not whole numbers (N,) from 0")
    if len(labels) != len(images):
        raise ValueError(f"{split} has {len(images)} images and {len(labels)} labels")
    return Images(images, labels)


def synthetic_images(num_images):
    """Returns ten smooth random patterns, one for each class, under noise, and their labels."""
    patterns = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, size=28, mode="bilinear")  # (K, C, H, W)
    generator = torch.Generator().manual_seed(num_images)  # other noise for each split
    labels = torch.randint(10, (num_images,), generator=generator)
    noise = torch.randint(176, (num_images, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return Images((80 * patterns[labels]).byte() + noise, labels)  # at most 80 + 175 = 255


def training_order(data, args, epoch):
    """Returns the indices (N,) of all images, in the order in which an epoch trains on them.

    Shuffles blocks of 2 MiB, so that a file larger than memory is read in long pieces, and then the
    images of each 128 blocks (256 MiB). Smaller data is one such pool.
    """
    if isinstance(data, Photos):
        return np.random.permutation(len(data))
    block_size = max(1, 2**21 // data[0][0].nbytes)
    block_starts = np.random.permutation(np.arange(0, len(data), block_size))
    order = (block_starts[:, None] + np.arange(block_size)).flatten()  # (blocks x block_size,)
    order = order[order < len(data)]  # the last block may be short
    pool_size = 128 * block_size
    for start in range(0, len(data), pool_size):
        np.random.shuffle(order[start : start + pool_size])  # in place
    return order


def create_model(args, data):
    """Returns a network that maps images (B, C, H, W), 0 to 1, to logits (B, K)."""
    channels, height, width = data[0][0].shape
    num_classes = len(data.classes)
    if args.model == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * height * width, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Dropout(args.dropout),
            nn.Linear(512, num_classes),
        )
    if args.model == "cnn":  # the network of pytorch/examples/mnist, with one dropout
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),  # a convolution takes 2
            nn.ReLU(),
            nn.Dropout(args.dropout),
            nn.Linear(128, num_classes),
        )
    try:
        network = models.get_model(args.model)
        if args.pretrained:
            weights = models.get_model_weights(args.model).DEFAULT
            network.load_state_dict(weights.get_state_dict(check_hash=True, weights_only=True))
    except (OSError, ValueError) as error:
        sys.exit(f"--model {args.model}: {error}")
    linear = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not linear or hasattr(network, "aux_logits"):
        sys.exit(f"--model {args.model}: its last layer is not linear, or it has several outputs")
    num_features = network.get_submodule(linear[-1]).in_features
    network.set_submodule(linear[-1], nn.Linear(num_features, num_classes))
    if channels == 3 and min(height, width) >= 32:
        return nn.Sequential(v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), network)
    enlarge = nn.Upsample((max(32, height), max(32, width)))  # most networks want 32 x 32 or more
    return nn.Sequential(nn.Conv2d(channels, 3, 1), enlarge, network)


def create_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)


def batch_loss(model, batch, args):
    """Returns the mean loss of a batch, and sums over its images. A row shows sums / count."""
    images, labels = batch
    logits = model(images.float() / 255)  # (B, K)
    loss = nn.functional.cross_entropy(logits, labels)
    correct = (logits.argmax(1) == labels).sum()
    return loss, {"loss": loss * len(labels), "acc": correct, "count": len(labels)}


# ==================================== How the model is split. =====================================
#
#     the cnn  stage 0            stage 1
#              layers 0 to 5  ->  layers 6 to 9     forward: activations, a copy from GPU to GPU
#              layers 0 to 5  <-  layers 6 to 9     backward: their gradients
#     rank 0   GPU 0              GPU 1
#     rank 1   GPU 2              GPU 3
#
# Each stage is wrapped in DDP: it averages gradients over the GPUs of a column.


def num_weights(module):
    return sum(weight.numel() for weight in module.parameters())


def split_model(model, devices):
    """Yields stages of an nn.Sequential on their devices. The largest is as small as possible."""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        sys.exit("create_model must return an nn.Sequential, which can be split between its layers")
    layers = list(model)
    if type(layers[-1]) is models.VGG:
        vgg = layers.pop()
        layers += [*vgg.features, vgg.avgpool, nn.Flatten(), *vgg.classifier]  # as its forward()
    if type(layers[-1]) is models.ResNet:
        *resnet, head = layers.pop().children()
        layers += [*resnet, nn.Flatten(), head]  # likewise
    sizes = [num_weights(layer) for layer in layers]
    with_weights = [number for number, size in enumerate(sizes) if size > 0]
    if len(devices) > len(with_weights):
        sys.exit(f"--num_stages must be at most {len(with_weights)}, the layers that have weights")

    @cache
    def best_split(start, num_stages):
        """Returns sizes, largest first, and ends of the best stages from layer `start` on."""
        if num_stages == 1:
            return [sum(sizes[start:])], [len(layers)]
        splits = []
        for end in with_weights:  # a stage begins with weights: DDP needs some
            if end > start:
                rest_sizes, rest_ends = best_split(end, num_stages - 1)
                stage_sizes = sorted([sum(sizes[start:end]), *rest_sizes], reverse=True)
                splits.append((stage_sizes, [end, *rest_ends]))
        return min(splits, default=([math.inf], []))

    start = 0
    seen = set()
    _, ends = best_split(with_weights[0], len(devices))
    for device, end in zip(devices, ends):
        stage = nn.Sequential(*layers[start:end])
        if not seen.isdisjoint(stage.parameters()):
            sys.exit("--num_stages: a layer that the model uses twice would be in two stages")
        seen |= {*stage.parameters()}
        yield stage.to(device)
        start = end


class Chain(nn.Sequential):
    """Runs the stages one after the other, each on its device."""

    def forward(self, images):
        activations = images
        for stage in self:
            stage_device = next(stage.parameters()).device
            activations = stage(activations.to(stage_device))
        return activations.to(images.device)  # where the labels are


def ddp_stages(run, args):
    """Returns the chain of the stages, each of which DDP keeps the same in all processes."""
    chain = Chain()
    for stage, device in zip(run.compiled_model, run.devices):
        if not any(weight.requires_grad for weight in stage.parameters()):
            chain.append(stage)  # it is frozen: DDP takes none without gradients
            continue
        group = run.groups[device]
        ddp_stage = DistributedDataParallel(
            stage, process_group=group, gradient_as_bucket_view=True
        )
        ddp_stage.broadcast_buffers = False  # from now on evaluate() sends BatchNorm's statistics
        comm_hook = getattr(default_hooks, COMM_HOOKS[args.comm_hook])
        comm_hook = timed(comm_hook, run.watch, device)
        ddp_stage.register_comm_hook(group, comm_hook)
        chain.append(ddp_stage)
    return chain


# ========================= The run: steps, rows, snapshots, processes. Keep. ======================
# torchrun or Slurm starts each process. main() has the loop over all steps.
# A look: about once a second, after the same step, all processes add up what they have counted, and
# ask each other whether to stop. A row: what was measured since the row before, and a validation.
# A request: what the loader makes a batch of: random seeds, and the indices of samples.

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMM_HOOKS = {"none": "allreduce_hook", "bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
STOP_REQUESTS = []  # the signals that this process has received
STATES = ("model", "optimizer", "scaler")  # the parts of a run that a snapshot saves
MAY_CHANGE = (  # the flags of all scripts that a resumed run may change. Others shape weights.
    "epochs max_steps eval_every grad_accum_steps comm_hook compile num_workers timeout "
    "data_dir snapshot log sample reconstructions num_stages"
).split()


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    num_gpus = torch.accelerator.device_count()
    # AMD's TF32 is as inexact as bf16, so it is not the default there.
    has_tf32 = num_gpus > 0 and torch.version.cuda is not None
    add = parser.add_argument_group("the run").add_argument
    add("--epochs", type=int, help="passes over the data; a change can shift the schedule")
    add("--max_steps", type=int, default=0, help="optimizer steps in all; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="learning rate, highest of a schedule")
    add("--max_grad_norm", type=float, default=0.0, help="clip longer gradients; 0: do not clip")
    add("--precision", choices=DTYPES, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="loading processes, for each training process")
    add("--num_stages", type=int, choices=range(1, 9), default=2, help="GPUs that share a model")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save at each row and when stopped; resume if it exists")
    add("--log", metavar="FILE.jsonl", help="append a row for each process, for report.py")
    add("--timeout", type=int, default=600, help="seconds that a step may take, or compiling")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def join_launcher():
    """Finds this process's place among the others, as torchrun or Slurm has set it."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:  # started by srun, which has other names for these
        os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
        os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_STEP_NUM_TASKS"])
        os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])
        os.environ.setdefault("GROUP_WORLD_SIZE", os.environ["SLURM_STEP_NUM_NODES"])
    needed = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    if not needed <= os.environ.keys():
        command = "torchrun --nproc_per_node=PROCESSES -- " + " ".join(sys.argv)
        sys.exit(f"start it by its job file, or with {command}")
    num_nodes = int(os.environ["GROUP_WORLD_SIZE"])
    if num_nodes == 1:  # nothing leaves this machine
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def start(local_rank, args, init_method):
    """Runs main(). If it ends with a message in all processes, one of them prints it."""
    try:
        main(local_rank, args, init_method)
    except SystemExit as end:
        if isinstance(end.code, str):
            for signum in SIGNALS:  # the launcher may end a process that waits here
                signal.signal(signum, signal.SIG_DFL)
            rank = int(os.environ["RANK"])
            time.sleep(1 + 10 * min(rank, 6))  # rank 0 speaks first; then the launcher ends all
            where = f"rank {rank} on {os.uname().nodename}: " if rank > 0 else ""
            sys.exit(where + end.code)
        raise


def main(local_rank, args, init_method):
    """Trains in one process, on --num_stages GPUs. Rank 0 also prints and saves."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    run = SimpleNamespace()  # what these functions share
    run.local_rank = local_rank  # on this node
    run.rank = int(os.environ.setdefault("RANK", str(local_rank)))
    run.world_size = int(os.environ["WORLD_SIZE"])
    run.start = f"{time.time_ns():x}"  # names this start
    run.id = run.start  # that of rank 0 is in the log. A resumed run keeps it.
    run.writer = None  # the start that wrote the snapshot from which this one resumes
    run.step = 0  # steps that are done
    run.row_step = 0  # the step of the last row
    run.sums = {}  # of batch_loss since the last look: of this process, on its device
    run.totals = {}  # those since the last row, over all processes
    check_args(run, args)
    run.settings = settings_of(args)  # before a function of the task adds to args
    snapshot = read_snapshot(run, args)
    # This also sets run.devices, run.groups and run.store.
    train_data, val_data = connect(run, args, init_method)
    run.num_samples = len(train_data)
    if snapshot and snapshot["progress"]["num_samples"] != run.num_samples:
        sys.exit(f"cannot resume from {args.snapshot}: since then the training data has changed")
    run.steps_per_epoch = run.num_samples // args.batch_size  # an incomplete last batch is left out
    run.num_steps = args.max_steps or args.epochs * run.steps_per_epoch
    if run.steps_per_epoch < 1 or len(val_data) < run.world_size:
        sys.exit(f"{len(train_data)} and {len(val_data)} samples are too few: see --batch_size")

    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    torch.backends.cudnn.benchmark = torch.version.hip is None  # AMD's search takes too long
    set_seeds(run.device, args.seed)  # again: read_data may have drawn numbers
    run.model = create_model(args, train_data)
    run.stages = list(split_model(run.model, run.devices))
    resting = [part for part in run.model.modules() if not part.training]  # these stay so
    train_again(run.model, resting if run.model.training else [])
    run.optimizer = create_optimizer(run.model, args)
    for group in run.optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])  # train_step() scales it, as LambdaLR does
    run.scaler = torch.amp.GradScaler(run.device.type, enabled=args.precision == "fp16")
    if snapshot:
        restore(run, snapshot, args)
    run.compiled_model = Chain(*run.stages)
    if args.compile:
        run.compiled_model = Chain(*[torch.compile(stage) for stage in run.stages])
    run.compiled_model.training = False  # it serves to validate. ddp_model trains
    run.watch = StageWatch(run.devices, run.stages)
    run.ddp_model = ddp_stages(run, args)
    if all_reduce_sums({"step": run.step})["step"] != run.step * run.world_size:
        sys.exit(f"the nodes have different files {args.snapshot}: use a shared file system")
    if run.rank == 0:
        print(f"processes {run.world_size}, device {run.device},", end=" ")
        print(f"steps {run.step} to {run.num_steps}", flush=True)

    batches = start_loader(train_data, training_requests(train_data, run, args), run, args)
    hides_bar = run.rank > 0 or not sys.stderr.isatty()
    bar = tqdm(total=run.num_steps, initial=run.step, disable=hides_bar, leave=False)
    for signum in SIGNALS:  # from here on, a signal asks the run to save and stop
        signal.signal(signum, note_stop)
    expect_progress(args.timeout)
    if run.step > 0 and "learning_rate_factor" in globals():  # it may note how far the training is
        globals()["learning_rate_factor"](args, min(1.0, run.step / max(1, run.num_steps)))
    first_step = look_step = run.step
    first_row = run.row_step
    look_time = time.perf_counter()
    next_look = run.step + 1
    next_line = look_time + 60  # of progress, if there is no bar
    is_stopped = False
    # A look and a row come before the step: a run that was stopped before a validation begins with
    # it when it resumes.
    while True:
        is_row_step = run.step % (args.eval_every or run.steps_per_epoch) == 0
        is_due = run.step > run.row_step and (is_row_step or run.step >= run.num_steps)
        if is_due or run.step == next_look:
            is_stopped, speed = look(run, look_step, look_time, args)
            if run.rank == 0 and bar.disable and time.perf_counter() > next_line:
                next_line = time.perf_counter() + 60
                print(f"step {run.step} of {run.num_steps}, {speed:.3g} steps/s", flush=True)
            if is_due or is_stopped:
                save_snapshot(run, args)
            if is_due and not is_stopped:
                val_totals = evaluate(run, val_data, args)
                is_stopped = val_totals.pop("/stops") > 0  # a resumed run then does it again
                if not is_stopped:
                    log_row(run, val_totals, args)
                    run.row_step = run.step
                    run.totals = {}
            farthest = 2 * (run.step - look_step)  # speed can be that of a few quick steps
            next_look = run.step + max(1, min(int(speed), farthest))
            look_step, look_time = run.step, time.perf_counter()
        if is_stopped or run.step >= run.num_steps:
            break
        train_step(run, batches, args)
        run.step += 1
        bar.update()
    bar.close()
    if is_stopped and run.step > first_step:
        log_row(run, {}, args)  # what was measured since the last row
    elif run.row_step > first_row:
        save_snapshot(run, args)  # with the new row_step: the same command then does nothing more
    expect_progress(0)
    for signum in SIGNALS:  # all is saved: another signal must not change the exit status
        signal.signal(signum, signal.SIG_IGN if is_stopped else signal.SIG_DFL)
    del run.ddp_model  # before torch 2.14, a process can hang if DDP outlives the group
    dist.barrier()  # a process that leaves early can make the others fail
    dist.destroy_process_group()
    if run.rank > 0:
        return
    print_summary(run.watch)
    if is_stopped:
        saved = args.snapshot or "nothing, as there is no --snapshot"
        print(f"stopped at step {run.step} of {run.num_steps}; saved {saved}")
        has_saved = args.snapshot and run.step > first_step  # else running it again would not help
        if "SLURM_STEP_NUM_TASKS" in os.environ:
            time.sleep(10)  # Slurm ends all when one fails: let the others end first
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again
    if "finish" in globals():
        run.model.eval()
        globals()["finish"](run.compiled_model, val_data, args, run.device)


def check_args(run, args):
    """Ends the run if the batch cannot be divided, or if a file could not be written."""
    divisor = run.world_size * args.grad_accum_steps
    if min(divisor, args.batch_size) < 1 or args.batch_size % divisor:
        sys.exit(f"--batch_size must be a multiple of {run.world_size} x --grad_accum_steps")
    for path in filter(None, (args.snapshot, args.log)):
        if os.path.isdir(path) or not os.access(os.path.join(os.path.dirname(path), "."), os.W_OK):
            sys.exit(f"cannot write {path}: it is a folder, or its folder is missing or read-only")


def connect(run, args, init_method):
    """Connects this process with the others, in a group for each stage, and returns the data.

    Rank 0 prepares the data first, then one process of each other node. Reading may take long.
    """
    run.devices = [torch.device("cpu")] * args.num_stages
    num_devices = torch.accelerator.device_count()
    if num_devices > 0:
        used = -(-run.world_size // int(os.environ["GROUP_WORLD_SIZE"])) * args.num_stages
        first = run.local_rank * args.num_stages
        # Slurm can show each process GPUs of its own. torchrun shows the same to all.
        if num_devices == args.num_stages and not dist.is_torchelastic_launched():
            first = 0
        elif used > num_devices:
            sys.exit(f"{num_devices} GPU(s) are too few for the processes of this node")
        if run.rank == 0 and used < num_devices:
            print(f"stages use {used} of {num_devices} GPUs of a node")
        run.devices = [torch.device(first + stage) for stage in range(args.num_stages)]
        torch.accelerator.set_device_index(first)
    run.device = run.devices[0]  # of the batches and the losses
    timeout = timedelta(seconds=args.timeout)
    run.store, *_ = next(rendezvous(init_method, run.rank, run.world_size, timeout=timeout))
    if run.rank > 0:
        first = run.rank - run.local_rank if run.local_rank > 0 else 0
        wait_for(run, [f"data of {first}"])
    set_seeds(run.device, args.seed)  # a random split is the same in all processes
    start_time = time.monotonic()
    data = read_data(args)
    run.store.set(f"data of {run.rank}", "is read")
    limit = 10 * (args.timeout + time.monotonic() - start_time)  # others may be slower
    wait_for(run, [f"data of {rank}" for rank in range(run.world_size)], limit)
    group = {"store": run.store, "rank": run.rank, "world_size": run.world_size, "timeout": timeout}
    expect_progress(args.timeout)
    try:
        dist.init_process_group("gloo", **group)
    except RuntimeError as error:
        hint = "do GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network's interface?"
        sys.exit(f"cannot connect: {error}\n{hint} NCCL_DEBUG=INFO tells more")
    expect_progress(0)  # creating the model may take long
    run.groups = {torch.device("cpu"): dist.group.WORLD}  # the group of each device's stage
    for device in run.devices if num_devices > 0 else ():
        backend = dist.get_default_backend_for_device(device)
        bound = {"device_id": device} if backend == "nccl" else {}  # NCCL's has one GPU a process
        run.groups[device] = dist.new_group(None, timeout, backend, **bound)
    return data


def wait_for(run, keys, seconds=86_400):
    """Waits until other processes have set the keys, for a day if nothing else is said."""
    try:
        run.store.wait(keys, timedelta(seconds=seconds))
    except dist.DistNetworkError:  # rank 0 has ended, and has said why
        sys.exit(1)
    except RuntimeError:  # each kind of store has its own
        sys.exit(f"waited {seconds:.0f} s in vain for another process to read its data, or to save")


def note_stop(signum, frame):
    STOP_REQUESTS.append(signum)
    if signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process at once


def expect_progress(seconds):
    """Shows this process's stack in so many seconds, and ends it in twice as many. 0: never."""
    faulthandler.cancel_dump_traceback_later()
    if seconds > 0:
        faulthandler.dump_traceback_later(seconds, file=sys.__stderr__)
    signal.alarm(2 * seconds)


def look(run, look_step, look_time, args):
    """Adds up the sums of all processes. Ends the run if the loss is not finite.

    Returns whether any process was asked to stop, and the steps per second. Waits for the GPU.
    """
    expect_progress(args.timeout)
    sums = {name: float(value) for name, value in run.sums.items()}  # waits for the GPU
    speed = (run.step - look_step) / (time.perf_counter() - look_time)
    # The slash keeps these names apart from those of batch_loss.
    news = {"/stops": len(STOP_REQUESTS), "/speed": speed}
    news = all_reduce_sums(news | sums)
    for name in run.sums:
        run.totals[name] = run.totals.get(name, 0.0) + news[name]
    run.sums = {}
    run.watch.mark("comm")
    run.watch.flush()
    if not math.isfinite(run.totals["loss"]):
        sys.exit(f"the loss is not finite at step {run.step}")
    return news["/stops"] > 0, news["/speed"] / run.world_size


def train_step(run, batches, args):
    """Takes one step of the optimizer, over all micro-batches of a batch."""
    factor_of = globals().get("learning_rate_factor", lambda args, done: 1.0)
    factor = factor_of(args, (run.step + 1) / run.num_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = float(group["initial_lr"] * factor)
    for micro_step in range(args.grad_accum_steps):
        batch = to_device(next(batches), run.device)
        set_seeds(run.device, args.seed, run.rank, run.step, micro_step)  # the same after a resume
        run.watch.mark("data")
        is_last = micro_step == args.grad_accum_steps - 1
        for stage in run.ddp_model:
            stage.require_backward_grad_sync = is_last  # False: no all-reduce, as in no_sync()
        loss = compute_loss(run, run.ddp_model, batch, run.sums, args)
        run.watch.mark("forward")
        run.scaler.scale(loss / args.grad_accum_steps).backward()
        run.watch.mark("comm" if is_last else "backward")  # timed_hook has marked the last backward
    if args.max_grad_norm > 0:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), args.max_grad_norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    run.watch.mark("optimizer")


def set_seeds(device, *numbers):
    """Seeds the random numbers of Python, NumPy and PyTorch."""
    seed = hash(numbers) % 2**32  # Python hashes numbers alike in all processes, unlike strings
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(seed)  # each stage has its own


def compute_loss(run, model, batch, sums, args):
    """Returns the loss of a batch, and adds the batch's sums to `sums`."""
    dtype = DTYPES[args.precision]
    with torch.autocast(run.device.type, dtype, enabled=dtype is not None):
        loss, batch_sums = batch_loss(model, batch, args)
    if not {"loss", "count"} <= batch_sums.keys():
        sys.exit("batch_loss must return sums, among them loss and count")
    if sums and sums.keys() != batch_sums.keys():
        sys.exit("batch_loss must return the same sums each time")
    for name, value in batch_sums.items():
        total = sums.get(name, torch.zeros(()))  # float32 is exact enough
        sums[name] = total + torch.as_tensor(value).detach()
    return loss


def all_reduce_sums(sums):
    """Returns the sums over all processes, as numbers. Waits for the GPU."""
    names = sorted(sums)
    totals = torch.tensor([float(sums[name]) for name in names], dtype=torch.float64)
    dist.all_reduce(totals)
    totals = dict(zip(names, totals.tolist()))
    return {name: totals[name] for name in sums}


def train_again(model, resting):
    """Calls model.train(), but leaves in eval() the parts that rest, such as frozen ones."""
    model.train()
    for part in resting:
        part.training = False


@torch.no_grad()
def evaluate(run, data, args):
    """Returns the sums of batch_loss over the data, of which each process takes a share."""
    ignored = getattr(run.model, "_ddp_params_and_buffers_to_ignore", ())  # as a user told DDP
    for name, buffer in run.model.named_buffers():  # BatchNorm's statistics: those of rank 0
        if name not in ignored and buffer.is_contiguous():
            dist.broadcast(buffer, src=0, group=run.groups[buffer.device])
    share = range(run.rank, len(data), run.world_size)
    size = args.batch_size // run.world_size // args.grad_accum_steps  # as in training
    batches_of_indices = BatchSampler(share, size, drop_last=False)
    requests = (((args.seed,), indices) for indices in batches_of_indices)
    resting = [part for part in run.model.modules() if not part.training]
    run.model.eval()
    sums = {}
    for number, batch in enumerate(start_loader(data, requests, run, args)):
        expect_progress(args.timeout)
        set_seeds(run.device, args.seed, run.rank, number)  # the same in each validation
        compute_loss(run, run.compiled_model, to_device(batch, run.device), sums, args)
        if STOP_REQUESTS:
            break
    sums["/stops"] = len(STOP_REQUESTS)
    train_again(run.model, resting)
    return all_reduce_sums(sums)


def training_requests(data, run, args):
    """Yields a request for each micro-batch of this process: seeds, and the indices of samples."""
    draw_order = globals().get("training_order", lambda *_: np.random.permutation(len(data)))
    order = None
    for step in range(run.step, run.num_steps):
        epoch, step_of_epoch = divmod(step, run.steps_per_epoch)
        if order is None or step_of_epoch == 0:
            set_seeds(run.device, args.seed, epoch)  # all processes draw the same order
            order = np.asarray(draw_order(data, args, epoch))
            if not run.steps_per_epoch * args.batch_size <= len(order) <= len(data):
                sys.exit(f"training_order must return {len(data)} indices, not {len(order)}")
            order = order[: run.steps_per_epoch * args.batch_size].reshape(-1, args.batch_size)
        share = order[step_of_epoch, run.rank :: run.world_size]
        for indices in share.reshape(args.grad_accum_steps, -1).tolist():
            yield (args.seed, step), indices


class Batches(Dataset):
    """The batches of a data set. A request holds seeds, for augmentation, and indices."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, request):
        seeds, indices = request
        set_seeds(torch.device("cpu"), *seeds, *indices)  # for augmentation
        if not hasattr(self.data, "__getitems__"):
            return default_collate([self.data[index] for index in indices])
        samples = self.data.__getitems__(indices)  # a tuple or dict is a batch already
        return default_collate(samples) if isinstance(samples, list) else samples


def start_loader(data, requests, run, args):
    """Returns an iterator over batches, one for each request."""
    parent = os.getpid()
    loader = DataLoader(
        Batches(data),
        batch_size=None,  # what the data set returns is a batch
        sampler=requests,
        num_workers=args.num_workers,
        multiprocessing_context="fork" if args.num_workers > 0 else None,  # shares the data
        worker_init_fn=lambda _: init_worker(parent),
        pin_memory=run.device.type not in ("cpu", "mps"),
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # workers inherit this
    batches = iter(loader)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return batches


def init_worker(parent):
    """Lets a worker outlive a signal to the whole job. It ends with its parent."""

    def wait_for_parent():
        while os.getppid() == parent:  # while it is alive
            received = signal.sigtimedwait(SIGNALS, 1)
            if received and received.si_pid == parent:  # from the loader, to end it
                break
        os._exit(0)

    threading.Thread(target=wait_for_parent, daemon=True).start()


def to_device(batch, device):
    """Returns the batch with its tensors on the device. What has no .to stays as it is."""
    return tree_map(lambda x: x.to(device, non_blocking=True) if hasattr(x, "to") else x, batch)


def settings_of(args):
    """Returns the flags that shape the weights, as numbers and strings."""
    settings = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    # Without the slash at the end of a folder: it means nothing.
    return {
        name: v if isinstance(v, (int, float)) else str(v).rstrip("/")
        for name, v in settings.items()
    }


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def read_snapshot(run, args):
    """Returns the snapshot, or None if there is none yet. One with other settings ends the run."""
    if not args.snapshot or not os.path.exists(args.snapshot):
        return None
    try:
        snapshot = load(args.snapshot)
        if "writer" not in snapshot["progress"]:
            raise ValueError("an older version of this script has written it")
        for name, value in run.settings.items():
            saved = snapshot["settings"].get(name, value)
            names = {os.path.basename(str(each)) for each in (saved, value)}  # folders may differ
            if saved != value and len(names) > 1:
                raise ValueError(f"it was made with --{name} {saved}, not {value}")
        return snapshot
    except Exception as error:  # a damaged or foreign file can fail anywhere
        sys.exit(f"cannot resume from {args.snapshot}: {error}")


def restore(run, snapshot, args):
    """Loads the snapshot into the run."""
    try:
        for name in STATES:
            getattr(run, name).load_state_dict(snapshot[name])
        vars(run).update(snapshot["progress"])
        snapshot.clear()  # else, beside a GPU, the file takes disk space after it is replaced
    except Exception as error:
        sys.exit(f"cannot resume from {args.snapshot}: {error}")


def save_snapshot(run, args):
    """Saves in rank 0, while the other processes wait: ten times as long as --timeout says."""
    if not args.snapshot:
        return
    expect_progress(10 * args.timeout)
    if not all(p.isfinite().all() for p in run.model.parameters() if p.requires_grad):
        sys.exit(f"weights are not finite at step {run.step}; {args.snapshot} stays as it was")
    key = f"snapshot {run.step} {run.row_step}"  # a barrier would end after --timeout
    if run.rank == 0:
        write_snapshot(run, args)
        run.store.set(key, "is saved")
    wait_for(run, [key], 10 * args.timeout)
    run.watch.mark("save")
    expect_progress(args.timeout)


def write_snapshot(run, args):
    """Writes a temporary file and renames it, so that no snapshot is half written."""
    snapshot = {name: getattr(run, name).state_dict() for name in STATES}
    snapshot["settings"] = run.settings
    progress = ("id", "step", "row_step", "totals", "num_samples")
    snapshot["progress"] = {name: getattr(run, name) for name in progress} | {"writer": run.start}
    temporary = Path(f"{args.snapshot}.{run.id}.{run.start}.tmp")
    try:
        for old in temporary.parent.glob(f"*.{run.id}.*.tmp"):  # of starts that were killed
            old.unlink(missing_ok=True)
        with open(temporary, "wb") as file:
            torch.save(snapshot, file)
            os.fsync(file.fileno())
        if os.path.exists(args.snapshot):
            writer = load(args.snapshot)["progress"]["writer"]
            if writer not in (run.start, run.writer) or not temporary.exists():
                raise OSError("another run writes it")
        load(temporary)  # a type that weights_only refuses, such as NumPy's, fails here
        os.replace(temporary, args.snapshot)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        cause = error.__context__ or error  # PyTorch's own error does not name a full disk
        sys.exit(f"cannot save {args.snapshot}, which stays as it was: {cause}")


def log_row(run, val_totals, args):
    """Prints the means since the last row, and appends a row for each process to --log."""
    device_module = torch.get_device_module(run.device)
    plain = (int, float, str, type(None))
    row = {name: v if isinstance(v, plain) else str(v) for name, v in vars(args).items()} | {
        "script": "/".join(Path(__file__).resolve().parts[-2:]),
        "settings": run.settings,
        "processes": run.world_size,
        "nodes": int(os.environ["GROUP_WORLD_SIZE"]),
        "rank": run.rank,
        "host": os.uname().nodename,
        "device": getattr(device_module, "get_device_name", run.device.type.upper)(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "step": run.step,
        "steps_per_epoch": run.steps_per_epoch,
    }
    means = {}
    for split, totals in (("train", run.totals), ("val", val_totals)):
        count = totals.pop("count", 0)  # 0: not validated, or no sample had a label
        means |= {f"{split}_{name}": total / count for name, total in totals.items() if count}
    row |= means
    row |= run.watch.take_times(args.batch_size)
    rows = [None] * run.world_size if run.rank == 0 else None
    dist.gather_object(row, rows)
    if run.rank > 0:
        return
    run.watch.add_rows(rows)
    words = [f"step {run.step}", *(f"{name} {mean:.4g}" for name, mean in means.items())]
    words += [f"{name} {row[name]:.5g}" for name in ("seconds", "samples/s") if name in row]
    tqdm.write(textwrap.fill("  ".join(words), 100))
    if args.log:
        with open(args.log, "a") as file:
            for process_row in rows:
                process_row["run"] = run.id  # that of rank 0
                file.write(json.dumps(process_row, default=str) + "\n")


# == Where the time goes. To remove it, delete up to the main guard, and each line with watch. =====

STEP_PHASES = ("data", "forward", "backward", "comm", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")
TIMES = (*PHASES, "comm_total", "steps")
WARMUP_STEPS = 3  # these first steps allocate memory, search for kernels, compile


class Stopwatch:
    """Times the phases of training, and the all-reduces, also those during the backward pass.

    A moment is a time in seconds or, on a GPU, an event. Only flush() waits for the GPU.
    """

    def __init__(self, device):
        self.device = device
        self.has_events = device.type not in ("cpu", "mps")
        self.num_steps = 0  # since the start
        self.times = dict.fromkeys(TIMES, 0.0)  # seconds, and the number of steps after warmup
        self.marks = [("start", self.now())]  # (phase, the moment at which it ended)
        self.rows = []  # the last row of each process, in rank 0 alone
        self.totals = []  # the summed times of each process, in rank 0 alone
        self.spans = []  # (name, start, end, bytes) of all-reduces since the last flush
        self.last_step = []  # (name, start, end, bytes) of phases and all-reduces

    def now(self):
        if not self.has_events:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        return torch.accelerator.current_stream().record_event(event)

    def between(self, start, end):
        return start.elapsed_time(end) / 1000 if self.has_events else end - start

    def mark(self, phase):
        """Counts the time since the last mark as this phase or, in the first steps, as warmup."""
        is_warmup = phase in STEP_PHASES and self.num_steps < WARMUP_STEPS
        self.num_steps += phase == "optimizer"
        self.marks.append(("warmup" if is_warmup else phase, self.now()))

    def flush(self):
        """Adds up the times since the last flush. Waits for the GPU."""
        if self.has_events:
            torch.accelerator.synchronize()
        _, now = self.marks[-1]  # time 0: all processes have just left the same all-reduce
        marks = [(phase, -self.between(moment, now)) for phase, moment in self.marks]
        phases = [(phase, start, end, 0) for (_, start), (phase, end) in itertools.pairwise(marks)]
        all_reduces = []  # as phases: (name, start, end, bytes), in seconds after now: negative
        for name, start, end, size in self.spans:
            all_reduces.append((name, -self.between(start, now), -self.between(end, now), size))
        for phase, start, end, _ in phases:
            self.times[phase] += end - start
        sending = all_reduces + [phase for phase in phases if phase[0] == "comm"]
        counted_until = -math.inf  # where all-reduces overlap, the time counts once
        for _, start, end, _ in sorted(sending, key=lambda event: event[1]):
            self.times["comm_total"] += max(0.0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
        step_ends = [end for phase, _, end, _ in phases if phase == "optimizer"]
        self.times["steps"] += len(step_ends)
        if step_ends:
            first, last = [-math.inf, *step_ends][-2:]  # the ends of the last two steps
            self.last_step = [event for event in phases + all_reduces if first <= event[1] < last]
        del self.marks[:-1]
        self.spans.clear()

    def take_times(self, batch_size):
        """Returns the columns of time and memory. The times start again from 0."""
        self.mark("eval")  # a validation has just ended
        self.flush()
        row = with_speed(self.times, batch_size)
        self.times = dict.fromkeys(TIMES, 0.0)
        row["peak_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # from KiB
        if self.has_events:
            row["peak_MB"] = torch.accelerator.max_memory_allocated() / 1e6
        row["last_step"] = self.last_step
        return row

    def add_rows(self, rows):
        """Keeps what the summary needs: a row of each process, and the sums of their times."""
        self.rows = rows
        self.totals = self.totals or [Counter() for _ in rows]
        for row, total in zip(rows, self.totals):
            total.update({name: row[name] for name in TIMES})


class StageWatch(Stopwatch):
    """Times by the clock of the first GPU: events of two GPUs cannot be compared."""

    def __init__(self, devices, stages):
        self.devices = devices
        self.sizes = [num_weights(stage) for stage in stages]
        if devices[0].type != "cpu":
            self.main_streams = [torch.accelerator.current_stream(device) for device in devices]
            # Streams of the first GPU that hold nothing but events. Neither waits for the other.
            self.clock, self.comm_clock = (torch.Stream(devices[0], priority=-1) for _ in range(2))
        super().__init__(devices[0])

    def now(self):
        if not self.has_events:
            return super().now()
        current = torch.accelerator.current_stream()
        if current in self.main_streams:
            clock, streams = self.clock, self.main_streams
        else:  # an all-reduce has ended: other stages do not count
            clock, streams = self.comm_clock, [current]
        for stream in streams:
            clock.wait_stream(stream)
        return clock.record_event(torch.Event(self.device, enable_timing=True))

    def take_times(self, batch_size):
        """Also returns the weights of each stage, and the peak memory of the fullest GPU."""
        row = super().take_times(batch_size) | {"stages": self.sizes}
        if self.has_events:
            peaks = [torch.accelerator.max_memory_allocated(device) for device in self.devices]
            row["peak_MB"] = max(peaks) / 1e6
        return row


def timed(comm_hook, watch, device):
    """Returns a hook that DDP calls for each bucket of gradients: comm_hook with timing."""
    streams = [contextlib.nullcontext()] * 2  # in which all-reduces are started
    if watch.has_events:
        streams = [torch.Stream(device, priority=-1) for _ in range(2)]

    def timed_hook(process_group, bucket):
        if bucket.is_last():
            watch.mark("backward")
        start = watch.now()
        size = 0 if bucket.buffer().is_sparse else bucket.buffer().nbytes

        def note_end(future):  # on a GPU, in a stream that waits for the all-reduce
            if watch.num_steps >= WARMUP_STEPS:
                watch.spans.append(("all-reduce", start, watch.now(), size))
            return future.value()

        # A hook can make its stream wait for its all-reduce, such as to convert the result from
        # bf16. In a side stream, this does not stop the backward pass. Two streams take turns: a
        # bucket does not wait for the all-reduce of the bucket before it.
        stream = streams[bucket.index() % 2]
        if watch.has_events:
            stream.wait_stream(torch.accelerator.current_stream())  # it computes the gradients
        with stream:
            return comm_hook(process_group, bucket).then(note_end)

    return timed_hook


def with_speed(times, batch_size):
    """Returns the times, with their sum, and with the speed of training after the warmup."""
    training = sum(times[phase] for phase in STEP_PHASES)
    speed = batch_size * times["steps"] / training if training else 0.0
    return times | {"seconds": sum(times[phase] for phase in PHASES), "samples/s": speed}


def print_summary(watch):
    """Prints where the time since the start has gone, and a row for results.md.

    R is the time of computing divided by that of sending. If nothing is hidden, N processes with
    this R are N R / (1 + R) times as fast as one: 0.75 N at R = 3. If different processes are late
    in turn, part of the waiting counts as sending.
    """
    if not watch.rows:
        return
    last = watch.rows[0]
    mean = {name: sum(total[name] for total in watch.totals) / len(watch.rows) for name in TIMES}
    mean = with_speed(mean, last["batch_size"])
    print(f"\ntime by phase, {mean['seconds']:.2f} s in all (mean over processes)")
    for phase in PHASES:
        share = mean[phase] / mean["seconds"]
        print(f"{phase:9} {mean[phase]:8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    totals = [total["comm_total"] for total in watch.totals]
    sending = min(totals)  # the process that comes last never waits in an all-reduce
    if len(totals) > 1 and sending > 0:
        late = totals.index(sending)
        hidden = max(0.0, 1 - mean["comm"] / mean["comm_total"])
        ratio = (mean["forward"] + mean["backward"] + mean["optimizer"]) / sending
        waiting = f"waiting {mean['comm_total'] - sending:.3f} s for rank {late}"
        verdict = "below 3: more processes hardly pay off"
        if ratio > 3:
            verdict = "above 3: more processes can pay off, each on its own GPU or cores"
        print(f"communication {mean['comm_total']:.3f} s, {hidden:.0%} of it hidden:")
        print(f"sending {sending:.3f} s, {waiting} on {watch.rows[late]['host']}")
        print(f"R = compute / sending = {ratio:.1f}, {verdict}")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(last.get(name, "-")) for name in names}
    results = {name for name in last if name.startswith("val_")} - last["settings"].keys()
    cells |= {name: f"{last[name]:.4g}" for name in last if name in results}
    mean["peak_MB"] = max(row["peak_MB"] for row in watch.rows)  # of the process with the most
    cells |= {name: f"{value:.4g}" for name, value in mean.items()}
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    args = parse_args()
    join_launcher()
    start(int(os.environ["LOCAL_RANK"]), args, "env://")
