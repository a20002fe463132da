"""Make a data set for images.py from photographs. It may be larger than memory.

    python singlegpu/make_images.py photos       # photos/CLASS/*.jpg, or photos/train/CLASS/*.jpg
    python singlegpu/images.py --dataset photos --model resnet18                     # trains on it
    python singlegpu/make_images.py zalando-datasets/fashion_mnist --size 28 --grey    # of the hub
    sbatch slurm/singlegpu_make_images.slurm photos --size 224

A source has a folder of images for each class, or such folders in train and in test (or val, valid,
validation). If it has no such split, a tenth of each class is for testing. On the hub, or in a
folder of .parquet files, a source has columns image and label. The script writes
{train,test}_images.npy (N, C, H, W) uint8, {train,test}_labels.npy (N,) int64, and classes.txt, a
name a line. An image is resized until it covers a square, and cropped in the middle. The images are
in random order. Stop it at any time: the same command goes on.
Shapes: N images of a split, C channels (1 or 3), H height, W width.
"""

import argparse
import io
import math
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import escape, glob
from itertools import pairwise

import datasets
import numpy as np
from PIL import Image, ImageOps
from pyarrow.parquet import read_schema
from tqdm import tqdm

SPLITS = ("train", "test", "val", "valid", "validation")
HEADER_SIZE = 128  # bytes of the header of such .npy files
BLOCK_BYTES = 2**26  # of images that are decoded side by side, and then written


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("source", help="folder of images, or name of a data set on the hub")
    add("--size", type=int, default=224, help="height and width of the images, in pixels")
    add("--grey", action="store_true", help="one channel instead of red, green and blue")
    add("--out", metavar="FOLDER", help="folder to write to; if not given, data/NAME_OF_SOURCE")
    args = parser.parse_args()
    args.out = args.out or os.path.join("data", os.path.basename(os.path.abspath(args.source)))
    args.out = os.path.normpath(args.out)  # without a slash at its end
    if os.path.abspath(args.out) == os.path.abspath(args.source):
        parser.error(f"--out: {args.out} is the source itself. Name another folder")
    if args.size < 1:
        parser.error("--size must be at least 1")
    return args


def read_folders(source):
    """Returns {split: rows} of folders of images."""
    splits = datasets.DatasetDict()
    for name in [name for name in SPLITS if os.path.isdir(f"{source}/{name}")] or [""]:
        root = os.path.join(source, name)
        paths = sorted(glob("*/**", root_dir=root, recursive=True))
        paths = [path for path in paths if os.path.isfile(os.path.join(root, path))]
        if not paths and name == "test":  # such as that of a contest, whose labels are secret
            print(f"{root} has no folders of images: left out")
            continue
        if not paths:
            raise ValueError(f"there are no folders of images in {root}")
        labels = [path.split(os.sep)[0] for path in paths]
        if name == "" and any(label.lower() in SPLITS for label in labels):
            raise ValueError(
                f"name the folders of the splits {', '.join(SPLITS)}, in small letters"
            )
        columns = {"image": [os.path.join(root, path) for path in paths], "label": labels}
        splits[name or "train"] = datasets.Dataset.from_dict(columns)
    return splits


def has_label(label):
    """None, NaN, blanks, and -1, the hub's own mark, are no labels."""
    if isinstance(label, str):
        return label.strip() != ""
    return label not in (None, -1) and label == label  # NaN differs from itself


