"""Train an image classifier with one GPU or, if there is none, with the CPU.

    python singlegpu/images.py                                     # synthetic images: no download
    python singlegpu/images.py --model mlp --dataset mnist --epochs 10
    python singlegpu/images.py --dataset photos --model resnet18 --pretrained
    python singlegpu/images.py --precision bf16 --snapshot cnn.pt  # run it again, and it resumes
    sbatch slurm/singlegpu_images.slurm --model vgg11 --learning_rate 1e-4

Read mnist.py first. This is the same, in the same order, with what a real job needs.
For your own data and model, replace the first of the three sections.
Shapes: N images of a split, B of a batch, C channels, H height, W width, K classes.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import resource
import signal
import sys
import textwrap
import time
import unicodedata
import warnings
import zlib
from collections import Counter
from multiprocessing import active_children
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchvision import datasets, models
from torchvision.transforms import v2
from torchvision.utils import save_image
from tqdm import tqdm

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker
HAS_EVENTS = ON_GPU and torch.accelerator.current_accelerator().type != "mps"  # its events can hang

# == Yours: flags, data, model, loss. Replace it. ==================================================


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default="cnn", help="or mlp, autoencoder, a network of torchvision: vgg11, ...")
    add("--pretrained", action="store_true", help="start from torchvision's weights for ImageNet")
    add("--dataset", default="synthetic", help="or mnist, cifar10, a folder with train/CLASS/*.jpg")
    add("--data_dir", default="data", help="folder of the data; mnist and cifar10 are downloaded")
    add("--image_size", type=int, default=224, help="photos are cropped to this height and width")
    add("--dropout", type=float, default=0.0, help="dropout probability in cnn and mlp")
    add("--reconstructions", metavar="FILE.png", help="draw what the autoencoder makes of images")
    return parse_run_args(parser, epochs=2, batch_size=64, num_workers=None)


def read_data(args):
    """Returns the data to train on and to validate on, two map-style datasets."""
    train_data, val_data = read_images(args, "train"), read_images(args, "test")
    names, val_names = (
        [unicodedata.normalize("NFC", str(name)) for name in data.classes]
        for data in (train_data, val_data)
    )
    if val_names != names[: len(val_names)]:
        sys.exit(f"{args.dataset}: classes are {names}, in val {val_names}")
    return train_data, val_data


def read_images(args, split):
    """Returns the images of a split, "train" or "test". The test split serves for validation."""
    is_train = split == "train"
    if args.dataset == "synthetic":
        return synthetic_images(60_000 if is_train else 10_000)
    if args.dataset == "mnist":
        source = datasets.MNIST(args.data_dir, is_train, download=True)
        return Images(source.data[:, None], source.targets)
    if args.dataset == "cifar10":
        source = datasets.CIFAR10(args.data_dir, is_train, download=True)
        images = source.data.transpose(0, 3, 1, 2)  # from (N, H, W, C)
        return Images(torch.tensor(images), torch.tensor(source.targets))
    folder = Path(args.data_dir, args.dataset)
    folder = folder if folder.is_dir() else Path(args.dataset)
    if (folder / "train").is_dir():
        if args.num_workers is None:  # decoding a photo takes longer than training on it
            args.num_workers = torch.get_num_threads()
        crop = [v2.Resize(args.image_size * 8 // 7), v2.CenterCrop(args.image_size)]  # 256, 224
        if is_train:
            crop = [v2.RandomResizedCrop(args.image_size), v2.RandomHorizontalFlip()]
        transform = v2.Compose([*crop, v2.PILToTensor()])
        folder /= "train" if is_train else "val"
        endings = tuple(Image.registered_extensions())
        data = datasets.DatasetFolder(folder, read_photo, endings, transform)
        num_files = sum(len(files) for _, _, files in os.walk(folder))
        print(f"{len(data)} of {num_files} files in {folder} are pictures", flush=True)
        return data
    print(f"the {split} images are those of {folder}/*.npy", flush=True)
    # The files of make_images.py are mapped, since they may be larger than memory.
    images = np.load(folder / f"{split}_images.npy", mmap_mode="r")
    with warnings.catch_warnings(action="ignore"):  # of memory that is read only
        images = torch.from_numpy(images)
    labels = np.load(folder / f"{split}_labels.npy").astype(np.int64, casting="same_kind")
    if images.dtype != torch.uint8 or images.dim() not in (3, 4) or len(labels) != len(images):
        sys.exit(f"{folder}: {split} images are not uint8 (N, C, H, W), or not as many as labels")
    return Images(images if images.dim() == 4 else images[:, None], torch.from_numpy(labels))


def read_photo(path):
    """Returns a photo as people see it: upright, and on white where it is transparent."""
    photo = ImageOps.exif_transpose(Image.open(path))
    if photo.mode.startswith(("I", "F")):  # convert() would clip these
        raise ValueError(f"{path} has more than 8 bits a channel. make_images.py scales 16 bits")
    if photo.has_transparency_data:
        photo = photo.convert("RGBA")
        photo = Image.alpha_composite(Image.new("RGBA", photo.size, "white"), photo)
    return photo.convert("RGB")


class Images(TensorDataset):
    """Images (N, C, H, W) uint8 and their labels (N,), 0 to K - 1."""

    def __init__(self, images, labels):
        super().__init__(images, labels)
        self.classes = range(int(labels.max()) + 1)

    def __getitems__(self, indices):
        """Returns a whole batch: images (B, C, H, W) uint8 and labels (B,)."""
        images, labels = (tensor.numpy()[indices] for tensor in self.tensors)  # NumPy is faster
        return torch.from_numpy(images), torch.from_numpy(labels)


def synthetic_images(num_images):
    """Returns ten smooth random patterns, one for each class, under noise, and their labels."""
    patterns = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, size=28, mode="bilinear")  # (K, C, H, W)
    generator = torch.Generator().manual_seed(num_images)  # other noise for each split
    labels = torch.randint(10, (num_images,), generator=generator)
    noise = torch.randint(176, (num_images, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return Images((80 * patterns[labels]).byte() + noise, labels)  # at most 80 + 175 = 255


def training_order(data, args, epoch):
    """Returns the indices (N,) of an epoch: random blocks of 2 MiB, shuffled 128 at a time.

    So a file larger than memory is read in long pieces. Up to 256 MiB are shuffled as a whole.
    """
    if not isinstance(data, Images):
        return np.random.permutation(len(data))
    block_size = max(1, 2**21 // data[0][0].nbytes)
    block_starts = np.random.permutation(np.arange(0, len(data), block_size))
    order = (block_starts[:, None] + np.arange(block_size)).flatten()  # (blocks x block_size,)
    order = order[order < len(data)]  # the last block may be short
    for start in range(0, len(data), 128 * block_size):
        np.random.shuffle(order[start : start + 128 * block_size])  # in place
    return order


def create_model(args, data):
    """Returns a network that maps images (B, C, H, W), 0 to 1, to logits (B, K)."""
    channels, height, width = data[0][0].shape
    num_classes = len(data.classes)
    if args.pretrained and args.model in ("mlp", "cnn", "autoencoder"):
        sys.exit(f"there are no pretrained weights of {args.model}: name a network of torchvision")
    if args.model == "mlp":
        layers = [nn.Flatten(), nn.Linear(channels * height * width, 512), nn.ReLU()]
        layers += [nn.Linear(512, 512), nn.ReLU()]
        layers += [nn.Dropout(args.dropout), nn.Linear(512, num_classes)]
        return nn.Sequential(*layers)
    if args.model == "cnn":  # the network of pytorch/examples/mnist, with one dropout
        layers = [nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Flatten()]
        layers += [nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128), nn.ReLU()]
        layers += [nn.Dropout(args.dropout), nn.Linear(128, num_classes)]
        return nn.Sequential(*layers)
    if args.model == "autoencoder":  # it maps images to their reconstructions (B, C, H, W)
        layers = [nn.Conv2d(channels, 32, 3, 2, 1), nn.ReLU()]  # stride 2 halves height and width
        layers += [nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()]
        layers += [nn.Conv2d(64, 2 * channels, 3, 1, 1)]  # the code (B, 2 C, H / 4, W / 4)
        layers += [nn.Conv2d(2 * channels, 64, 3, 1, 1), nn.ReLU()]
        layers += [nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU()]
        layers += [nn.ConvTranspose2d(32, channels, 4, 2, 1)]
        return nn.Sequential(*layers)
    network = models.get_model(args.model)
    weights = models.get_model_weights(args.model).DEFAULT
    if args.pretrained:
        network.load_state_dict(weights.get_state_dict(check_hash=True, weights_only=True))
    linear = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not linear or hasattr(network, "aux_logits"):
        sys.exit(f"--model {args.model}: its last layer is not linear, or it has several outputs")
    num_features = network.get_submodule(linear[-1]).in_features
    network.set_submodule(linear[-1], nn.Linear(num_features, num_classes))
    to_rgb = v2.RGB() if channels in (1, 3) else nn.Conv2d(channels, 3, 1)
    least = max(32, *weights.meta["min_size"])  # pixels that the network needs
    enlarge = nn.Upsample((max(least, height), max(least, width)))
    normalize = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's
    return nn.Sequential(to_rgb, enlarge, normalize, network)


def create_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)


def learning_rate_factor(args, done):
    """Returns what scales --learning_rate when this share of all steps, 0 to 1, is done."""
    if done < 0.05:
        return 20 * done  # it rises to 1
    return 1.05 - done  # and falls to a twentieth


def batch_loss(model, batch, args):
    """Returns the mean loss of a batch, and sums over its images. A row shows sums / count."""
    images, labels = batch
    images = images.float() / 255
    if args.model == "autoencoder":
        loss = nn.functional.mse_loss(model(images), images)
        return loss, {"loss": loss * len(images), "count": len(images)}
    logits = model(images)  # (B, K)
    loss = nn.functional.cross_entropy(logits, labels)
    correct = (logits.argmax(1) == labels).sum()
    return loss, {"loss": loss * len(labels), "acc": correct, "count": len(labels)}


@torch.no_grad()
def finish(model, data, args, device):
    """Draws --reconstructions: 16 images above what the autoencoder makes of them."""
    if args.reconstructions and args.model == "autoencoder":
        images = torch.stack([data[index][0] for index in range(min(16, len(data)))])
        images = images.to(device) / 255
        save_image(torch.cat((images, model(images))), args.reconstructions, nrow=16)


# == The run: flags, steps, rows, snapshots. Keep it. It calls eight functions of the task. ========

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
MAY_CHANGE = (  # flags, of any task, that may differ in a resumed run. All others may not.
    "epochs max_steps eval_every grad_accum_steps compile num_workers data_dir "
    "snapshot init_from log sample reconstructions"
).split()


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    has_tf32 = ON_GPU and torch.version.cuda is not None  # AMD's TF32 is as inexact as bf16
    add = parser.add_argument_group("the run").add_argument
    add("--epochs", type=int, help="passes over the data; a change can shift the schedule")
    add("--max_steps", type=int, default=0, help="optimizer steps in total; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches per batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="peak learning rate")
    add("--max_grad_norm", type=float, default=0.0, help="clip gradients to this norm; 0: do not")
    add("--precision", choices=DTYPES, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save at each row and when stopped; resume from it")
    add("--init_from", metavar="FILE", help="start from the weights of this snapshot")
    add("--log", metavar="FILE.jsonl", help="append rows, for report.py")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def main(args):
    device = torch.device(torch.accelerator.current_accelerator() if ON_GPU else "cpu")
    set_seeds(args.seed)  # the same random splits in each run
    train_data, val_data = read_data(args)
    if len(train_data) < args.batch_size or len(val_data) < 1:
        sys.exit(f"too few samples: {len(train_data)} for a batch, {len(val_data)} to validate on")
    steps_per_epoch = len(train_data) // args.batch_size  # an incomplete last batch is left out
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    eval_every = args.eval_every or steps_per_epoch

    dtype = DTYPES[args.precision]
    autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    # Time the algorithms of a convolution, and take the fastest. AMD's search takes too long.
    torch.backends.cudnn.benchmark = torch.version.hip is None
    set_seeds(args.seed)  # the same weights in each run
    model = create_model(args, train_data).to(device)
    # Parts that the task has put into eval() stay so. A model that is wholly in eval() is trained.
    resting = [part for part in model.modules() if model.training and not part.training]
    model.train()
    for part in resting:
        part.training = False
    optimizer = create_optimizer(model, args)
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if optimized - {*model.parameters()}:
        sys.exit("the optimizer has parameters that the model has not: put them into the model")
    left_out = [p for p in model.parameters() if p.requires_grad and p not in optimized]
    for parameter in left_out:
        parameter.requires_grad_(False)  # its gradients would add up, and count in the norm
    if left_out:
        print(f"{len(left_out)} parameters are frozen: the optimizer does not have them")
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"] + 0.0  # a copy, since it may be a tensor
        # A snapshot keeps the optimizer's states by place. Sorted, a set's order does not matter.
        group["params"].sort(key=places.get)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if args.snapshot:  # what a resume could not read fails here, before the training
        torch.save([optimizer.state_dict(), args.settings], file := io.BytesIO())
        torch.load(io.BytesIO(file.getvalue()), "cpu", weights_only=True)
    fingerprint = fingerprint_of(train_data, args)
    progress = {"id": f"{time.time_ns():x}", "fingerprint": fingerprint}
    # The steps done, the step of the last row, and the sums of batch_loss since that row.
    progress |= {"step": 0, "row_step": 0, "totals": {}}
    if args.snapshot and os.path.exists(args.snapshot):
        snapshot = torch.load(args.snapshot, "cpu", weights_only=True)
        progress |= snapshot["progress"]
        if progress["fingerprint"] != fingerprint:
            way_out = f"--init_from {args.snapshot} starts anew with its weights"
            sys.exit(f"the training data is not that of {args.snapshot}. {way_out}")
        for name, part in parts.items():
            part.load_state_dict(snapshot.pop(name))  # which frees its memory
    elif args.init_from:
        load_weights(model, fingerprint, args)
    step = first_step = progress["step"]  # the steps done before this start
    compiled_model = torch.compile(model) if args.compile else model

    stop_requests = []

    def note_stop(signum, frame):
        stop_requests.append(signum)
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process at once

    for signum in SIGNALS:
        signal.signal(signum, note_stop)
    Finalize(None, end_workers, exitpriority=0)  # called at exit, also after an error
    for stream in (sys.stdout, sys.stderr):
        stream.write, stream.flush = without_errors(stream.write), without_errors(stream.flush)
    print(f"device {device}, steps {step} to {num_steps}", flush=True)
    requests = training_requests(train_data, step, args)
    batches = load_batches(train_data, requests, device, args)
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds between two prints of the bar
    bar = tqdm(initial=step, total=num_steps, mininterval=pause)
    # The sums of batch_loss since the last row. Names with a slash are the run's own.
    sums = Counter(progress["totals"])
    rows = []  # since the start
    look_step, look_time, next_look = step, time.perf_counter(), step + 1
    is_stopped = False
    mark("start")
    while True:
        is_row = step > progress["row_step"] and (step % eval_every == 0 or step >= num_steps)
        # A look, about once a second: is the loss finite, and has anybody asked the run to stop?
        # Python waits for the GPU only here.
        if is_row or step == next_look:
            totals = {name: float(value) for name, value in sums.items()}  # waits for the GPU
            count_marks(is_warmup=step <= first_step + 3)
            is_stopped = len(stop_requests) > 0
            speed = (step - look_step) / (time.perf_counter() - look_time)  # steps/s
            if not math.isfinite(totals["loss"]):
                sys.exit(f"the loss is not finite at step {step}")
            bar.set_postfix(loss=f"{totals['loss'] / max(1, totals['count']):.4g}", refresh=False)
            if is_row or is_stopped:
                check_weights(model, step)
                progress |= {"step": step, "totals": dict(totals)}
                if args.snapshot:
                    save(parts, progress, train_data, args)
                    mark("save")
                val_totals = {}
                if not is_stopped:  # else the resumed run validates first
                    val_totals = evaluate(model, compiled_model, val_data, device, autocast, args)
                    mark("eval")
                    sums.clear()
                    progress |= {"row_step": step, "totals": {}}
                    if args.snapshot and step >= num_steps:  # a restart does not validate again
                        save(parts, progress, train_data, args)
                        mark("save")
                row = {"run": progress["id"], "step": step, "steps_per_epoch": steps_per_epoch}
                rate = float(optimizer.param_groups[0]["lr"])
                row |= {"epoch": step / steps_per_epoch, "lr": rate}
                rows.append(log_row(row, totals, val_totals, model, device, args))
            # Look after each of the first 3 steps. Later, look again in about a second, but after
            # at most twice as many steps as between the last two looks.
            longest = 2 * (step - look_step) if step >= first_step + 3 else 1
            next_look = step + max(1, min(int(speed), longest))
            look_step, look_time = step, time.perf_counter()
        if is_stopped or step >= num_steps:
            break
        factor = float(learning_rate_factor(args, (step + 1) / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        for micro_step in range(args.grad_accum_steps):
            batch = next(batches)
            set_seeds(args.seed, step, micro_step)  # dropout is the same after a resume
            mark("data")
            with autocast:
                loss, batch_sums = batch_loss(compiled_model, batch, args)
            sums.update(as_tensors(batch_sums))
            mark("forward")
            scaler.scale(loss / args.grad_accum_steps).backward()
            mark("backward")
        if args.max_grad_norm > 0:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).float()
            # The scaler skips steps whose gradients are infinite: their norm does not count.
            sums.update({"/norm": norm.nan_to_num(0, 0, 0), "/steps": norm.isfinite().int()})
        set_seeds(args.seed, step)  # the same in all folders: an optimizer may draw numbers
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mark("optimizer")
        step += 1
        bar.update()

    bar.close()
    print_marks(rows)
    if is_stopped:
        has_saved = args.snapshot and step > first_step  # else a job would be queued again for ever
        print(f"stopped at step {step} of {num_steps}, saved {args.snapshot or 'nothing'}")
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again
    finish(model.eval(), val_data, args, device)


def without_errors(write):
    """Returns this method of a stream without its errors: a closed pipe must not end a training."""

    def try_to_write(*text):
        with contextlib.suppress(OSError):
            write(*text)

    return try_to_write


def end_workers():
    """Kills the workers. They block SIGTERM (see load_batches), so Python would wait forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
    for worker in active_children():
        worker.kill()


