"""Train a network on MNIST with two layers split over two GPUs or CPU processes, and with DDP.

    torchrun --standalone --nproc_per_node=4 hybrid/mnist_tensor.py    # 2 parts x 2 groups
    sbatch slurm/hybrid_mnist_tensor.slurm

Each process has the whole first layer, which makes x. The two processes of a group split the next
two. W (512 x 512) is cut by rows, its outputs, and V (10 x 512) by columns, its inputs:

    V relu(W x)  =  V[:, :256] relu(W[:256] x)  +  V[:, 256:] relu(W[256:] x)
    group 0         rank 0: part 0                 rank 1: part 1
    group 1         rank 2: part 0                 rank 3: part 1

Ranks 0 and 2 hold the same part, and so do 1 and 3. DDP averages their gradients. Compare it with
multinode/mnist.py by `diff`. gpt_tensor.py splits a transformer, and adds snapshots and logs.
"""

import argparse
import os
import sys
import time  # for mark()

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
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


HALVED = {"3.weight": 0, "3.bias": 0, "5.weight": 1}  # where to cut. model[3] is W, model[5] V


def split_layers(model, part, group):
    """Leaves this process its part of W and V, and adds the hooks f and g of Megatron-LM (2019)."""

    def f(layer, input_gradients, _):  # PyTorch calls it in the backward pass, after W
        total = input_gradients[0].clone()
        mark("backward")
        dist.all_reduce(total, group=group)
        mark("comm")
        return (total,)  # without f, each part lacks the other's gradient of x, in silence

    def g(layer, _, result):  # PyTorch calls it in the forward pass, after V
        mark("forward")
        # The logits are a sum of two terms, one in each process. This adds the other term to
        # .data, which autograd does not see. So the gradient of the sum becomes that of a term,
        # as it must: d(a + b) / da = 1. Without g, each part trains on a loss of its own.
        dist.all_reduce(result.data, group=group)
        mark("comm")

    for name, dim in HALVED.items():
        weight = model.get_parameter(name)
        weight.data = weight.data.chunk(2, dim)[part].clone()
    if part == 1:  # only part 0 adds V's bias. Otherwise the sum would have it twice
        model[5].bias = None
    model[3].register_full_backward_hook(f)
    model[5].register_forward_hook(g)