def read_source(source):
    """Returns (images, rows, class numbers) to train on and to test on, and the class names.

    What makes training impossible is found here, before the long part.
    """
    files = sorted(glob(f"{escape(source)}/**/*.parquet", recursive=True))
    if os.path.isdir(source) and not files:
        splits = read_folders(source)
    else:
        schemas = [datasets.Features.from_arrow_schema(read_schema(file)) for file in files]
        names = [getattr(schema.get("label"), "names", None) for schema in schemas]
        for one, other in pairwise(filter(None, names)):  # load_dataset takes those of one file
            if one != other:
                differ = sorted({*one} ^ {*other}) or "their order"
                raise ValueError(f"its files differ in classes: {differ}")
        splits = datasets.load_dataset(source)
    if "train" not in splits:
        raise ValueError(f"it has no split train, only {', '.join(splits)}")
    splits = splits.select_columns(["image", "label"])
    splits = splits.cast_column("image", datasets.Image(decode=False))
    kind = splits["train"].features["label"]
    if not isinstance(kind, (datasets.ClassLabel, datasets.Value)):
        raise ValueError(f"an image needs one label, and here label is {kind}")
    name_of = getattr(kind, "int2str", lambda label: label)
    labels = {}  # of each split, {row: label}
    names = [name for name in SPLITS if name in splits]
    for name in names:
        column = splits[name]["label"][:]
        found = {row: name_of(label) for row, label in enumerate(column) if has_label(label)}
        if len(found) < len(column):
            count = f"{len(column) - len(found):,} of {len(column):,} rows of {name}"
            print(f"{count} have no label (or -1)")
        if found:
            labels[name] = found
    for name in names[:2]:
        if name not in labels and (name == "train" or len(labels) == 1):
            raise ValueError(f"{name} has no labels")
    known = set(labels["train"].values())
    if len(known) == 1:
        raise ValueError(f"all labels of train are the same, {known.pop()}")
    classes = getattr(kind, "names", None) or sorted(known)
    parts = []
    for name in [*labels][:2]:
        here = set(labels[name].values())
        if here - known:
            raise ValueError(f"{name} has classes that train has not: {sorted(here - known)}")
        if known - here:
            print(f"{name} has no image of {sorted(known - here)}")
        rows = np.random.default_rng(0).permutation([*labels[name]])
        numbers = {label: number for number, label in enumerate(classes)}
        parts.append((splits[name], rows, np.array([numbers[labels[name][row]] for row in rows])))
    if len(parts) == 1:
        print(f"no folder or split {' or '.join(SPLITS[1:])}: a tenth of train is for validation")
        images, rows, numbers = parts[0]
        is_test = np.zeros(len(rows), bool)
        for number in np.unique(numbers):
            of_class = np.flatnonzero(numbers == number)
            is_test[of_class[: max(len(of_class) // 10, min(1, len(of_class) - 1))]] = True
        parts = [(images, rows[where], numbers[where]) for where in (~is_test, is_test)]
    return parts, classes


def decode(images, row, args):
    """Returns the image (C, H, W) uint8 of a row, or None, and says why, if it is broken."""
    file = images[row]["image"] or {"path": None, "bytes": b""}
    try:
        with Image.open(
            file["path"] if file["bytes"] is None else io.BytesIO(file["bytes"])
        ) as image:
            image.draft("RGB", (2 * args.size, 2 * args.size))  # decodes a large JPEG at 1/2 to 1/8
            image = ImageOps.exif_transpose(image)  # upright
        if image.mode.startswith("I;16"):  # convert() clips at 255
            image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError("its pixels have 32 bits, of a range that is not known")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = ImageOps.fit(image.convert("L" if args.grey else "RGB"), (args.size, args.size))
    except Exception as error:  # a broken file can fail anywhere
        tqdm.write(f"left out: {file['path'] or f'row {row}'}: {error}")
        return None
    return np.asarray(image).reshape(args.size, args.size, -1).transpose(2, 0, 1)


def write_split(path, images, rows, labels, args):
    """Writes these rows of a split and their labels, and goes on where an earlier run stopped.

    A block's labels, -1 for a broken image, are written after its images: they say what is done.
    """
    shape = (1 if args.grey else 3, args.size, args.size)
    with (
        open(f"{path}_images.npy", "ab") as file,
        open(f"{path}_labels.tmp", "ab") as label_file,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        tqdm(total=len(rows), desc=os.path.basename(path)) as bar,
    ):
        done = np.fromfile(f"{path}_labels.tmp", np.int64)
        end = HEADER_SIZE + (done >= 0).sum() * math.prod(shape)
        fits = len(done) <= len(rows) and ((done == -1) | (done == labels[: len(done)])).all()
        if not fits or (len(done) > 0 and file.tell() < end):
            sys.exit(f"{path}_*: these files are not of this source: remove their folder")
        file.truncate(end)  # leaves room for the header, which is written at last
        label_file.truncate(done.nbytes)
        bar.update(len(done))
        block_size = min(256, max(16, BLOCK_BYTES // math.prod(shape)))
        while len(done) < len(rows):
            block = slice(len(done), len(done) + block_size)
            decoded = pool.map(lambda row: decode(images, row, args), rows[block].tolist())
            decoded = list(decoded)
            kept = np.array([image for image in decoded if image is not None])
            if len(done) == 0 and len(kept) == 0:
                sys.exit(f"{path}: none of the first {len(decoded)} images could be read")
            if len(done) == 0 and len(kept) >= 16 and np.ptp(kept) < 16:
                levels = f"between {kept.min()} and {kept.max()}, of 0 to 255"
                sys.exit(f"{path}: all pixels of the first {len(kept)} images are {levels}")
            file.write(kept)
            file.flush()
            is_broken = [image is None for image in decoded]
            done = np.append(done, np.where(is_broken, -1, labels[block]))
            label_file.write(done[block])
            signal.signal(signal.SIGUSR2, lambda *_: sys.exit(os.EX_TEMPFAIL))  # 75: run me again
            label_file.flush()
            bar.update(len(decoded))
    kept = done[done >= 0]
    with open(f"{path}_images.npy", "r+b") as file:
        facts = {"descr": "|u1", "fortran_order": False, "shape": (len(kept), *shape)}
        np.lib.format.write_array_header_1_0(file, facts)
    np.save(f"{path}_labels.npy", kept)
    print(f"{path}: {len(kept):,} images, {len(rows) - len(kept):,} broken ones left out")


def main(args):
    if os.path.exists(args.out):
        sys.exit(f"{args.out} is there already: remove it or choose another --out")
    try:
        parts, classes = read_source(args.source)
    except Exception as error:  # a damaged or foreign source can fail anywhere
        sys.exit(f"cannot read {args.source}: {' '.join(str(error).split())}")
    unfinished = f"{args.out}.{args.size}{'grey' if args.grey else 'rgb'}.tmp"
    os.makedirs(unfinished, exist_ok=True)
    with open(f"{unfinished}/classes.txt", "w") as file:
        file.writelines(f"{name}\n" for name in classes)
    for name, part in zip(("test", "train"), reversed(parts)):  # the shorter one first
        write_split(f"{unfinished}/{name}", *part, args)
    os.rename(unfinished, args.out)
    for name in ("train", "test"):
        os.remove(f"{args.out}/{name}_labels.tmp")


if __name__ == "__main__":
    main(parse_args())
