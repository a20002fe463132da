"""Train a network on MNIST with one GPU or, if there is none, with the CPU.

    python singlegpu/mnist.py --epochs 5    # or, without any data, --synthetic

Compare it with the others by `diff`. images.py adds snapshots, mixed precision, workers, logs.
"""

import argparse
import os
import time  # for mark()

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchvision.datasets import MNIST

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker


def read_data(args, train):
    """Returns images (N, 28, 28) float32, in which 0 is black, and their labels (N,)."""
    if args.synthetic:
        labels = torch.randint(10, (60_000 if train else 10_000,))
        bright_row = nn.functional.one_hot(labels, 28)[:, :, None]  # (N, 28, 1), 1 in row `label`
        return TensorDataset(torch.rand(len(labels), 28, 28).square() + 0.25 * bright_row, labels)
    mnist = MNIST(args.data_dir, train, download=True)  # downloads what is missing
    return TensorDataset(mnist.data / 255, mnist.targets)


def main(args):
    device = torch.device(0 if ON_GPU else "cpu")
    torch.manual_seed(1)  # the same weights (and made-up images) in each run
    train_data, val_data = read_data(args, train=True), read_data(args, train=False)
    if args.epochs < 1 or not 1 <= args.batch_size <= len(train_data):
        raise SystemExit(f"needs --epochs >= 1, and --batch_size from 1 to {len(train_data)}")
    val_images, val_labels = [x.to(device) for x in val_data.tensors]
    sampler = RandomSampler(train_data, generator=torch.Generator())  # the same order as multigpu's
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)  # the indices of each batch
    # A batch is train_data[[7, 2, ...]]. Your own Dataset: DataLoader(data, batch_sampler=batches)
    loader = DataLoader(train_data, batch_size=None, sampler=batches, pin_memory=ON_GPU)
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = nn.Sequential(nn.Flatten(), *layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    print(f"device {device}, {len(loader)} steps an epoch", flush=True)
    for epoch in range(args.epochs):
        marks.clear()  # only the last epoch's times are printed: the first epoch is slower
        mark("start")
        sampler.generator.manual_seed(epoch)  # a new order in each epoch
        loss_sum = torch.zeros((), device=device)
        for batch in loader:
            images, labels = [x.to(device, non_blocking=True) for x in batch]
            mark("data")
            loss = nn.functional.cross_entropy(model(images), labels)
            mark("forward")
            loss.backward()
            mark("backward")
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()  # loss.item() would make Python wait for the GPU
            mark("optimizer")
        with torch.no_grad():  # with dropout: model.eval() before it, and model.train() after it
            val_acc = (model(val_images).argmax(1) == val_labels).sum() / len(val_data)
        mark("eval")
        print(f"epoch {epoch}: train_loss {loss_sum / len(loader):.4f}, val_acc {val_acc:.4f}")
    torch.save(model.state_dict(), "mnist.pt")  # for quantize/mnist.py
    print_marks(f"| singlegpu | 1 | {args.batch_size} | {val_acc:.4f} |")


# == Where the time goes. To remove it, delete this section, and each line with "mark". ==========
marks = []  # (phase, the moment at which it ended)


def mark(phase):
    """Notes that this phase of a step ends here. Python does not wait for the GPU."""
    moment = torch.Event(enable_timing=True) if ON_GPU else time.perf_counter()
    if ON_GPU:
        moment.record()  # queued like all work: the GPU notes the time when it gets here
    marks.append((phase, moment))


def print_marks(row, head="| script | processes | batch_size | val_acc |"):
    """Prints the last epoch's seconds by phase, and a row of them for results.md."""
    seconds = dict.fromkeys([phase for phase, _ in marks[1:]], 0.0)
    for (_, start), (phase, end) in zip(marks, marks[1:]):
        seconds[phase] += start.elapsed_time(end) / 1000 if ON_GPU else end - start  # from ms
    seconds["total"] = sum(seconds.values())
    for phase, value in seconds.items():
        print(f"{phase:9} {value:8.3f} s {value / seconds['total']:4.0%}")
    print(head, " | ".join(seconds), "|")
    print(row, *[f"{value:.3f} |" for value in seconds.values()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--synthetic", action="store_true", help="make up images: no data needed")
    parser.add_argument("--data_dir", default="data", help="folder of MNIST, which is downloaded")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=240, help="images per step")
    if max(int(os.environ.get(x, 1)) for x in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")) > 1:
        parser.error("each process would train alone: use multinode/mnist.py")
    main(parser.parse_args())