def set_seeds(*numbers):
    """Seeds the random numbers of Python, NumPy and PyTorch."""
    seed = hash(numbers) % 2**32  # Python hashes numbers alike in all processes, unlike strings
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer
    if ON_GPU and not torch.utils.data.get_worker_info():
        torch.get_device_module().manual_seed(seed)


def fingerprint_of(data, args):
    """Returns the length of the data, and a checksum of three samples and the first order."""
    samples = Batches(data)[(args.seed,), [0, len(data) // 2, len(data) - 1]]
    samples = [x.tolist() if isinstance(x, torch.Tensor) else x for x in tree_leaves(samples)]
    set_seeds(args.seed, 0)
    order = np.asarray(training_order(data, args, 0))  # of a long one, str() shows both ends
    text = re.sub("at 0x[0-9a-f]+", "", f"{samples} {order}")  # addresses of objects differ
    return [len(data), zlib.crc32(text.encode())]


def check_weights(model, step):
    """Ends the run if the weights are not finite."""
    if not all(p.isfinite().all() for p in model.parameters() if p.requires_grad):
        sys.exit(f"the weights are not finite at step {step}")


def load_weights(model, fingerprint, args):
    """Loads the weights of --init_from, except those whose shape differs, such as a new head's."""
    snapshot = torch.load(args.init_from, "cpu", weights_only=True, mmap=True)
    weights = snapshot["model"]
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    fitting = {name: each for name, each in weights.items() if each.shape == shapes.get(name)}
    others = sorted((shapes.keys() | weights.keys()) - fitting.keys())
    if not fitting:
        sys.exit(f"{args.init_from} has no weights of this model")
    if others:
        print(f"{len(others)} weights do not match {args.init_from}: {', '.join(others):.60}")
    if snapshot.get("progress", {}).get("fingerprint") != fingerprint:
        print(f"{args.init_from} is of another seed or data: are its words and classes the same?")
    model.load_state_dict(fitting, strict=False)


def save(parts, progress, data, args):
    """Writes a temporary file and renames it, so that no snapshot is half written."""
    snapshot = {name: part.state_dict() for name, part in parts.items()}
    snapshot |= {"progress": progress, "settings": args.settings}
    snapshot["classes"] = [str(name) for name in getattr(data, "classes", ())]
    path = os.path.realpath(args.snapshot)  # it may be a link
    with open(f"{path}.tmp", "wb") as file:
        torch.save(snapshot, file)
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def training_requests(data, step, args):
    """Yields seeds, and indices of samples, for each micro-batch from `step` on."""
    steps_per_epoch = len(data) // args.batch_size
    for epoch in itertools.count(step // steps_per_epoch):
        set_seeds(args.seed, epoch)  # a resumed run draws the same order
        order = np.asarray(training_order(data, args, epoch))
        while step < (epoch + 1) * steps_per_epoch:
            start = step % steps_per_epoch * args.batch_size
            share = order[start : start + args.batch_size]
            for indices in share.reshape(args.grad_accum_steps, -1).tolist():
                yield (args.seed, step), indices
            step += 1


class Batches:
    """The batches of a data set. A request is (seeds, indices). The seeds are for augmentation."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, request):
        seeds, indices = request
        set_seeds(*seeds, *indices)
        if not hasattr(self.data, "__getitems__"):
            return default_collate([self.data[index] for index in indices])
        samples = self.data.__getitems__(indices)  # a tuple or dict is a batch already
        return default_collate(samples) if isinstance(samples, list) else samples


def load_batches(data, requests, device, args):
    """Yields a batch on the device for each request."""
    if args.num_workers and len(get_temp_dir()) > 89:  # a socket's path has at most 107 characters
        sys.exit("TMPDIR is too long for workers")
    loader = DataLoader(
        Batches(data),
        batch_size=None,  # each request is a whole batch
        sampler=requests,
        num_workers=args.num_workers or 0,
        multiprocessing_context="fork" if args.num_workers else None,  # shares the data's memory
        pin_memory=HAS_EVENTS,
    )
    # Workers inherit the blocked signals: Slurm signals them, too, and the run still needs them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    batches = iter(loader)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for batch in batches:
        yield tree_map(
            lambda part: to_device(part, device), batch, is_leaf=lambda part: hasattr(part, "to")
        )


def to_device(part, device):
    """Returns a part of a batch on the device. What has no .to stays as it is."""
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    if not hasattr(part, "to"):
        return part
    moved = part.to(device)
    return part if moved is None else moved  # some move in place, and return nothing


def as_tensors(sums):
    """Returns these sums in float32 or int64. In bfloat16 256 + 1 is 256, in bool 1 + 1 is 1."""
    tensors = {name: torch.as_tensor(x).detach() for name, x in sums.items()}
    return {name: x.float() if x.is_floating_point() else x.long() for name, x in tensors.items()}


@torch.no_grad()
def evaluate(model, compiled_model, data, device, autocast, args):
    """Returns the sums of batch_loss over the data."""
    size = args.batch_size // args.grad_accum_steps  # as in training
    share = range(len(data))
    pieces = (share[start : start + size] for start in range(0, len(share), size))
    requests = (((args.seed,), list(piece)) for piece in pieces)
    in_training = [part for part in model.modules() if part.training]
    model.eval()
    sums = Counter()
    for number, batch in enumerate(load_batches(data, requests, device, args)):
        set_seeds(args.seed, number)  # the same in each validation
        with autocast:
            _, batch_sums = batch_loss(compiled_model, batch, args)
        sums.update(as_tensors(batch_sums))
    for part in in_training:
        part.training = True
    return {name: float(value) for name, value in sums.items()}


def log_row(row, totals, val_totals, model, device, args):
    """Appends the row to --log, prints its means, and returns it."""
    if "/norm" in totals:
        row["grad_norm"] = totals.pop("/norm") / max(1, totals.pop("/steps"))
    means = {}
    for split, sums in ("train", totals), ("val", val_totals):
        count = sums.pop("count", 0)  # 0: not validated, or no sample had a label
        means |= {f"{split}_{name}": total / count for name, total in sums.items() if count}
    device_module = torch.get_device_module(device)
    row = vars(args) | row | means
    row |= take_marks(args)
    row |= {
        "script": "/".join(Path(__file__).resolve().parts[-2:]),
        "processes": 1,
        "nodes": 1,
        "rank": 0,
        "host": os.uname().nodename,
        "device": getattr(device_module, "get_device_name", device.type.upper)(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    if args.log:
        with open(args.log, "a") as file:
            file.write(json.dumps(row, default=str) + "\n")
    shown = [*means, "lr", "grad_norm", "seconds", "samples/s"]
    words = [f"{name} {row[name]:.4g}" for name in shown if name in row]
    tqdm.write(textwrap.fill("  ".join([f"step {row['step']}", *words]), 100))
    return row


def check_args(args, world_size):
    """Ends the run if flags do not fit together, files cannot be written, or settings differ."""
    divisor = world_size * args.grad_accum_steps
    if min(divisor, args.batch_size) < 1 or args.batch_size % divisor:
        sys.exit(f"--batch_size must be a multiple of {world_size} x --grad_accum_steps")
    if args.seed < 0:
        sys.exit("--seed must not be negative")
    for path in map(os.path.realpath, filter(None, (args.snapshot, args.log))):
        if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
            sys.exit(f"cannot write {path}: it is a folder, or its folder is missing or read-only")
    args.settings = {}  # the flags that must stay the same, as numbers and strings
    for name, value in vars(args).items():
        if name not in (*MAY_CHANGE, "settings"):
            args.settings[name] = value if isinstance(value, (int, float)) else str(value)
    if args.snapshot and os.path.exists(args.snapshot):
        saved = torch.load(args.snapshot, "cpu", weights_only=True, mmap=True)["settings"]
        for name, value in args.settings.items():
            if saved.get(name, value) != value:
                sys.exit(f"{args.snapshot} was made with --{name} {saved[name]}, not {value}")


# == Where the time goes. To remove it: delete this section, and lines with "mark(" or "marks(". ===

STEP_PHASES = ("data", "forward", "backward", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")  # warmup: the first three steps
TIMES = (*PHASES, "steps")
moments = []  # the one at which the last phase ended
events = []  # (phase, start, end, bytes) since the last look
last_step = []  # the events of the last step, in seconds
times = Counter()  # seconds by phase since the last row


def now():
    """Returns this moment. Python does not wait for the GPU, which notes it when it gets here."""
    moment = torch.Event(enable_timing=True) if HAS_EVENTS else time.perf_counter()
    if HAS_EVENTS:
        moment.record()
    return moment


def mark(phase):
    """Notes that this phase ends here. It began where the one before it ended."""
    moments.append(now())
    if len(moments) > 1:
        events.append((phase, moments.pop(0), moments[0], 0))


def count_marks(is_warmup=False):
    """Adds up the times since the last look. Waits for the GPU."""
    if ON_GPU:
        torch.accelerator.synchronize()

    def seconds(moment):  # since the last mark
        return -moment.elapsed_time(moments[0]) / 1000 if HAS_EVENTS else moment - moments[0]

    step = []
    timed = [(name, seconds(start), seconds(end), size) for name, start, end, size in events]
    events.clear()
    for name, start, end, size in timed:
        if is_warmup:
            times["warmup"] += end - start
            continue
        times[name] += end - start
        step.append((name, start, end, size))
        if name == "optimizer":
            times["steps"] += 1
            last_step[:] = step
            step = []


def take_marks(args):
    """Returns the columns of time and memory. The times start again from 0."""
    count_marks()
    row = {name: times[name] for name in TIMES}
    times.clear()
    if sys.platform == "darwin":
        row["peak_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    else:  # getrusage() would count the memory of the process that has started this one, too
        sizes = re.findall(r"Vm(?:HWM|RSS):\s+(\d+)", Path("/proc/self/status").read_text())  # KiB
        row["peak_MB"] = max(map(int, sizes)) * 1024 / 1e6
    if HAS_EVENTS:
        row["peak_MB"] = torch.accelerator.max_memory_allocated() / 1e6
    return row | speed_of(row, args.batch_size) | {"last_step": list(last_step)}


def speed_of(row, batch_size):
    """Returns all seconds of these times, and the speed of training after the warmup."""
    training = sum(row[phase] for phase in STEP_PHASES)
    speed = batch_size * row["steps"] / training if training else 0.0
    return {"seconds": sum(row[phase] for phase in PHASES), "samples/s": speed}


def print_marks(rows):
    """Prints where the time since the start has gone, and a row for results.md."""
    if not rows:
        return
    total = {name: sum(row[name] for row in rows) for name in TIMES}
    total |= speed_of(total, rows[0]["batch_size"])
    print(f"\ntime by phase since this start, {total['seconds']:.2f} s in all")
    for phase in PHASES:
        share = total[phase] / total["seconds"]
        print(f"{phase:9} {total[phase]:8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(rows[0].get(name, "-")) for name in names}
    floats = {name: value for name, value in rows[-1].items() if isinstance(value, float)}
    results = {name: value for name, value in floats.items() if name.startswith("val_")}
    results |= total | {"peak_MB": max(row["peak_MB"] for row in rows)}
    cells |= {name: f"{value:.4g}" for name, value in results.items()}
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    args = parse_args()
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        sys.exit(f"each task would train alone: use slurm/multinode_{Path(__file__).stem}.slurm")
    check_args(args, 1)
    main(args)
