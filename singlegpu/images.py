"""Train an image classifier on one GPU, or on the CPU of a machine that has none.

    python singlegpu/images.py                                     # synthetic images: no download
    python singlegpu/images.py --model mlp --dataset mnist --epochs 10
    python singlegpu/images.py --dataset photos --model resnet18 --pretrained
    python singlegpu/images.py --precision bf16 --snapshot cnn.pt  # run it again, and it resumes
    sbatch slurm/singlegpu_images.slurm --model vgg11 --learning_rate 1e-4

For your own data and model, replace the first of the three sections. The other two contain no task
code: they are the same in all scripts of this folder.
`diff singlegpu/images.py multigpu/images.py` shows what distribution adds.
"""

import argparse
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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset, default_collate
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


# ========================= The run: steps, rows, snapshots, processes. Keep. ======================
# main() has the loop over all steps.
# A look: about once a second, the run asks whether the loss is finite, and whether it must stop.
# A row: what was measured since the row before, and a validation.
# A request: what the loader makes a batch of: random seeds, and the indices of samples.
# Of the first section, the run calls parse_args, read_data, create_model, create_optimizer and
# batch_loss. It also calls training_order, learning_rate_factor and finish, if they are there.

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
STOP_REQUESTS = []  # the signals that this process has received
STATES = ("model", "optimizer", "scaler")  # the parts of a run that a snapshot saves
MAY_CHANGE = (  # the flags of all scripts that a resumed run may change. Others shape weights.
    "epochs max_steps eval_every grad_accum_steps compile num_workers timeout "
    "data_dir snapshot log sample reconstructions"
).split()


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    # AMD's TF32 is as inexact as bf16, so it is not the default there.
    has_tf32 = torch.accelerator.is_available() and torch.version.cuda is not None
    add = parser.add_argument_group("the run").add_argument
    add("--epochs", type=int, help="passes over the data; a change can shift the schedule")
    add("--max_steps", type=int, default=0, help="optimizer steps in all; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="learning rate, highest of a schedule")
    add("--max_grad_norm", type=float, default=0.0, help="clip longer gradients; 0: do not clip")
    add("--precision", choices=DTYPES, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save at each row and when stopped; resume if it exists")
    add("--log", metavar="FILE.jsonl", help="append rows, for report.py")
    add("--timeout", type=int, default=600, help="seconds that a step may take, or compiling")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def main(args):
    """Trains in one process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    run = SimpleNamespace()  # what these functions share
    run.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    run.start = f"{time.time_ns():x}"  # names this start
    run.id = run.start  # names the run in the log. A resumed run keeps it.
    run.writer = None  # the start that wrote the snapshot from which this one resumes
    run.step = 0  # steps that are done
    run.row_step = 0  # the step of the last row
    run.sums = {}  # of batch_loss since the last look, on the device
    run.totals = {}  # those since the last row
    check_args(run, args)
    run.settings = settings_of(args)  # before a function of the task adds to args
    snapshot = read_snapshot(run, args)
    set_seeds(run.device, args.seed)  # a resumed run draws the same random split
    train_data, val_data = read_data(args)
    run.num_samples = len(train_data)
    if snapshot and snapshot["progress"]["num_samples"] != run.num_samples:
        sys.exit(f"cannot resume from {args.snapshot}: since then the training data has changed")
    run.steps_per_epoch = run.num_samples // args.batch_size  # an incomplete last batch is left out
    run.num_steps = args.max_steps or args.epochs * run.steps_per_epoch
    if run.steps_per_epoch < 1 or len(val_data) < 1:
        sys.exit(f"{len(train_data)} and {len(val_data)} samples are too few: see --batch_size")

    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    torch.backends.cudnn.benchmark = torch.version.hip is None  # AMD's search takes too long
    set_seeds(run.device, args.seed)  # again: read_data may have drawn numbers
    run.model = create_model(args, train_data).to(run.device)
    resting = [part for part in run.model.modules() if not part.training]  # these stay so
    train_again(run.model, resting if run.model.training else [])
    run.optimizer = create_optimizer(run.model, args)
    for group in run.optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])  # train_step() scales it, as LambdaLR does
    run.scaler = torch.amp.GradScaler(run.device.type, enabled=args.precision == "fp16")
    if snapshot:
        restore(run, snapshot, args)
    run.compiled_model = torch.compile(run.model) if args.compile else run.model
    run.watch = Stopwatch(run.device)
    print(f"device {run.device}, steps {run.step} to {run.num_steps}", flush=True)

    batches = start_loader(train_data, training_requests(train_data, run, args), run, args)
    bar = tqdm(total=run.num_steps, initial=run.step, disable=None, leave=False)  # on a terminal
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
            if bar.disable and time.perf_counter() > next_line:
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
    print_summary(run.watch)
    if is_stopped:
        saved = args.snapshot or "nothing, as there is no --snapshot"
        print(f"stopped at step {run.step} of {run.num_steps}; saved {saved}")
        has_saved = args.snapshot and run.step > first_step  # else running it again would not help
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again
    if "finish" in globals():
        globals()["finish"](run.model.eval(), val_data, args, run.device)


def check_args(run, args):
    """Ends the run if the batch cannot be divided, or if a file could not be written."""
    divisor = args.grad_accum_steps
    if min(divisor, args.batch_size) < 1 or args.batch_size % divisor:
        sys.exit("--batch_size must be a multiple of --grad_accum_steps")
    for path in filter(None, (args.snapshot, args.log)):
        if os.path.isdir(path) or not os.access(os.path.join(os.path.dirname(path), "."), os.W_OK):
            sys.exit(f"cannot write {path}: it is a folder, or its folder is missing or read-only")


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
    """Adds up the sums since the last look. Ends the run if the loss is not finite.

    Returns whether a signal has asked the run to stop, and the steps per second. Waits for the GPU.
    """
    expect_progress(args.timeout)
    for name, value in run.sums.items():
        run.totals[name] = run.totals.get(name, 0.0) + float(value)  # waits for the GPU
    run.sums = {}
    speed = (run.step - look_step) / (time.perf_counter() - look_time)
    run.watch.flush()
    if not math.isfinite(run.totals["loss"]):
        sys.exit(f"the loss is not finite at step {run.step}")
    return len(STOP_REQUESTS) > 0, speed


def train_step(run, batches, args):
    """Takes one step of the optimizer, over all micro-batches of a batch."""
    factor_of = globals().get("learning_rate_factor", lambda args, done: 1.0)
    factor = factor_of(args, (run.step + 1) / run.num_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = float(group["initial_lr"] * factor)
    for micro_step in range(args.grad_accum_steps):
        batch = to_device(next(batches), run.device)
        set_seeds(run.device, args.seed, run.step, micro_step)  # a resumed run draws the same
        run.watch.mark("data")
        loss = compute_loss(run, run.compiled_model, batch, run.sums, args)
        run.watch.mark("forward")
        run.scaler.scale(loss / args.grad_accum_steps).backward()
        run.watch.mark("backward")
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
        torch.get_device_module(device).manual_seed(seed)


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


def train_again(model, resting):
    """Calls model.train(), but leaves in eval() the parts that rest, such as frozen ones."""
    model.train()
    for part in resting:
        part.training = False


@torch.no_grad()
def evaluate(run, data, args):
    """Returns the sums of batch_loss over the data."""
    size = args.batch_size // args.grad_accum_steps  # as in training
    batches_of_indices = BatchSampler(range(len(data)), size, drop_last=False)
    requests = (((args.seed,), indices) for indices in batches_of_indices)
    resting = [part for part in run.model.modules() if not part.training]
    run.model.eval()
    sums = {}
    for number, batch in enumerate(start_loader(data, requests, run, args)):
        expect_progress(args.timeout)
        set_seeds(run.device, args.seed, number)  # the same in each validation
        compute_loss(run, run.compiled_model, to_device(batch, run.device), sums, args)
        if STOP_REQUESTS:
            break
    sums["/stops"] = len(STOP_REQUESTS)
    train_again(run.model, resting)
    return {name: float(value) for name, value in sums.items()}


def training_requests(data, run, args):
    """Yields a request for each micro-batch: seeds, and the indices of samples."""
    draw_order = globals().get("training_order", lambda *_: np.random.permutation(len(data)))
    order = None
    for step in range(run.step, run.num_steps):
        epoch, step_of_epoch = divmod(step, run.steps_per_epoch)
        if order is None or step_of_epoch == 0:
            set_seeds(run.device, args.seed, epoch)  # a resumed run draws the same order
            order = np.asarray(draw_order(data, args, epoch))
            if not run.steps_per_epoch * args.batch_size <= len(order) <= len(data):
                sys.exit(f"training_order must return {len(data)} indices, not {len(order)}")
            order = order[: run.steps_per_epoch * args.batch_size].reshape(-1, args.batch_size)
        for indices in order[step_of_epoch].reshape(args.grad_accum_steps, -1).tolist():
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
    """Saves a snapshot. This may take ten times as long as --timeout says."""
    if not args.snapshot:
        return
    expect_progress(10 * args.timeout)
    if not all(p.isfinite().all() for p in run.model.parameters() if p.requires_grad):
        sys.exit(f"weights are not finite at step {run.step}; {args.snapshot} stays as it was")
    write_snapshot(run, args)
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
    """Prints the means since the last row, and appends a row to --log."""
    device_module = torch.get_device_module(run.device)
    plain = (int, float, str, type(None))
    row = {name: v if isinstance(v, plain) else str(v) for name, v in vars(args).items()} | {
        "script": "/".join(Path(__file__).resolve().parts[-2:]),
        "settings": run.settings,
        "processes": 1,
        "nodes": 1,
        "rank": 0,
        "host": os.uname().nodename,
        "device": getattr(device_module, "get_device_name", run.device.type.upper)(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "trained": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        "step": run.step,
        "steps_per_epoch": run.steps_per_epoch,
        "run": run.id,
    }
    means = {}
    for split, totals in (("train", run.totals), ("val", val_totals)):
        count = totals.pop("count", 0)  # 0: not validated, or no sample had a label
        means |= {f"{split}_{name}": total / count for name, total in totals.items() if count}
    row |= means
    row |= run.watch.take_times(args.batch_size)
    run.watch.add_row(row)
    words = [f"step {run.step}", *(f"{name} {mean:.4g}" for name, mean in means.items())]
    words += [f"{name} {row[name]:.5g}" for name in ("seconds", "samples/s") if name in row]
    tqdm.write(textwrap.fill("  ".join(words), 100))
    if args.log:
        with open(args.log, "a") as file:
            file.write(json.dumps(row, default=str) + "\n")


# == Where the time goes. To remove it, delete up to the main guard, and each line with watch. =====

STEP_PHASES = ("data", "forward", "backward", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")
TIMES = (*PHASES, "steps")
WARMUP_STEPS = 3  # these first steps allocate memory, search for kernels, compile


class Stopwatch:
    """Times the phases of training.

    A moment is a time in seconds or, on a GPU, an event. Only flush() waits for the GPU.
    """

    def __init__(self, device):
        self.device = device
        self.has_events = device.type not in ("cpu", "mps")
        self.num_steps = 0  # since the start
        self.times = dict.fromkeys(TIMES, 0.0)  # seconds, and the number of steps after warmup
        self.marks = [("start", self.now())]  # (phase, the moment at which it ended)
        self.last_step = []  # (phase, start, end, bytes), for report.py --step
        self.row = {}  # the last row
        self.totals = Counter()  # the summed times of all rows

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
        _, now = self.marks[-1]
        marks = [(phase, -self.between(moment, now)) for phase, moment in self.marks]
        phases = [(phase, start, end, 0) for (_, start), (phase, end) in itertools.pairwise(marks)]
        for phase, start, end, _ in phases:  # in seconds after now: negative
            self.times[phase] += end - start
        step_ends = [end for phase, _, end, _ in phases if phase == "optimizer"]
        self.times["steps"] += len(step_ends)
        if step_ends:
            first, last = [-math.inf, *step_ends][-2:]  # the ends of the last two steps
            self.last_step = [event for event in phases if first <= event[1] < last]
        del self.marks[:-1]

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

    def add_row(self, row):
        """Keeps what the summary needs: the last row, and the sums of the times."""
        self.row = row
        self.totals.update({name: row[name] for name in TIMES})


def with_speed(times, batch_size):
    """Returns the times, with their sum, and with the speed of training after the warmup."""
    training = sum(times[phase] for phase in STEP_PHASES)
    speed = batch_size * times["steps"] / training if training else 0.0
    return times | {"seconds": sum(times[phase] for phase in PHASES), "samples/s": speed}


def print_summary(watch):
    """Prints where the time since the start has gone, and a row for results.md."""
    if not watch.row:
        return
    total = with_speed(watch.totals, watch.row["batch_size"])
    print(f"\ntime by phase, {total['seconds']:.2f} s in all")
    for phase in PHASES:
        share = total[phase] / total["seconds"]
        print(f"{phase:9} {total[phase]:8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(watch.row.get(name, "-")) for name in names}
    results = {name for name in watch.row if name.startswith("val_")} - watch.row["settings"].keys()
    cells |= {name: f"{watch.row[name]:.4g}" for name in watch.row if name in results}
    total["peak_MB"] = watch.row["peak_MB"]
    cells |= {name: f"{value:.4g}" for name, value in total.items()}
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    main(parse_args())
