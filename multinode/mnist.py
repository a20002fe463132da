"""Train a network on MNIST with the GPUs of many machines or, if they have none, CPU processes.

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 -- \
        multinode/mnist.py --epochs 5    # on both machines; HOST is the name of one of them
    sbatch slurm/multinode_mnist.slurm   # on a cluster, where Slurm starts the processes

Compare it with the others by `diff`. images.py adds snapshots, mixed precision, workers, logs.
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


def main(args):
    if "SLURM_STEP_NUM_TASKS" in os.environ and not dist.is_torchelastic_launched():  # no torchrun
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= {*os.environ}:
        sys.exit("start it with torchrun or by its job file: see the top of this script")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])  # the number of this process on its machine
    num_gpus = torch.accelerator.device_count()
    if local_rank >= num_gpus > 0 and dist.is_torchelastic_launched():
        sys.exit(f"{num_gpus} GPU(s) are too few for the processes of this node")
    device = torch.device(local_rank % num_gpus if ON_GPU else "cpu")  # srun may show only one GPU
    if ON_GPU:
        torch.accelerator.set_device_index(device.index)  # this process's default from now on
    if rank == 0:
        print(f"{world_size} processes", flush=True)
        read_data(args, train=True)  # downloads what is missing. The others wait for rank 0 below.
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    dist.init_process_group(backend, device_id=device if ON_GPU else None)  # waits for all
    if local_rank == 0:
        read_data(args, train=True)  # downloads where machines do not share a disk
    dist.barrier()  # waits for that
    torch.manual_seed(1)  # the same weights (and made-up images) in each run
    train_data, val_data = read_data(args, train=True), read_data(args, train=False)
    size = len(train_data)
    if args.epochs < 1 or args.batch_size not in range(world_size, size + 1, world_size):
        words = f"a multiple of {world_size} processes, up to {size}"
        sys.exit(f"needs --epochs >= 1, and --batch_size {words}")
    val_images, val_labels = [x[rank::world_size].to(device) for x in val_data.tensors]
    sampler = DistributedSampler(train_data, drop_last=True)  # it leaves some out: not for val_data
    share = args.batch_size // world_size  # images per process; batch_size is for all of them
    batches = BatchSampler(sampler, share, drop_last=True)  # the indices of each batch
    # A batch is train_data[[7, 2, ...]]. Your own Dataset: DataLoader(data, batch_sampler=batches)
    loader = DataLoader(train_data, batch_size=None, sampler=batches, pin_memory=ON_GPU)
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = nn.Sequential(nn.Flatten(), *layers).to(device)
    model = nn.parallel.DistributedDataParallel(model)  # copies the weights of rank 0 to all
    for weights in model.parameters():  # a mark at each gradient: what follows the last is comm
        weights.register_post_accumulate_grad_hook(lambda _: mark("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    for epoch in range(args.epochs):
        marks.clear()  # only the last epoch's times are printed: the first epoch is slower
        mark("start")
        sampler.set_epoch(epoch)  # a new order, the same in all processes: each takes its share
        loss_sum = torch.zeros((), device=device)
        for batch in loader:
            images, labels = [x.to(device, non_blocking=True) for x in batch]
            mark("data")
            loss = nn.functional.cross_entropy(model(images), labels)
            mark("forward")
            loss.backward()  # while it runs, DDP averages the gradients over all processes
            mark("comm")  # from the last gradient to the end of the averaging
            optimizer.step()
            optimizer.zero_grad()
            loss_sum += loss.detach()  # loss.item() would make Python wait for the GPU
            mark("optimizer")
        with torch.no_grad():  # with dropout: model.eval() before it, and model.train() after it
            val_acc = (model(val_images).argmax(1) == val_labels).sum() / len(val_data)
        results = torch.stack([loss_sum / len(loader) / world_size, val_acc])
        dist.all_reduce(results)  # adds up the parts of all processes: now all have both means
        mark("eval")
        train_loss, val_acc = results.tolist()
        if rank == 0:
            print(f"epoch {epoch}: train_loss {train_loss:.4f}, val_acc {val_acc:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "mnist.pt")  # without DDP around it
    print_marks(f"| multinode | {world_size} | {args.batch_size} | {val_acc:.4f} |")
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
    late = min(range(len(by_rank)), key=lambda rank: by_rank[rank]["comm"])  # which waits least
    shown = sorted({*range(min(8, len(by_rank))), late})  # a line has no room for more
    print(f"{'mean':>18}        {''.join(f' rank {rank:>2}' for rank in shown)}")
    means = {name: sum(each.get(name, 0) for each in by_rank) / len(by_rank) for name in seconds}
    for phase, mean in means.items():
        columns = "".join(f"{by_rank[rank].get(phase, 0):8.3f}" for rank in shown)
        print(f"{phase:9} {mean:8.3f} s {mean / means['total']:4.0%} {columns}")
    print(f"comm: averaging that backward() does not hide, and waiting. Rank {late} waited least.")
    print(head, " | ".join(means), "|")
    print(row, *[f"{mean:.3f} |" for mean in means.values()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--synthetic", action="store_true", help="make up images: no data needed")
    parser.add_argument("--data_dir", default="data", help="folder of MNIST, which is downloaded")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=240, help="images per step, in total")
    main(parser.parse_args())
