"""Compare a trained network in fp32 and in int8: size, accuracy, speed.

    python singlegpu/mnist.py && python quantize/mnist.py    # the first one writes mnist.pt

Dynamic quantization: weights become int8 once, activations in each call. It runs on CPUs only.
Converting takes time, too: in small models, int8 can be slower for one image at a time.
"""

import argparse
import copy
import io
import time
import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST


def read_data(args, train):
    """Returns images (N, 28, 28) float32, in which 0 is black, and their labels (N,)."""
    if args.synthetic:
        labels = torch.randint(10, (60_000 if train else 10_000,))
        bright_row = nn.functional.one_hot(labels, 28)[:, :, None]  # (N, 28, 1), 1 in row `label`
        return TensorDataset(torch.rand(len(labels), 28, 28).square() + 0.25 * bright_row, labels)
    mnist = MNIST(args.data_dir, train, download=True)  # downloads what is missing
    return TensorDataset(mnist.data / 255, mnist.targets)


def quantized(model):
    """Returns a copy of the network whose linear layers compute in int8."""
    try:
        from torch.ao.quantization import quantize_dynamic
    except ImportError:  # a newer PyTorch, which has removed it: torchao has another one
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        network = copy.deepcopy(model)
        quantize_(network, Int8DynamicActivationInt8WeightConfig())
        return network
    warnings.filterwarnings("ignore", ".*deprecated")  # PyTorch has announced its removal
    return quantize_dynamic(model, {nn.Linear}, torch.qint8)


def images_per_second(networks, images):
    """Returns the speeds of the two networks, which get all these images at once."""
    speeds = [], []  # of each network
    for _ in range(20):  # in turn; the best of 20 rounds counts, since others were disturbed
        for network, own in zip(networks, speeds):
            start = time.perf_counter()
            for _ in range(50):
                network(images)
            own.append(50 * len(images) / (time.perf_counter() - start))
    return max(speeds[0]), max(speeds[1])


@torch.no_grad()
def main(args):
    torch.manual_seed(1)  # as in the training: the same made-up images to validate on
    _, val_data = read_data(args, train=True), read_data(args, train=False)
    images, labels = val_data.tensors
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = nn.Sequential(nn.Flatten(), *layers)
    model.load_state_dict(torch.load(args.model, map_location="cpu", weights_only=True))
    networks = (model, quantized(model))
    one = images_per_second(networks, images[:1])
    many = images_per_second(networks, images[:240])
    print("| script | precision | MB | val_acc | images/s, 1 at a time | images/s, 240 at a time |")
    for precision, network, *speeds in zip(("fp32", "int8"), networks, one, many):
        val_acc = (network(images).argmax(1) == labels).float().mean()
        file = io.BytesIO()
        torch.save(network.state_dict(), file)
        print(f"| quantize | {precision} | {file.tell() / 1e6:.2f} | {val_acc:.4f} |", end="")
        print("".join(f" {speed:.0f} |" for speed in speeds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="mnist.pt", help="file that a training has saved")
    parser.add_argument("--synthetic", action="store_true", help="make up images: no data needed")
    parser.add_argument("--data_dir", default="data", help="folder of MNIST, which is downloaded")
    main(parser.parse_args())
