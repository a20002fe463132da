"""Make bigMNIST, a data set larger than memory: augmented versions of MNIST, copied many times.

    python singlegpu/make_bigmnist.py                                  # 72,000,000 images, 56.5 GB
    sbatch slurm/singlegpu_make_bigmnist.slurm --versions 2 --copies 25
    python singlegpu/images.py --dataset data/bigmnist                 # trains on it

It writes train_images.npy (N, 28, 28) uint8, train_labels.npy (N,) uint8, test_images.npy and
test_labels.npy to --out. The test images are those of MNIST, not augmented. Stop it at any time:
the same command goes on.
Shapes: N images, B images of a block, H height, W width (both 28).
"""

import argparse
import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn
from torchvision import datasets
from torchvision.transforms.v2 import functional as v2
from tqdm import tqdm

BATCH = 1000  # images that are augmented together, with random numbers of their own


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data_dir", default="data", help="folder of MNIST, downloaded if missing")
    add("--num_images", type=int, default=60_000, help="training images to take")
    add("--versions", type=int, default=6, help="augmented versions of each image")
    add("--copies", type=int, default=200, help="how often the file repeats all versions")
    add("--out", metavar="FOLDER", default="data/bigmnist", help="folder to write to")
    return parser.parse_args()


def read_split(args, train):
    """Returns images (N, H, W) uint8 and labels (N,) uint8."""
    source = datasets.MNIST(args.data_dir, train, download=True)
    return source.data.numpy(), source.targets.numpy().astype(np.uint8)


def augment(images, seed, device):
    """Flips half of the images (B, H, W) uint8; rotates, shears, scales, shifts and bends all.

    The ranges are those of v2.RandomAffine(15, (2 / 28, 2 / 28), (0.9, 1.1), 10). The bending is
    that of v2.ElasticTransform() (Simard, Steinkraus and Platt 2003). Both draw random numbers
    once for a batch; here each image has numbers of its own.
    """
    count, size = len(images), images.shape[-1]
    generator = np.random.default_rng(seed)

    def draw(*shape):
        """Returns random numbers from -1 to 1."""
        return torch.from_numpy(generator.uniform(-1, 1, shape)).float().to(device)

    turn, skew, zoom, side, *shifts = draw(6, count)
    noise = draw(count, 2, size, size)
    sin, cos = (15 * turn).deg2rad().sin(), (15 * turn).deg2rad().cos()
    shear = (10 * skew).deg2rad().tan()
    scale = 1 + 0.1 * zoom
    flip = side.sign()
    # The grid says where in the image each pixel of the result comes from, in [-1, 1].
    matrix = torch.zeros(count, 2, 3, device=device)
    matrix[:, 0, 0] = flip * (cos - sin * shear) / scale
    matrix[:, 0, 1] = flip * (sin + cos * shear) / scale
    matrix[:, 1, 0] = -sin / scale
    matrix[:, 1, 1] = cos / scale
    matrix[:, :, 2] = 2 * 2 / size * torch.stack(shifts, dim=1)  # up to 2 pixels
    grid = nn.functional.affine_grid(matrix, (count, 1, size, size), align_corners=False)
    # A blur is linear in rows and in columns: two matrix products are faster than a convolution.
    pixels = torch.eye(size, device=device)[None]
    blur = v2.gaussian_blur(pixels, [41, 1], [5.0, 5.0])[0]
    bend = blur.T @ noise @ blur * (50 / size)  # (B, 2, H, W)
    grid = grid + bend.permute(0, 2, 3, 1)
    images = torch.from_numpy(images).to(device)
    images = images[:, None].float()  # (B, 1, H, W)
    images = nn.functional.grid_sample(images, grid, align_corners=False)
    return images[:, 0].round().byte().cpu().numpy()


def write_images(path, images, args):
    """Writes --versions augmented versions of the images (N, H, W), then copies of them all.

    The file is written from front to back, so its length says how far an earlier run has come.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    total = args.copies * args.versions
    facts = {"descr": "|u1", "fortran_order": False, "shape": (total * len(images), 28, 28)}
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, facts)
    header = buffer.getvalue()

    def augment_block(version, start):
        block = images[start : start + BATCH]
        return augment(block, (version, start), device)

    with open(path, "a+b") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        file.seek(0)
        if file.read(len(header)) != header:
            file.truncate(0)
            file.write(header)
            file.flush()
        done = (os.path.getsize(path) - len(header)) // images.nbytes  # whole versions
        file.truncate(len(header) + done * images.nbytes)
        for number in tqdm(range(done, total), "versions", total, initial=done, mininterval=1):
            if number < args.versions:
                starts = range(0, len(images), BATCH)
                for block in pool.map(augment_block, [number] * len(starts), starts):
                    file.write(block)
                file.flush()
            else:
                offset = len(header) + (number % args.versions) * images.nbytes
                file.write(np.memmap(path, np.uint8, "r", offset, images.shape))
            signal.signal(signal.SIGUSR2, lambda *_: sys.exit(os.EX_TEMPFAIL))  # 75: go on here


def main(args):
    if os.path.exists(args.out):
        sys.exit(f"{args.out} is there already: remove it or choose another --out")
    torch.set_num_threads(1)  # the blocks run side by side
    images, labels = [part[: args.num_images] for part in read_split(args, train=True)]
    test_images, test_labels = read_split(args, train=False)
    settings = f"{args.num_images}x{args.versions}x{args.copies}"  # other ones start anew
    unfinished = f"{os.path.normpath(args.out)}.{settings}.tmp"
    os.makedirs(unfinished, exist_ok=True)
    np.save(f"{unfinished}/test_images.npy", test_images)
    np.save(f"{unfinished}/test_labels.npy", test_labels)
    np.save(f"{unfinished}/train_labels.npy", np.tile(labels, args.copies * args.versions))
    write_images(f"{unfinished}/train_images.npy", images, args)
    os.rename(unfinished, args.out)
    print(f"{args.out}: {args.copies * args.versions * len(images):,} training images")


if __name__ == "__main__":
    main(parse_args())
