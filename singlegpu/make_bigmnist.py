"""Make bigMNIST, a data set larger than memory: MNIST, augmented into several versions, the whole copied many times.

    python singlegpu/make_bigmnist.py                                         # 72,000,000 images, 56.5 GB, of MNIST
    python singlegpu/make_bigmnist.py --copies 10 --dataset synthetic         # 2.8 GB, and nothing to download
    sbatch slurm/singlegpu_make_bigmnist.slurm --versions 2 --copies 25
    python singlegpu/images.py --dataset bigmnist --num_workers 2             # trains on it

In --out stand train_images.npy (N, 28, 28) uint8, train_labels.npy (N,) uint8, test_images.npy and test_labels.npy,
for numpy.load(file, mmap_mode="r"). N = copies x versions x images; the images of the test split are not augmented.
The same seed gives the same bytes on any number of CPU cores or of GPUs. Stop it at any time: the same command goes on.
Shapes: B images of a block, H height, W width, both 28.
"""
import argparse
import fcntl
import io
import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torchvision import datasets
from torchvision.transforms.v2 import functional as v2
from tqdm import tqdm

NUM_CLASSES = 10
BLOCK = 1000  # images that share a stream of random numbers, and are augmented together
WRITE = 1 << 23  # bytes that are copied at once
FIXED = ("dataset", "versions", "copies", "num_images", "seed")  # what a run that goes on may not change


def parse_args():
    parser = argparse.ArgumentParser(description="Make bigMNIST: MNIST augmented, and copied until it is large.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--dataset", choices=("mnist", "synthetic"), default="mnist", help="images; synthetic needs no download")
    add("--data_dir", default="data", help="folder that holds, or receives, MNIST")
    add("--versions", type=int, default=6, help="times that the training images are augmented, each time otherwise")
    add("--copies", type=int, default=200, help="times that all versions stand in the file")
    add("--num_images", type=int, default=60_000, help="training images to take")
    add("--seed", type=int, default=1, help="of the augmentation")
    add("--threads", type=int, help="CPU threads, each with blocks of its own; all cores if not given")
    add("--out", metavar="FOLDER", default="data/bigmnist", help="folder to make; images.py finds it in its --data_dir")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int) and value < (name != "seed"):
            fail(f"--{name} {value} is out of range")
    args.out = os.path.abspath(args.out)
    return args


