"""Train a network on MNIST with its layers split over two GPUs or CPU processes, and with DDP.

    torchrun --standalone --nproc_per_node=4 hybrid/mnist.py    # 2 stages x 2 replicas
    sbatch slurm/hybrid_mnist.slurm

    replica 0   replica 1
    rank 0      rank 2       stage 0, model[:3]: sends activations down, gets gradients back
    rank 1      rank 3       stage 1, model[3:]. DDP averages gradients over the ranks of a row.

For models too large for one GPU. While one stage works, the other one waits: this is the bubble.
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
    replica, stage, num_replicas = rank // 2, rank % 2, world_size // 2
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
    torch.manual_seed(1)  # the same weights (and made-up images) in each run
    train_data, val_data = read_data(args, train=True), read_data(args, train=False)
    sizes = range(num_replicas, len(train_data) + 1, max(1, num_replicas))
    if world_size % 2 or args.epochs < 1 or args.batch_size not in sizes:
        words = f"--batch_size a multiple of {num_replicas} replicas, up to {len(train_data)}"
        sys.exit(f"each replica needs two processes; training needs --epochs >= 1, and {words}")
    groups = [dist.new_group(range(first, world_size, 2)) for first in (0, 1)]  # each creates both
    val_images, val_labels = [x[replica::num_replicas].to(device) for x in val_data.tensors]
    sampler = DistributedSampler(train_data, num_replicas, replica, drop_last=True)
    share = args.batch_size // num_replicas  # images per replica; batch_size is for all of them
    batches = BatchSampler(sampler, share, drop_last=True)  # the indices of each batch
    # A batch is train_data[[7, 2, ...]]. Your own Dataset: DataLoader(data, batch_sampler=batches)
    loader = DataLoader(train_data, batch_size=None, sampler=batches, pin_memory=ON_GPU)
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = nn.Sequential(nn.Flatten(), *layers)[3 * stage : 3 * stage + 3].to(device)  # its layers
    model = nn.parallel.DistributedDataParallel(model, process_group=groups[stage])
    for weights in model.parameters():  # a mark at each gradient: what follows the last is comm
        weights.register_post_accumulate_grad_hook(lambda _: mark("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    for epoch in range(args.epochs):
        marks.clear()  # only the last epoch's times are printed: the first epoch is slower
        mark("start")
        sampler.set_epoch(epoch)  # a new order, the same in all processes: each takes its share
        loss_sum, val_acc = torch.zeros(2, device=device)  # in stage 0 they stay 0
        for batch in loader:  # the same in both stages: one needs its images, the other its labels
            images, labels = [x.to(device, non_blocking=True) for x in batch]
            mark("data")
            # Stage 0 sends activations, and waits for their gradients. Stage 1 has the loss.
            if stage == 0:
                activations = model(images)  # (B, 512)
                mark("forward")
                dist.send(activations.detach(), rank + 1)  # only values: no graph
                gradients = torch.empty_like(activations)
                dist.recv(gradients, rank + 1)
                mark("bubble")  # sending, and waiting for the other stage
                activations.backward(gradients)  # continues stage 1's backward pass
                mark("comm")  # from the last gradient to the end of the averaging
            else:
                activations = torch.empty(share, 512, device=device)
                dist.recv(activations, rank - 1)
                activations.requires_grad_()  # backward() then computes the gradients to send back
                mark("bubble")
                loss = nn.functional.cross_entropy(model(activations), labels)
                mark("forward")
                loss.backward()
                mark("comm")
                dist.send(activations.grad, rank - 1)
                mark("bubble")
                loss_sum += loss.detach()  # loss.item() would make Python wait for the GPU
            optimizer.step()
            optimizer.zero_grad()
            mark("optimizer")
        # Validation passes through both stages, too. With dropout: model.eval() before it, and
        # model.train() after it.
        with torch.no_grad():
            if stage == 0:
                dist.send(model(val_images), rank + 1)
            else:
                activations = torch.empty(len(val_labels), 512, device=device)
                dist.recv(activations, rank - 1)
                val_acc = (model(activations).argmax(1) == val_labels).sum() / len(val_data)
        results = torch.stack([loss_sum / len(loader) / num_replicas, val_acc])
        dist.all_reduce(results)  # adds up the parts of all processes: now all have both means
        mark("eval")
        train_loss, val_acc = results.tolist()
        if rank == 0:
            print(f"epoch {epoch}: train_loss {train_loss:.4f}, val_acc {val_acc:.4f}")
    # Rank 0 saves the whole network: the layers of both stages.
    states = [None] * world_size if rank == 0 else None
    dist.gather_object(model.module.cpu().state_dict(), states)
    if rank == 0:  # model[:3] and model[3:] keep the names of the whole network
        torch.save(states[0] | states[1], "mnist.pt")
    print_marks(f"| hybrid | {world_size} | {args.batch_size} | {val_acc:.4f} |")
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
    print("bubble: waiting for the other stage. comm: averaging after backward(), and waiting")
    print(head, " | ".join(means), "|")
    print(row, *[f"{mean:.3f} |" for mean in means.values()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--synthetic", action="store_true", help="make up images: no data needed")
    parser.add_argument("--data_dir", default="data", help="folder of MNIST, which is downloaded")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=240, help="images per step, in total")
    main(parser.parse_args())