def main(args):
    if "SLURM_STEP_NUM_TASKS" in os.environ and not dist.is_torchelastic_launched():  # no torchrun
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= {*os.environ}:
        sys.exit("start it with torchrun or by its job file: see the top of this script")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])  # the number of this process on its machine
    group_number, part, num_groups = rank // 2, rank % 2, world_size // 2
    num_gpus = torch.accelerator.device_count()
    if local_rank >= num_gpus > 0 and dist.is_torchelastic_launched():
        sys.exit(f"{num_gpus} GPU(s) are too few for the processes of this node")
    device = torch.device(local_rank % num_gpus if ON_GPU else "cpu")  # srun may show only one GPU
    if ON_GPU:
        torch.accelerator.set_device_index(device.index)  # this process's default from now on
    if rank == 0:
        read_data(args, train=True)  # downloads what is missing. The others wait for rank 0 below.
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    dist.init_process_group(backend, device_id=device if ON_GPU else None)  # waits for all
    if local_rank == 0:
        read_data(args, train=True)  # downloads where machines do not share a disk
    dist.barrier()  # waits for that
    torch.manual_seed(1)  # all processes make the same whole weights (and made-up images)
    train_data, val_data = read_data(args, train=True), read_data(args, train=False)
    sizes = range(num_groups, len(train_data) + 1, max(1, num_groups))
    if world_size % 2 or args.epochs < 1 or args.batch_size not in sizes:
        words = f"--batch_size a multiple of {num_groups} groups, up to {len(train_data)}"
        sys.exit(f"each group needs two processes; training needs --epochs >= 1, and {words}")
    # All processes must create all groups. The ranks of copies[p] hold part p.
    groups = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    copies = [dist.new_group(range(first, world_size, 2)) for first in (0, 1)]
    val_images, val_labels = [x[group_number::num_groups].to(device) for x in val_data.tensors]
    sampler = DistributedSampler(train_data, num_groups, group_number, drop_last=True)
    share = args.batch_size // num_groups  # images of a group in each step
    batches = BatchSampler(sampler, share, drop_last=True)  # the indices of each batch
    # A batch is train_data[[7, 2, ...]]. Your own Dataset: DataLoader(data, batch_sampler=batches)
    loader = DataLoader(train_data, batch_size=None, sampler=batches, pin_memory=ON_GPU)
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = nn.Sequential(nn.Flatten(), *layers).to(device)  # still whole
    split_layers(model, part, groups[group_number])
    model = nn.parallel.DistributedDataParallel(model, process_group=copies[part])
    for weights in model.parameters():  # the last of these marks is where comm begins
        weights.register_post_accumulate_grad_hook(lambda _: mark("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    for epoch in range(args.epochs):
        marks.clear()  # only the last epoch's times are printed: the first epoch is slower
        mark("start")
        sampler.set_epoch(epoch)  # a new order, the same in all processes: each takes its share
        loss_sum = torch.zeros((), device=device)
        for batch in loader:  # both parts get the same images, because their logits are added up
            images, labels = [x.to(device, non_blocking=True) for x in batch]
            mark("data")
            loss = nn.functional.cross_entropy(model(images), labels)
            mark("forward")
            loss.backward()  # while it runs, DDP averages the gradients over the copies
            mark("comm")  # from the last gradient to the end of the averaging
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()  # loss.item() would make Python wait for the GPU
            mark("optimizer")
        num_marks = len(marks)
        with torch.no_grad():  # with dropout: model.eval() before it, and model.train() after it
            val_acc = (model(val_images).argmax(1) == val_labels).sum() / len(val_data)
        del marks[num_marks:]  # g made them in this validation, which is timed as a whole
        # Both processes of a group have the same loss and accuracy, so each adds half of them.
        results = torch.stack([loss_sum / len(loader) / num_groups, val_acc]) / 2
        dist.all_reduce(results)  # sums over all processes: the mean loss, and the accuracy
        mark("eval")
        train_loss, val_acc = results.tolist()
        if rank == 0:
            print(f"epoch {epoch}: train_loss {train_loss:.4f}, val_acc {val_acc:.4f}")

    # Rank 0 saves the whole network: it joins the parts of the first group.
    states = [None] * world_size if rank == 0 else None
    dist.gather_object(model.module.cpu().state_dict(), states)
    if rank == 0:
        for name, dim in HALVED.items():
            states[0][name] = torch.cat([states[0][name], states[1][name]], dim)
        torch.save(states[0], "mnist.pt")
    print_marks(f"| hybrid, tensor | {world_size} | {args.batch_size} | {val_acc:.4f} |")
    del model  # before torch 2.14, a process can hang at its end if DDP outlives its group
    dist.destroy_process_group()


# == Where the time goes. To remove it, delete this section, and each line with "mark". ==========
marks = []  # (phase, the moment at which it ended)


def mark(phase):
    """Notes that this phase of a step ends here. Python does not wait for the GPU."""
    moment = torch.Event(enable_timing=True) if ON_GPU else time.perf_counter()
    if ON_GPU:
        moment.record()  # queued like all work: the GPU notes the time when it gets here
    marks.append((phase, moment))


def print_marks(row, head="| script | processes | batch_size | val_acc |"):
    """Prints the last epoch's seconds by phase, and a row of them. All processes call it."""
    seconds = dict.fromkeys([phase for phase, _ in marks[1:]], 0.0)
    for (_, start), (phase, end) in zip(marks, marks[1:]):
        seconds[phase] += start.elapsed_time(end) / 1000 if ON_GPU else end - start  # from ms
    seconds["total"] = sum(seconds.values())
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, seconds)
    if dist.get_rank() > 0:
        return
    print(f"{'mean':>18}        {''.join(f' rank {rank:>2}' for rank in range(len(by_rank))[:8])}")
    means = {name: sum(each.get(name, 0) for each in by_rank) / len(by_rank) for name in seconds}
    for phase, mean in means.items():
        columns = "".join(f"{each.get(phase, 0):8.3f}" for each in by_rank[:8])
        print(f"{phase:9} {mean:8.3f} s {mean / means['total']:4.0%} {columns}")
    print("comm: sums of parts, averaging after backward(), and waiting")
    print(head, " | ".join(means), "|")
    print(row, *[f"{mean:.3f} |" for mean in means.values()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--synthetic", action="store_true", help="make up images: no data needed")
    parser.add_argument("--data_dir", default="data", help="folder of MNIST, which is downloaded")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=240, help="images per step, in total")
    main(parser.parse_args())
