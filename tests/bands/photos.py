"""Photographs in folders: ImageFolder, augmentation, BatchNorm. The folder is --photos."""

from torchvision.transforms import v2

COLUMNS = "epoch train_loss train_acc val_loss val_acc seconds samples/s".split()
METRIC = "val_acc"
SAME_ON_RESUME = ("photos", "batch_size", "learning_rate", "precision", "seed")
MAX_GRAD_NORM = None


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--photos")
    return parse_run_args(parser, epochs=2, batch_size=12)


def read_data(args):
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    augment = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *to_tensor])
    resize = v2.Compose([v2.Resize((32, 32)), *to_tensor])
    train_data, _ = torch.utils.data.random_split(
        datasets.ImageFolder(args.photos, augment), [0.8, 0.2]
    )
    return train_data, datasets.ImageFolder(args.photos, resize)


def training_order(data, args, epoch):
    return torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed + epoch))


def create_model(args, data):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, len(data.dataset.classes)),
    )


def create_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate)


def learning_rate(args, done):
    return args.learning_rate


def batch_loss(model, batch, args):
    images, labels = batch
    logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels)
    correct = (logits.argmax(1) == labels).sum()
    return loss, {"loss": loss * len(labels), "acc": correct, "count": len(labels)}


def more_columns(row):
    return {}


def finish(model, data, args, device):
    print("predicted", model(data[0][0][None].to(device)).argmax().item())
