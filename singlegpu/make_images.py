"""Make a data set for images.py from photographs. It may be larger than memory.

    python singlegpu/make_images.py photos       # photos/CLASS/*.jpg, or photos/train/CLASS/*.jpg
    python singlegpu/images.py --dataset photos --model resnet18                     # trains on it
    python singlegpu/make_images.py ylecun/mnist --size 28 --grey      # of the Hugging Face hub
    sbatch slurm/singlegpu_make_images.slurm photos --size 224

A source has a folder of images for each class, or such folders in train and in test (or val). If it
has no test split, a tenth of the images is for testing. On the hub, or in a folder of .parquet
files, a source has columns image and label. The script writes {train,test}_images.npy (N, C, H, W)
uint8, {train,test}_labels.npy (N,) int64, and classes.txt, a name a line. An image is resized until
it covers a square, and cropped in the middle. The images are in random order. Stop it at any time:
the same command goes on.
Shapes: N images of a split, C channels (1 or 3), H height, W width.
"""

import argparse
import io
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

import datasets
import numpy as np
from PIL import Image, ImageOps
from torchvision.datasets import ImageFolder
from tqdm import tqdm

BLOCK_SIZE = 256  # images that are decoded side by side, and then written


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("source", help="folder of images, or name of a data set on the hub")
    add("--size", type=int, default=224, help="height and width of the images, in pixels")
    add("--grey", action="store_true", help="one channel instead of red, green and blue")
    add("--out", metavar="FOLDER", help="folder to write to; if not given, data/NAME_OF_SOURCE")
    args = parser.parse_args()
    args.out = args.out or os.path.join("data", os.path.basename(os.path.normpath(args.source)))
    if args.size < 1:
        parser.error("--size must be at least 1")
    return args


def read_source(source):
    """Returns the images (path, label), or rows of the hub, of each split, and the class names."""
    if os.path.isdir(source) and not glob(f"{source}/**/*.parquet", recursive=True):
        names = [name for name in ("train", "test", "val") if os.path.isdir(f"{source}/{name}")]
        folders = [ImageFolder(f"{source}/{name}") for name in names] or [ImageFolder(source)]
        if folders[0].classes != folders[-1].classes:
            raise ValueError("train and test have different classes")
        return [folder.samples for folder in folders[:2]], folders[0].classes
    data = datasets.load_dataset(source).cast_column("image", datasets.Image(decode=False))
    splits = [data[name] for name in ("train", "test", "validation") if name in data]
    return splits[:2], splits[0].features["label"].names


def decode(row, args):
    """Returns an image (C, H, W) uint8 and its label, or None and -1 if the image is broken."""
    if isinstance(row, dict):  # of the hub
        path, label = row["image"]["path"], row["label"]
        content = row["image"]["bytes"]  # None if it is only in the file
    else:
        path, label = row
        content = None
    try:
        file = io.BytesIO(content) if content else path
        with Image.open(file) as image:
            image.draft("RGB", (2 * args.size, 2 * args.size))  # decodes a large JPEG at 1/2 to 1/8
            image = ImageOps.exif_transpose(image).convert("L" if args.grey else "RGB")
            image = ImageOps.fit(image, (args.size, args.size))  # resizes and crops
    except Exception as error:  # a broken file can fail anywhere
        tqdm.write(f"left out: {path}: {error}")
        return None, -1
    return np.asarray(image).reshape(args.size, args.size, -1).transpose(2, 0, 1), label


def write_split(path, images, order, args):
    """Writes a split's images and labels in this order, and goes on where an earlier run stopped.

    A block's labels, -1 for a broken image, are written after its images: they say what is done.
    """
    shape = (1 if args.grey else 3, args.size, args.size)
    for name in (f"{path}_images.npy", f"{path}_labels.tmp"):
        open(name, "ab").close()  # it exists from now on
    labels = np.fromfile(f"{path}_labels.tmp", np.int64).tolist()
    bar = tqdm(total=len(order), initial=len(labels), desc=os.path.basename(path))
    with (
        open(f"{path}_images.npy", "r+b") as file,
        open(f"{path}_labels.tmp", "ab") as label_file,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        facts = {"descr": "|u1", "fortran_order": False, "shape": (len(order), *shape)}
        np.lib.format.write_array_header_1_0(file, facts)
        file.seek((len(labels) - labels.count(-1)) * math.prod(shape), os.SEEK_CUR)
        file.truncate()
        while len(labels) < len(order):
            numbers = order[len(labels) : len(labels) + BLOCK_SIZE].tolist()
            for image, label in pool.map(lambda number: decode(images[number], args), numbers):
                labels.append(label)
                if image is not None:
                    file.write(image.tobytes())
            file.flush()
            label_file.write(np.array(labels[-len(numbers) :]).tobytes())
            label_file.flush()
            bar.update(len(numbers))
        kept = [label for label in labels if label >= 0]
        file.seek(0)
        facts["shape"] = (len(kept), *shape)
        np.lib.format.write_array_header_1_0(file, facts)  # as long as before: numpy leaves room
    if not kept:
        sys.exit(f"{path}: no image could be read")
    np.save(f"{path}_labels.npy", kept)
    bar.close()
    print(f"{path}: {len(kept):,} images, {len(labels) - len(kept):,} broken ones left out")


def main(args):
    if os.path.exists(args.out):
        sys.exit(f"{args.out} is there already: remove it or choose another --out")
    try:
        splits, classes = read_source(args.source)
    except Exception as error:  # a damaged or foreign source can fail anywhere
        sys.exit(f"cannot read {args.source}: {error}")
    orders = [np.random.default_rng(0).permutation(len(images)) for images in splits]
    if len(splits) == 1:
        splits *= 2
        orders = np.split(orders[0], [-math.ceil(len(orders[0]) / 10)])
    unfinished = f"{args.out}.{args.size}{'grey' if args.grey else 'rgb'}.tmp"
    os.makedirs(unfinished, exist_ok=True)
    for name, images, order in zip(("train", "test"), splits, orders):
        write_split(f"{unfinished}/{name}", images, order, args)
    with open(f"{unfinished}/classes.txt", "w") as file:
        file.writelines(f"{name}\n" for name in classes)
    for name in ("train", "test"):
        os.remove(f"{unfinished}/{name}_labels.tmp")
    os.rename(unfinished, args.out)


if __name__ == "__main__":
    main(parse_args())