def fail(message):
    """End on a user's mistake: one line on stderr, exit status 2."""
    print(f"{sys.argv[0]}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def synthetic_images(num_images, seed):
    """Ten smooth random patterns, one a class, shifted by up to 3 pixels, under noise: (N, H, W) uint8, (N,) int64."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(NUM_CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=34, mode="bilinear")[:, 0].mul(80).byte()
    shifted = patterns.unfold(1, 28, 1).unfold(2, 28, 1)  # (K, 7, 7, H, W)
    labels, dy, dx = (torch.randint(high, (num_images,), generator=generator) for high in (NUM_CLASSES, 7, 7))
    noise = torch.empty(num_images, 28, 28, dtype=torch.uint8).random_(0, 176, generator=generator)
    return shifted[labels, dy, dx] + noise, labels


def read_mnist(args):
    """The training and the test split: images (N, H, W) uint8 and labels (N,) uint8."""
    splits = []
    try:
        for train, size in ((True, 60_000), (False, 10_000)):
            if args.dataset == "synthetic":
                images, labels = synthetic_images(size, seed=size)
            else:
                split = datasets.MNIST(args.data_dir, train, download=True)
                images, labels = split.data, split.targets
            splits.append((images.numpy(), labels.numpy().astype(np.uint8)))
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"--dataset {args.dataset}: {' '.join(str(error).split())}; remove what is damaged in {args.data_dir} and "
             f"run this where there is internet (a login node)")
    if args.num_images > len(splits[0][1]):
        fail(f"--num_images {args.num_images} exceeds the {len(splits[0][1])} training images")
    return [[array[:args.num_images] for array in splits[0]], splits[1]]


def augment(images, random, device):
    """The images (B, H, W) uint8, each flipped or not, rotated, sheared, scaled, shifted and bent, by chance.

    What v2.RandomHorizontalFlip, v2.RandomAffine(15, (2 / 28, 2 / 28), (0.9, 1.1), 10) and v2.ElasticTransform() do one
    after the other, but they draw once a batch: here each image has numbers of its own, and is interpolated once.
    Elastic deformation: Simard, Steinkraus and Platt 2003, "Best practices for convolutional neural networks".
    """
    count, size = images.shape[:2]
    strengths, noise = (torch.from_numpy(random.random(shape, np.float32)).to(device) * 2 - 1  # in [-1, 1)
                        for shape in ((6, count), (count, 2, size, size)))
    angle, shear, scale, dx, dy, flip = strengths
    return warp(images, 15 * angle, 10 * shear, 1 + 0.1 * scale, 2 * torch.stack((dx, dy), 1), flip > 0, noise)


def warp(images, angle, shear, scale, shift, flip, noise):
    """The images (B, H, W) uint8, each by an angle and a shear in degrees (B,), a scale (B,), a shift in pixels (B, 2).

    flip (B,) says which are flipped before; noise (B, 2, H, W) in [-1, 1], blurred by 5 pixels, times 50, bends them.
    """
    size = images.shape[-1]
    angle, shear = angle.deg2rad(), shear.deg2rad()
    # From a place in the result to one in the image, in half sides: rotation and shear turned round, the flip last.
    matrix = torch.stack((angle.cos() - angle.sin() * shear.tan(), angle.sin() + angle.cos() * shear.tan(),
                          -angle.sin(), angle.cos()), 1).view(-1, 2, 2) / scale[:, None, None]
    matrix[:, 0] *= torch.where(flip, -1, 1)[:, None]
    blur = v2.gaussian_blur(torch.eye(size, device=angle.device)[None], [8 * 5 + 1, 1], [5.0, 5.0])[0]
    bend = blur.T @ noise @ blur * (50 / size)  # (B, 2, H, W)
    places = (torch.arange(size, device=angle.device) * 2 + 1) / size - 1
    places = torch.stack((places.expand(size, size), places[:, None].expand(size, size)))  # (2, H, W): x, y
    places = (places + bend - 2 / size * shift[:, :, None, None]).flatten(2)  # (B, 2, H W)
    grid = (matrix @ places).transpose(1, 2).unflatten(1, (size, size))  # (B, H, W, 2)
    images = torch.from_numpy(images).to(angle.device)[:, None].float()
    return F.grid_sample(images, grid, align_corners=False)[:, 0].round().byte().cpu().numpy()


def write_images(path, images, args):
    """Write all versions of the images (N, H, W), then copies of them, behind what an earlier run has written."""
    header = io.BytesIO()
    shape = args.copies * args.versions * len(images), *images.shape[1:]
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    header, first_copy = header.getvalue(), args.versions * images.nbytes
    blocks = -(-len(images) // BLOCK)  # of a version; its last may be smaller
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    threads = args.threads or len(os.sched_getaffinity(0))

    def make(number):
        version, block = divmod(number, blocks)
        random = np.random.default_rng((args.seed, version, block))
        return augment(images[block * BLOCK:(block + 1) * BLOCK], random, devices[number % len(devices)])

    with open(path, "ab") as file, ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool:
        if file.tell() < len(header):
            file.truncate(0)
            file.write(header)
        written = file.tell() - len(header)
        version, rest = divmod(written, images.nbytes)
        done = version * blocks + rest // images[:BLOCK].nbytes
        if done < args.versions * blocks:  # without the half of a block that may stand at the end
            written = version * images.nbytes + done % blocks * images[:BLOCK].nbytes
            file.truncate(len(header) + written)
        bar = {"unit_scale": True, "mininterval": 0.5 if sys.stderr.isatty() else 30}
        count, begun = (size // images[0].nbytes for size in (first_copy, min(written, first_copy)))
        start_time = time.perf_counter()
        with tqdm(None, "augmented", count, initial=begun, unit="images", **bar) as progress:
            for start in range(done, args.versions * blocks, 16 * threads):  # a few at a time: they wait in memory
                for block in pool.map(make, range(start, min(start + 16 * threads, args.versions * blocks))):
                    file.write(block)
                    progress.update(len(block))
        file.flush()
        seconds, start_time = time.perf_counter() - start_time, time.perf_counter()
        print(f"augmented {count - begun:,} images in {seconds:.1f} s: {(count - begun) / seconds:,.0f} images/s")
        size, begun = args.copies * first_copy, file.tell() - len(header)
        source = np.memmap(path, np.uint8, "r", len(header), first_copy)
        with tqdm(None, "copied", size, initial=begun, unit="B", **bar) as progress:
            while (place := file.tell() - len(header)) < size:
                progress.update(file.write(source[place % first_copy:][:min(WRITE, size - place)]))
            os.fsync(file.fileno())
        seconds, gigabytes = time.perf_counter() - start_time, (size - begun) / 1e9
        print(f"copied {gigabytes:.2f} GB in {seconds:.1f} s, with fsync: {gigabytes * 1000 / seconds:,.0f} MB/s")


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGUSR2, lambda signum, frame: sys.exit(128 + signum))  # Slurm's, before the time is up
    if os.path.exists(args.out):
        fail(f"--out {args.out} is there already: remove it, or take another")
    (train_images, train_labels), (test_images, test_labels) = read_mnist(args)
    work, repeats = args.out + ".tmp", args.copies * args.versions
    try:
        os.makedirs(work, exist_ok=True)
        with open(f"{work}/arguments.json", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            arguments = json.dumps({name: getattr(args, name) for name in FIXED})
            file.seek(0)
            if (begun := file.read()) not in ("", arguments):
                fail(f"{work} was begun with other arguments, {begun}: take these, or remove it")
            missing = repeats * (train_images.nbytes + train_labels.nbytes) + test_images.nbytes + test_labels.nbytes
            missing -= sum(entry.stat().st_size for entry in os.scandir(work))
            if missing > (free := shutil.disk_usage(work).free):
                fail(f"{missing / 1e9:.1f} GB are to be written to {work}, and {free / 1e9:.1f} GB are free")
            if not begun:
                file.write(arguments)
                file.flush()
            np.save(f"{work}/test_images.npy", test_images)
            np.save(f"{work}/test_labels.npy", test_labels)
            np.save(f"{work}/train_labels.npy", np.tile(train_labels, repeats))
            write_images(f"{work}/train_images.npy", train_images, args)
            os.rename(work, args.out)
    except BlockingIOError:
        fail(f"another process is at work in {work}")
    except OSError as error:
        fail(f"{error}; what {work} holds stays, if it is there: once this is mended, the same command goes on")
    except KeyboardInterrupt:
        sys.exit(f"stopped; what {work} holds stays: the same command goes on")
    print(f"{args.out}: {repeats * len(train_images):,} training and {len(test_images):,} test images")


if __name__ == "__main__":
    main(parse_args())
