"""Image segmentation: a class for each pixel. Where a mask is 255, nobody has labelled the pixel.

PHOTOS/train and PHOTOS/val hold images/NAME.jpg, or .png, and masks/NAME.png, in which each pixel
is the number of its class. If you augment, do it in the Photos of train alone.
"""

from torch.utils.data import Dataset

NO_LABEL = 255


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--photos", help="folder of images and masks; made up if it is not given")
    parser.add_argument("--num_classes", type=int, default=3, help="masks have 0 to this - 1")
    parser.add_argument("--image_size", type=int, default=64, help="a multiple of 4")
    return parse_run_args(parser, epochs=2, batch_size=12, learning_rate=3e-3)


class Photos(Dataset):
    """Images (3, H, W) uint8 and their masks (H, W) of class numbers."""

    def __init__(self, folder, size):
        self.size = (size, size)
        images = {path.stem: path for path in sorted(Path(folder, "images").iterdir())}
        self.masks = sorted(Path(folder, "masks").glob("*.png"))
        self.images = [images[mask.stem] for mask in self.masks]

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, index):
        image = Image.open(self.images[index])
        if image.mode[0] in "IF":  # convert() would make all values above 255 white
            raise ValueError(f"{self.images[index]} has more than 8 bits a pixel: convert it first")
        image = ImageOps.exif_transpose(image).convert("RGB")  # upright
        mask = Image.open(self.masks[index])
        if image.size != mask.size:  # such as where the mask was drawn on a photo that lay
            raise ValueError(f"{self.masks[index]} and its image differ in height or width")
        mask = np.array(mask.resize(self.size, Image.NEAREST), np.int64)
        image = torch.from_numpy(np.array(image.resize(self.size)))
        return image.permute(2, 0, 1), torch.from_numpy(mask)


def squares(count, size):
    """Returns images of noise with a square of class 1 or 2. Nobody labelled what is below it."""
    images = torch.randint(128, (count, 3, size, size), dtype=torch.uint8)
    masks = torch.zeros(count, size, size, dtype=torch.int64)
    for image, mask in zip(images, masks):
        kind, top, left = (1 + torch.randint(size // 2, (3,))).tolist()
        square = np.s_[top : top + size // 3, left : left + size // 3]
        image[kind % 2][square] += 100
        mask[square] = 1 + kind % 2
        mask[top + size // 3 :] = NO_LABEL
    return TensorDataset(images, masks)


def read_data(args):
    if args.photos:
        return [Photos(f"{args.photos}/{split}", args.image_size) for split in ("train", "val")]
    return squares(480, args.image_size), squares(96, args.image_size)


def block(num_inputs, num_outputs):
    """GroupNorm, as BatchNorm has other statistics in each process."""
    convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(4, num_outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.down = nn.ModuleList([block(3, 16), block(16, 32)])
        self.bottom = block(32, 64)
        self.up = nn.ModuleList([block(64 + 32, 32), block(32 + 16, 16)])
        self.head = nn.Conv2d(16, num_classes, 1)

    def forward(self, x):  # (B, 3, H, W)
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up in self.up:
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)  # (B, K, H, W)


def create_model(args, data):
    return UNet(args.num_classes)


def batch_loss(model, batch, args):
    """Divides the sum over labelled pixels by the number of all pixels.

    That number is the same in all processes, that of labelled pixels is not. Where most have no
    label, the loss is small, and SGD needs a larger rate. Rows show means over labelled pixels.
    """
    images, masks = batch
    logits = model(images.float() / 255)
    loss = nn.functional.cross_entropy(logits, masks, ignore_index=NO_LABEL, reduction="sum")
    correct = (logits.argmax(1) == masks).sum()  # never where there is no label
    return loss / masks.numel(), {"loss": loss, "acc": correct, "count": (masks != NO_LABEL).sum()}
