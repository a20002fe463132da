"""Estimate how large a batch still helps a training: its gradient noise scale.

    python singlegpu/noise_scale.py singlegpu/gpt.py                      # at the first step
    python singlegpu/noise_scale.py singlegpu/gpt.py --snapshot gpt.pt --out noise.json
    python predict.py one.jsonl link.json --noise noise.json     # time to the same loss
    sbatch slurm/singlegpu_noise_scale.slurm singlegpu/images.py --snapshot cnn.pt --steps 200

It takes the data, the model and the loss from the first section of any script of singlegpu, or of
your copy, with the script's own flags. The weights stay as they are: new ones, or those of a
snapshot. The gradient of a batch of B samples is the true gradient G, plus noise of variance tr(S)
/ B. The simple noise scale is N = tr(S) / |G|^2, in samples. Both are estimated, without bias, from
the gradients of micro-batches and of their mean (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", appendix A.1). With a batch of B, a training takes 1 + N / B times the
steps, and 1 + B / N times the samples, that it takes at least. This holds for SGD whose learning
rate is tuned for each batch, and roughly for others; BatchNorm is not in it. N mostly grows as the
loss falls.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import sys

import numpy as np
import torch
from torch import nn

NUM_PARTS = 8  # micro-batches of a batch


def parse_args():
    """Returns the flags of this script, and the words that are for the other one."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("script", help="a training script; its own flags may follow")
    add("--snapshot", metavar="FILE", help="weights to measure; new ones if there is no file")
    add("--steps", type=int, default=100, help="batches to measure on, at least 20")
    add("--out", metavar="FILE.json", help="write the estimate, for predict.py --noise")
    options, words = parser.parse_known_args()
    if options.steps < 20:
        parser.error("--steps must be at least 20")
    if options.out:
        open(options.out, "a").close()  # fails now rather than at the end
    return options, words


def load_script(path, words):
    """Returns a training script as a module, and its arguments."""
    if not os.path.exists(path) or "\ndef batch_loss(" not in open(path).read():
        sys.exit(f"{path} is no training script: it has no batch_loss")
    spec = importlib.util.spec_from_file_location("script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sys.argv = [path, *words]
    return script, script.parse_args()


def load_weights(path, args, words):
    """Returns the weights of a snapshot. Its settings count, unless a flag is among the words.

    Flags that are lists are not read: they must be among the words.
    """
    snapshot = torch.load(path, "cpu", weights_only=True, mmap=True)
    given = [word.split("=")[0] for word in words if word.startswith("--")]
    for name, value in snapshot["settings"].items():
        is_given = any(f"--{name}".startswith(flag) for flag in given)
        # The snapshot has numbers as they are, and everything else as strings.
        is_list = isinstance(getattr(args, name, None), list)
        if not is_given and not is_list and value != "None":
            setattr(args, name, value)
    return snapshot["model"]


def random_requests(script, data, args, size):
    """Yields, without end, requests for `size` random samples, as those of the training."""
    for epoch in itertools.count():
        script.set_seeds(args.seed, epoch)
        order = np.random.permutation(np.asarray(script.training_order(data, args, epoch)))
        for indices in order[: len(order) // size * size].reshape(-1, size).tolist():
            yield (args.seed, epoch, indices[0]), indices


def gradient_norms(script, model, batches, args, steps):
    """Returns squared norms of gradients: of micro-batches (steps, parts), of their means (steps,).

    `batches` is an iterator of micro-batches on the device of the model.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    dtype = script.DTYPES[args.precision]
    of_parts = np.empty((steps, NUM_PARTS))
    of_means = np.empty(steps)
    for step in range(steps):
        means = [torch.zeros_like(parameter) for parameter in parameters]
        for part in range(NUM_PARTS):
            batch = next(batches)
            script.set_seeds(args.seed, step, part)  # of dropout
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss, _ = script.batch_loss(model, batch, args)
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            of_parts[step, part] = float(nn.utils.get_total_norm(gradients)) ** 2
            torch._foreach_add_(means, gradients, alpha=1 / NUM_PARTS)
        of_means[step] = float(nn.utils.get_total_norm(means)) ** 2
    return of_parts, of_means


def noise_scale(of_parts, of_means, size):
    """Returns the noise scale and half of its 95% interval, by the jackknife over the steps.

    It takes what gradient_norms() returns, and the size of a micro-batch.
    """
    steps, parts = of_parts.shape
    batch = size * parts
    small = of_parts.mean(1)
    squared = (batch * of_means - size * small) / (batch - size)  # of the true gradient
    trace = (small - of_means) / (1 / size - 1 / batch)  # of the covariance of samples' gradients
    estimate = trace.mean() / squared.mean()
    without_one = (trace.sum() - trace) / (squared.sum() - squared)
    return estimate, 1.96 * np.sqrt((steps - 1) * without_one.var())


def print_estimate(estimate, width, steps, size):
    """Prints what the estimate says about batches, from `size` on."""
    print(f"noise scale {estimate:,.3g} samples, +- {width:,.3g} (95%)")
    if not 0 < 2 * width < estimate:
        print("This is too uncertain to be used. Take more --steps, or a larger --batch_size.")
    if 0 < estimate < 2 * width:
        print(f"About {math.ceil(steps * (2 * width / estimate) ** 2):,} steps are needed.")
    if estimate <= 0:
        return
    print("|   batch | steps to the same loss | samples to the same loss |")
    print("| ------: | ---------------------: | -----------------------: |")
    batch = size
    while batch < 32 * max(estimate, size):
        factor = (1 + estimate / batch) / (1 + estimate / size)  # relative to the first row
        print(f"| {batch:7,} | {factor:22.3f} | {factor * batch / size:24.2f} |")
        batch *= 2
    few, many = math.ceil(estimate / 9), math.ceil(9 * estimate)
    print(f"Up to a batch of {few:,}, twice the batch needs 0.5 to 0.55 of the steps.")
    print(f"From {many:,} on, it needs 0.95 of them or more: that does not help.")


def main():
    options, words = parse_args()
    script, args = load_script(options.script, words)
    weights = None
    if options.snapshot and os.path.exists(options.snapshot):
        weights = load_weights(options.snapshot, args, words)
    if args.precision == "fp16":
        sys.exit("--precision fp16 scales its loss: take bf16")
    # What follows is as in the script's main(): the same split of the data, device and arithmetic.
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    script.set_seeds(args.seed)
    data, _ = script.read_data(args)
    size = args.batch_size // NUM_PARTS
    num_samples = len(data)
    if size == 0 or num_samples < 2 * NUM_PARTS * size:
        sys.exit(f"--batch_size must be {NUM_PARTS} or more, and the data two batches or more")
    script.set_seeds(args.seed)
    model = script.create_model(args, data)
    if weights:
        model.load_state_dict(weights)
    model = model.to(device)
    if not model.training:  # a part alone that is in eval() stays so
        model.train()
    requests = random_requests(script, data, args, size)
    batches = script.load_batches(data, requests, device, args)
    norms = gradient_norms(script, model, batches, args, options.steps)
    estimate, width = noise_scale(*norms, size)
    what = f"the weights of {options.snapshot}" if weights else "new weights"
    print(f"{options.script}, {what}: {options.steps} batches of {NUM_PARTS} x {size} samples")
    if options.steps * NUM_PARTS * size > num_samples:
        print("The data was read more than once: the true interval is wider.")
    print_estimate(estimate, width, options.steps, size)
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"noise_scale": estimate, "half_width": width}, file)


if __name__ == "__main__":
    main()
