"""Faults put by hand into correct scripts, one each, and what check.py must say of them."""

import os
import re
import shlex
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
# Of a script: its replacements (old, new), its flags, those of check.py, and the kind and the words
# (a regular expression) of the line that must come, with the public report of such a fault.
Fault = namedtuple("Fault", "name script edits flags options kind words report")
TRAIN, MNIST, IMAGES = "tests/faults/train.py", "multigpu/mnist.py", "multigpu/images.py"
TWO, ONE = "--processes 2", "--processes 1"
SYNTHETIC = "--num_gpus 2 --synthetic"
MLP = "--model mlp --dataset synthetic --max_steps 40 --batch_size 32 --dropout 0.5"
STEP = "            optimizer.step()\n"
WRAP = "ddp = DistributedDataParallel(model)"
FAULTS = []


def fault(name, *edits, say, report, script=TRAIN, flags=TWO, options=""):
    kind, words = say.split(": ", 1)
    edits = list(zip(edits[::2], edits[1::2]))
    FAULTS.append(Fault(name, script, edits, flags, options, kind, words, report))


def write(script, edits, folder):
    """Writes a script with replacements to a folder, and returns its path."""
    text = (ROOT / script).read_text()
    for old, new in edits:
        if old not in text:
            raise ValueError(f"{script} has no {old!r}")
        text = text.replace(old, new)
    path = Path(folder, Path(script).parent.name, Path(script).name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def table_of(out):
    """Returns the table in what check.py has printed, a line for each finding; and the rest."""
    before, _, table = out.rpartition("process(es) that train:")
    return re.sub(r"\n {20,}", " ", table).splitlines()[1:], before


def check(command, folder, options=""):
    """Runs check.py on a command in a folder. Returns its status, its table, and what came before.

    In the table each finding is one line.
    """
    words = [sys.executable, ROOT / "tools/check.py", *shlex.split(options), "--", *command]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"GLOO_SOCKET_IFNAME": "lo"}
    job = subprocess.run(
        list(map(str, words)), cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    lines, before = table_of(job.stdout)
    return job.returncode, lines, before + job.stderr


def run(fault, folder, check=check, python=sys.executable):
    """Runs check.py on a script with this fault. Returns what check() returns."""
    path = write(fault.script, fault.edits, folder)
    options = fault.options.replace("PYTHON", python).replace("ROOT", str(ROOT))
    options = options.replace("SCRIPT", f"{path}" + f" --folder {folder}" * (fault.script == TRAIN))
    words = shlex.split(fault.flags)
    words += ["--folder", "{tmp}"] if fault.script == TRAIN else []
    return check([python, path, *words], folder, options)


def is_found(fault, lines):
    """Whether a line of check.py's table says it."""
    wanted = re.compile(rf"(ERROR|warning)\s+{fault.kind}\s.*({fault.words})")
    return any(wanted.match(line) for line in lines)


# == Processes, weights, gradients =================================================================
fault(
    "never_started_group",
    'dist.init_process_group("gloo", **start)\n',
    "",
    "rank, world = dist.get_rank(), dist.get_world_size()",
    "rank, world = 0, 1",
    WRAP,
    "ddp = model",
    "DistributedSampler(train_data, drop",
    "DistributedSampler(train_data, num_replicas=1, rank=0, drop",
    "    dist.all_reduce(sums)\n",
    "",
    "del ddp\ndist.destroy_process_group()",
    "",
    say="processes: 2 train, each alone",
    report="srun without a process group; Lightning #5319",
)
fault(
    "other_flags",
    "rank, world = dist.get_rank(), dist.get_world_size()",
    "rank, world = dist.get_rank(), dist.get_world_size()\nsys.argv += ['--x'] * rank",
    say="processes: other flags or versions in rank 1",
    report="a job file that was edited on one host",
)
fault(
    "weights_differ_at_start",
    "torch.manual_seed(0)\n",
    "torch.manual_seed(rank)\n",
    WRAP,
    "ddp = model",
    STEP,
    "            for w in model.parameters():\n"
    "                dist.all_reduce(w.grad)\n"
    "                w.grad /= world\n" + STEP,
    say="weights: at the start",
    report="pytorch-benchmarks #1 (sparticlesteve)",
)
fault(
    "no_averaging",
    WRAP,
    "ddp = model",
    say="weights: Nothing averages",
    report="e2eAIOK #198",
)
fault(
    "past_ddp",
    "cross_entropy(ddp(x), y)",
    "cross_entropy(ddp.module(x), y)",
    say="weights: past DDP",
    report="minimind #853; VL_adapter #8",
)
fault(
    "no_sync_left_on",
    "ddp.require_backward_grad_sync = last",
    "ddp.require_backward_grad_sync = False",
    say="weights: no_sync",
    report="PiPPy #1133",
)
fault(
    "added_after_wrapping",
    WRAP,
    WRAP + "\nmodel.scale = nn.Parameter(torch.ones(4))",
    "return self.head(",
    "return getattr(self, 'scale', 1) * self.head(",
    say="weights: does not know",
    report="PyTorch's documentation of DDP",
)
fault(
    "changed_in_one_rank",
    STEP,
    "            model.head.bias.grad[0] += rank\n" + STEP,
    say="weights: 1 of 6 tensors .* first head.bias.*changed after DDP",
    report="icefall #226; BLOOM-176B",
)
fault(
    "moved_after_ddp",
    WRAP,
    WRAP + "\nddp.double().float()",
    say="weights: moved after DDP was made",
    report="pytorch #104336",
)
fault(
    "rate_differs",
    "lr=0.05,",
    "lr=0.05 * (1 + rank),",
    say="weights: learning rates differ: .*0.05.*0.1",
    report="disruptcnn #3; ReduceLROnPlateau on a loss of one rank",
)
fault(
    "layer_without_optimizer",
    "SGD(ddp.parameters()",
    "SGD(model.head.parameters()",
    say="gradients: 4 weights .* no optimizer: conv.bias, conv.weight, norm.bias. Add or freeze",
    report="accelerate #2665",
)
fault(
    "layer_made_in_forward",
    "    def forward(self, x):\n",
    "    def forward(self, x):\n"
    "        self.first = nn.Conv2d(1, 1, 1)\n        x = self.first(x)\n",
    say="gradients: 2 weights .* no optimizer: first.bias, first.weight.*none in forward",
    report="pytorch #14467",
)
fault(
    "zeroed_before_step",
    STEP,
    "            optimizer.zero_grad()\n" + STEP,
    say="gradients: none is left at step",
    report="PyTorch forum",
)
fault(
    "never_used",
    "    def forward(self, x):\n",
    "        self.spare = nn.Linear(2, 2)\n\n    def forward(self, x):\n",
    WRAP,
    "ddp = DistributedDataParallel(model, find_unused_parameters=True)",
    say="gradients: 2 of 8 weights never have a gradient: spare.weight",
    report="speculators #765",
)
fault(
    "steps_lost_in_bf16",
    "model = Net()",
    "model = Net().bfloat16()",
    "ddp(x)",
    "ddp(x.bfloat16())",
    "lr=0.05, momentum=0.9",
    "lr=1e-7",
    say="updates: none of 6 weights changes|stands still from step 1 on",
    report="speculators #765; ao #1124",
)
fault(
    "all_frozen",
    WRAP,
    "model.requires_grad_(False)\nddp = model",
    "loss.backward()",
    "(loss + 0 * torch.ones(1, requires_grad=True).sum()).backward()",
    say="updates: none of 6 weights changes, 6 are frozen",
    report="pytorch-forum 84911 (TrainCheck)",
)
fault(
    "stops_moving",
    STEP,
    "            model.head.weight.grad *= 1e-30 if epoch else 1\n" + STEP,
    "lr=0.05, momentum=0.9",
    "lr=0.05",
    say="updates: head.weight stands still from step 9",
    report="pytorch #115607 (TrainCheck)",
)
fault(
    "rate_0",
    "lambda step: 0.99**step",
    "lambda step: 0.0",
    say="updates: the rate is 0",
    report="Megatron-LLM #33",
)
fault(
    "no_zero_grad",
    "    optimizer.zero_grad()\n    for",
    "    for",
    "            optimizer.zero_grad()\n",
    "",
    say="accumulation: not zeroed before step 2",
    report="pytorch #47175; torchforge #71; tt-blacksmith #711",
)
fault(
    "steps_twice",
    STEP,
    STEP + STEP,
    say="accumulation: step 2 uses the gradients of the last one",
    report="x-jxmnop (TrainCheck)",
)
fault(
    "zeroed_in_micro_batches",
    "        last = (i",
    "        optimizer.zero_grad()\n        last = (i",
    flags=TWO + " --accum 2",
    options="--steps 8",
    say="accumulation: between the micro-batches",
    report="RAE #67; openWakeWord #316; accelerate #1299; ultralytics #11217",
)
fault(
    "averaged_in_each_micro_batch",
    "ddp.require_backward_grad_sync = last",
    "pass",
    flags=TWO + " --accum 2",
    options="--steps 8",
    say="accumulation: DDP averages 2 times",
    report="build-nanogpt #30; speechbrain #1802",
)
fault(
    "loss_nan",
    "/ args.accum",
    "/ args.accum + (float('nan') if i == 3 else 0)",
    say="finite: the loss is nan in step 4",
    report="pocket-tts #262",
)
fault(
    "gradient_inf",
    STEP,
    "            model.head.bias.grad[0] /= i != 5\n" + STEP,
    say="finite: inf or nan in head.bias's gradient, step 6, rank 0",
    report="torchtitan #3863",
)
fault(
    "clipped_while_scaled",
    "loss.backward()",
    "scaler.scale(loss).backward()",
    STEP,
    "            nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
    "            scaler.step(optimizer)\n            scaler.update()\n",
    "first_epoch = 0\n",
    "first_epoch = 0\nscaler = torch.amp.GradScaler('cpu')\n",
    say="finite: unscale_",
    report="examples #1196",
)
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n"
fault(
    "clipped_late",
    STEP,
    STEP + "            " + CLIP,
    say="finite: between step.. and backward",
    report="VGRNN #4; graphstorm #1366",
)
fault(
    "clipped_early",
    "        loss.backward()\n",
    "        " + CLIP + "        loss.backward()\n",
    say="finite: between step.. and backward",
    report="nano-world-model #22",
)
# == Rates, types, modes ===========================================================================
fault(
    "schedule_n_times",
    "            scheduler.step()\n",
    "            for _ in range(world):\n                scheduler.step()\n",
    say=r"schedule: LambdaLR.step\(\) is called \d+ times in 20",
    report="accelerate #2142; transformers #24088; diffusers #3954",
)
fault(
    "schedule_first",
    STEP,
    "            scheduler.step()\n" + STEP,
    "            optimizer.zero_grad()\n            scheduler.step()",
    "            optimizer.zero_grad()",
    say="schedule: before optimizer.step",
    report="PyTorch 1.1's notes",
)
fault(
    "rate_set_afterwards",
    STEP,
    "            optimizer.param_groups[0]['lr'] = 0.01\n" + STEP,
    say="schedule: uses the rate 0.01, but the schedule says",
    report="a warm-up that is left in beside a scheduler",
)
fault(
    "weights_in_bf16",
    "model = Net()",
    "model = Net().to(torch.bfloat16)",
    "ddp(x)",
    "ddp(x.bfloat16())",
    say="precision: weights are bfloat16, but precision is to be fp32",
    report="trl #3910",
)
fault(
    "autocast_without_effect",
    "self.head = nn.Linear(8 * 36, 4)",
    "self.head = Own(8 * 36, 4)",
    "class Net(",
    "class Own(nn.Linear):\n    def forward(self, x):\n"
    "        return Product.apply(x, self.weight) + self.bias\n\n\nclass Net(",
    "class Own(",
    """class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Own(""",
    "cross_entropy(ddp(x), y)",
    "cross_entropy(torch.autocast('cpu', torch.bfloat16)(ddp)(x), y)",
    say="precision: autocast is on, but a Own gives float32",
    report="lightning-thunder #725 (TrainCheck)",
)
fault(
    "autocast_around_the_loop",
    "    for i, (x, y) in enumerate(loader):\n",
    "    torch.autocast('cpu', torch.bfloat16).__enter__()\n"
    "    for i, (x, y) in enumerate(loader):\n",
    say="precision: one autocast holds all steps",
    report="Flow-Factory #186",
)
fault(
    "eval_from_the_start",
    "    ddp.train()\n",
    "    ddp.eval()\n",
    say="modes: train in eval",
    report="mmd #14; coRNN #1",
)
fault(
    "eval_after_validation",
    "    ddp.train()\n",
    "",
    say="modes: train in eval.* from step .*after validation",
    report="lerobot #3668; simpletransformers #941; mcan-vqa #26",
)
fault(
    "validates_in_train",
    "    ddp.eval()\n",
    "",
    say="modes: validates in train.*model.eval",
    report="ethos-ares #20; nanoGPT #240",
)
fault(
    "dropout_in_eval",
    "self.drop(self",
    "nn.functional.dropout(self",
    "flatten(1))",
    "flatten(1), 0.1)",
    say="layers: draws random numbers in eval",
    report="transformers #33844 (TrainCheck)",
)
fault(
    "same_dropout_mask",
    "torch.manual_seed(1 + rank)",
    "torch.manual_seed(1)",
    "torch.manual_seed(1000 * epoch + rank)",
    "torch.manual_seed(1000 * epoch)",
    say="layers: draw the same masks",
    report="transformers #31412; anemoi-core #595",
)
fault(
    "same_noise_in_the_model",
    "        self.drop = nn.Dropout(0.2)\n",
    "        self.drop = nn.Dropout(0.2)\n        self.noise = torch.Generator().manual_seed(0)\n",
    "self.head(self.drop(",
    "self.head(torch.rand(1, generator=self.noise) + self.drop(",
    say=r"layers: draw the same masks or noise",
    report="lingbot-vla-v2 #41",
)
fault(
    "statistics_differ",
    "torch.tensor([(ddp(x)",
    "torch.tensor([(model(x)",
    say="layers: statistics differ",
    report="PyTorch forum",
)
# == Data ==========================================================================================
fault(
    "same_samples",
    "sampler=sampler,",
    "shuffle=True, generator=torch.Generator().manual_seed(0),",
    say="shares: ranks 0 and 1 get the same samples",
    report="openspeech #149; physicsnemo-from-zero-to-one #143",
)
fault(
    "own_order_in_each_rank",
    "sampler=sampler,",
    "shuffle=True,",
    say="shares: ranks 0 and 1 share",
    report="RoMa #32; voxceleb_trainer #98",
)
fault(
    "no_set_epoch",
    "    sampler.set_epoch(epoch)\n",
    "",
    say="order: set_epoch",
    report="pytorch #31771, #11324; KAIR #106; DALLE-pytorch #230",
)
fault(
    "not_shuffled",
    "DistributedSampler(train_data, drop",
    "DistributedSampler(train_data, shuffle=False, drop",
    say="order: not shuffled",
    report="examples #501",
)
fault(
    "stream_not_split",
    "class Net(",
    "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
    "        return iter([train_data[i] for i in range(256)])\n\n\nclass Net(",
    "    train_data, 32 // world, sampler=sampler,",
    "    Stream(), 32 // world,",
    "Images(256, 0, 0.01)",
    "Images(256, 0, 0)",
    flags=ONE + " --workers 2",
    say="order: different samples among",
    report="PyTorch's documentation of IterableDataset",
)
fault(
    "input_lost",
    "ddp(x)",
    "ddp(x * (rank == 0 or i != 4))",
    say="inputs: input of step 5 in rank 1 is all zeros",
    report="pytorch #84803, #96600; Baichuan2 #86 (TrainCheck)",
)
fault(
    "one_row_for_all",
    "    train_data, 32",
    "    train_data,\n    32",
    "worker_init_fn=seed_worker\n",
    "worker_init_fn=seed_worker,\n"
    "    collate_fn=lambda b: (torch.stack([x for x, _ in b]), torch.stack([b[0][1]])),\n",
    "cross_entropy(ddp(x), y)",
    "cross_entropy(ddp(x), y.expand(len(x)))",
    say=r"inputs: 16 samples have a tensor of 1 row",
    report="transformers #34204 (TrainCheck)",
)
fault(
    "samples_change",
    "Images(256, 0, 0.01)",
    "Images(256, 0, 0)",
    "        image = self.images[i]\n",
    "        image = self.images[i]\n        image -= 0.1\n",
    say=r"samples: sample \d+ of Images has other bytes",
    report="pycls #21",
)
fault(
    "same_numbers_in_ranks",
    "np.random.seed(1 + rank)",
    "np.random.seed(1)",
    "np.random.seed(1000 * epoch + rank)",
    "np.random.seed(1000 * epoch)",
    say="augmentation: draws the same numbers as rank 0",
    report="fairseq #1383; torchsig #361",
)
fault(
    "same_numbers_in_epochs",
    "np.random.seed(torch.initial_seed() % 2**32)",
    "np.random.seed(worker)",
    flags=ONE + " --workers 2",
    options="--steps 20",
    say="augmentation: in each epoch",
    report="pytorch #41329; Lightning #20412",
)
fault(
    "same_numbers_in_workers",
    "np.random.seed(torch.initial_seed() % 2**32)",
    "np.random.seed(epoch)",
    flags=ONE + " --workers 2",
    options="--steps 12",
    say="augmentation: worker 1 of rank 0 draws the same numbers as worker 0",
    report="pytorch #5059; CenterNet #233; stackoverflow 67180955 (TrainCheck)",
)
fault(
    "split_differs",
    "train_data, val_data = Images(256, 0, 0.01), Images(50, 1, 0)",
    "train_data, val_data = torch.utils.data.random_split(Images(306, 0, 0), [256, 50])",
    say="validation: of its samples are trained on",
    report="OpenTau #498; Lightning #7728, #18638",
)
fault(
    "validation_drops_last",
    "sampler=range(rank, len(val_data), world)",
    "sampler=range(rank, len(val_data), world), drop_last=True",
    say="validation: 18 of 50 samples are left out",
    report="vision #4559; examples #461",
)
fault(
    "validation_counts_twice",
    "sampler=range(rank, len(val_data), world)",
    "sampler=DistributedSampler(val_data)",
    "Images(50, 1, 0)",
    "Images(51, 1, 0)",
    say="validation: 1 of 51 samples count twice",
    report="pytorch #25162; rf-detr #1507",
)
# == Snapshots, and comparisons ====================================================================
fault(
    "all_ranks_save",
    "        if args.snapshot:",
    "    if True:\n        if args.snapshot:",
    "            os.replace(",
    "            dist.barrier()\n            rank or os.replace(",
    flags=TWO + " --snapshot {tmp}/s.pt",
    options="--steps 12",
    say="snapshot: 2 processes write",
    report="apex #886; transformers #28015",
)
fault(
    "written_in_place",
    'args.snapshot + ".tmp")\n            os.replace(args.snapshot + ".tmp", args.snapshot)',
    "args.snapshot)",
    flags=TWO + " --snapshot {tmp}/s.pt",
    say="snapshot: written over in place",
    report="nanoGPT #467",
)
fault(
    "hangs",
    STEP,
    STEP + "            if i == 4 and rank == 0:\n                dist.barrier()\n",
    options="--timeout 20",
    say=r"ending: hangs after step \d: .*train.py line \d+.*rank 1 at train.py",
    report="DeepSpeed #5794 (TrainCheck)",
)
RESUME = {"flags": TWO + " --snapshot {tmp}/s.pt", "options": "--resume --steps 24"}
fault(
    "optimizer_not_resumed",
    '    optimizer.load_state_dict(state["optimizer"])\n',
    "",
    **RESUME,
    say="resume: computation: .* differs after step 9.*state is saved, but not loaded",
    report="minGPT-ddp; stylegan2-ada #108",
)
fault(
    "optimizer_not_saved",
    '    optimizer.load_state_dict(state["optimizer"])\n',
    "",
    '"optimizer": optimizer.state_dict()}',
    "}",
    **RESUME,
    say="resume: computation: .* differs after step 9.*state is not saved",
    report="distributed-training-guide 02 (its snapshot has no optimizer)",
)
fault(
    "optimizer_made_again",
    '    scheduler.load_state_dict(state["scheduler"])\n',
    '    scheduler.load_state_dict(state["scheduler"])\n'
    "    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)\n"
    "    optimizer.param_groups[0]['lr'] = scheduler.optimizer.param_groups[0]['lr']\n"
    "    scheduler.optimizer = optimizer\n",
    **RESUME,
    say="resume: computation: .* differs after step 9.*then the optimizer is made again",
    report="a stranger's fault, put in without reading check.py",
)
fault(
    "schedule_not_resumed",
    '    scheduler.load_state_dict(state["scheduler"])\n',
    "",
    **RESUME,
    say="resume: computation: .* differs after step 10.*The rate differs",
    report="Lightning's and Accelerate's lists of what a snapshot must have",
)
fault(
    "random_numbers_not_resumed",
    "    torch.manual_seed(1000 * epoch + rank)  # so",
    "    torch.manual_seed(1000 * (epoch - first_epoch) + rank)  # so",
    **RESUME,
    say="resume: computation: .* differs after step 9.*random numbers",
    report="Accelerate's list of what a snapshot must have",
)
fault(
    "epoch_not_resumed",
    '    first_epoch = state["epoch"]\n',
    "",
    **RESUME,
    say="resume: data: .* samples of step 9 ",
    report="Lightning #19970; the_well #77; Automodel #763",
)
fault(
    "state_in_no_state_dict",
    "    def forward(self, x):\n",
    "        self.count = 0\n\n    def forward(self, x):\n        self.count += self.training\n"
    "        x = x * (1 + self.count / 100)\n",
    **RESUME,
    say="resume: computation: .* differs after step 9.* count of the model differs.*no state_dict",
    report="benchmark_VAE #41",
)
fault(
    "state_in_another_type",
    '    optimizer.load_state_dict(state["optimizer"])\n',
    '    optimizer.load_state_dict(state["optimizer"])\n    for each in optimizer.state.values():\n'
    '        each["momentum_buffer"] = each["momentum_buffer"].double()\n',
    "SGD(ddp.parameters(), lr=0.05, momentum=0.9)",
    "SGD(ddp.parameters(), lr=0.05, momentum=0.9, foreach=False)",
    **RESUME,
    say="resume: .*The optimizer's state has other types: momentum_buffer torch.float",
    report="torchtitan #4615",
)
AGAINST = "--steps 5 --against 'PYTHON SCRIPT --processes 1'"
fault(
    "loss_summed",
    "    for i, (x, y) in enumerate(loader):\n",
    "    ddp.eval()\n    for i, (x, y) in enumerate(loader):\n",
    "cross_entropy(ddp(x), y)",
    "world * cross_entropy(ddp(x), y)",
    "Images(256, 0, 0.01)",
    "Images(256, 0, 0)",
    options=AGAINST,
    say="against: computation: .* differs after step 1",
    report="Lightning #6789; nanoGPT #354",
)
fault(
    "other_order_than_alone",
    "    for i, (x, y) in enumerate(loader):\n",
    "    ddp.eval()\n    for i, (x, y) in enumerate(loader):\n",
    "    sampler.set_epoch(epoch)\n",
    "    sampler.set_epoch(epoch + 100 * world)\n",
    "Images(256, 0, 0.01)",
    "Images(256, 0, 0)",
    options=AGAINST,
    say="against: data: .* samples of step 1",
    report="TTrace's comparison",
)
# == Scripts of this collection ====================================================================
fault(
    "mnist_share",
    "share = args.batch_size // world_size",
    "share = args.batch_size",
    script=MNIST,
    flags=SYNTHETIC + " --batch_size 120",
    options="--steps 3 --against 'PYTHON ROOT/singlegpu/mnist.py --synthetic --batch_size 120'",
    say="against: data: .* samples of step 1",
    report="Lightning #6789",
)
fault(
    "mnist_sum",
    "loss.backward()  #",
    "(loss * world_size).backward()  #",
    script=MNIST,
    flags=SYNTHETIC,
    options="--steps 3 --against 'PYTHON ROOT/singlegpu/mnist.py --synthetic'",
    say="against: computation: .* differs after step 1",
    report="nanoGPT #354",
)
# The same kinds in a longer script: an epoch of 12 steps, and two processes.
SMALL = ("60_000 if is_train else 10_000", "400 if is_train else 51")
CLASS = "\n\ndef read_data(args):"


def images(name, *edits, flags="", **more):
    fault(name, *SMALL, *edits, script=IMAGES, flags=f"--num_gpus 2 {MLP} {flags}", **more)


images(
    "images_alone",
    "backend, init_method, rank=rank, world_size=world_size)",
    'backend, f"{init_method}{rank}", rank=0, world_size=1)',
    options="--steps 5",
    say="processes: 2 train, each alone",
    report="Lightning #5319",
)
images(
    "images_hangs",
    "        bar.update()\n",
    "        bar.update()\n        if step == 5 and rank == 0:\n            dist.barrier()\n",
    options="--timeout 20",
    say=r"ending: hangs after step 5: rank 0 at images.py line \d+",
    report="DeepSpeed #5794",
)
images(
    "images_past_ddp",
    "batch_loss(ddp_model, batch, args)",
    "batch_loss(network, batch, args)",
    options="--steps 5",
    say="weights: past DDP",
    report="minimind #853",
)
images(
    "images_rate_0",
    "return args.learning_rate * (20",
    "return 0 * args.learning_rate * (20",
    options="--steps 5",
    say="updates: the rate is 0",
    report="Megatron-LLM #33",
)
images(
    "images_head_without_optimizer",
    "AdamW(model.parameters()",
    "AdamW(model[:4].parameters()",
    say="gradients: 2 weights with gradients are in no optimizer: 6.bias, 6.weight",
    report="accelerate #2665",
)
images(
    "images_no_zero_grad",
    "        optimizer.zero_grad()\n",
    "",
    options="--steps 5",
    say="accumulation: not zeroed before step 2",
    report="pytorch #47175",
)
images(
    "images_clipped_while_scaled",
    "            scaler.unscale_(optimizer)\n",
    "",
    flags="--precision fp16 --max_grad_norm 1",
    options="--steps 5",
    say="finite: unscale_",
    report="examples #1196",
)
images(
    "images_rate_set_afterwards",
    "        for group in optimizer.param_groups:\n            group",
    "        schedule.step()\n        for group in optimizer.param_groups:\n            group",
    "    done_steps = 0\n",
    "    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)\n    done_steps = 0\n",
    options="--steps 5",
    say=r"schedule: before optimizer.step|uses the rate .* but the schedule says",
    report="dn3 #6",
)
images(
    "images_weights_in_bf16",
    "create_model(args, train_data).to(device)",
    "create_model(args, train_data).to(device, torch.bfloat16)",
    "images = images.float() / 255",
    "images = images.bfloat16() / 255",
    options="--steps 5",
    say="precision: weights are bfloat16, but precision is to be fp32",
    report="trl #3910",
)
images(
    "images_eval_after_validation",
    "    model.train()\n",
    "",
    say="modes: layers train in eval.* from step 13",
    report="lerobot #3668",
)
images(
    "images_same_masks",
    "hash((args.seed, step, rank))",
    "hash((args.seed, step))",
    say="layers: draw the same masks",
    report="transformers #31412",
)
images(
    "images_same_samples",
    ":, dist.get_rank()].reshape",
    ":, 0].reshape",
    options="--steps 5",
    say="shares: same samples",
    report="openspeech #149",
)
images(
    "images_one_order",
    "default_rng([args.seed, epoch])",
    "default_rng([args.seed, 0])",
    say="order: the first two epochs have one order",
    report="pytorch #31771",
)
images(
    "images_input_lost",
    '            mark("data")\n',
    '            batch[0].mul_(step != 7 or rank)\n            mark("data")\n',
    say="inputs: the input of step 7 in rank 0 is all zeros",
    report="pytorch #84803",
)
images(
    "images_change",
    CLASS,
    "\n\nclass Darker(StackDataset):\n    def __getitem__(self, i):\n"
    "        self.datasets[0][i] //= 2\n        return super().__getitem__(i)\n" + CLASS,
    "data = StackDataset(",
    "data = Darker(",
    options="--steps 30",
    say=r"samples: sample \d+ of Darker has other bytes later. Copy it",
    report="pycls #21",
)
images(
    "images_same_noise",
    CLASS,
    "\n\nclass Noisy(StackDataset):\n    def __getitem__(self, i):\n"
    "        images, labels = super().__getitem__(i)\n"
    "        return images // (1 + np.random.randint(3)), labels\n" + CLASS,
    "data = StackDataset(",
    "data = Noisy(",
    "    torch.manual_seed(args.seed)  # the",
    "    np.random.seed(args.seed)\n    torch.manual_seed(args.seed)  # the",
    say=r"augmentation: rank 1 draws the same numbers as rank 0 \(numpy\)",
    report="fairseq #1383",
)
images(
    "images_validation_lacks_some",
    "len(data), dist.get_world_size()))",
    "len(data) - 10, dist.get_world_size()))",
    say="validation: 10 of 51 samples are left out",
    report="vision #4559",
)
images(
    "images_written_in_place",
    'f"{args.snapshot}.tmp")\n',
    "args.snapshot)\n",
    'os.replace(f"{args.snapshot}.tmp", args.snapshot)',
    "pass",
    flags="--snapshot {tmp}/s.pt --eval_every 4",
    say="snapshot: s.pt is written over in place",
    report="nanoGPT #467",
)
images(
    "images_optimizer_not_saved",
    '"optimizer": optimizer, ',
    "",
    flags="--snapshot {tmp}/s.pt",
    options="--resume --steps 14",
    say="resume: computation: .*The optimizer's state is not saved",
    report="minGPT-ddp",
)
images(
    "images_other_order_than_alone",
    "default_rng([args.seed, epoch])",
    "default_rng([args.seed, epoch, dist.get_world_size()])",
    options=f"--steps 4 --against 'PYTHON SCRIPT {MLP} --num_gpus 1'",
    say="against: data: .* samples of step 1",
    report="TTrace's comparison",
)
