"""The watch."""

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import pickle
import random
import re
import socket
import sys
import time
import weakref
import zlib
from collections import defaultdict


def process_name(pid):
    return f"{socket.gethostname()}-{pid}"


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor: the part that is here


def bits(tensor):  # a number for all of them, on their device
    tensor = local(tensor)
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    flat = tensor.contiguous().flatten().view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # else it cannot be viewed so
    flat = flat.view({0: torch.int64, 4: torch.int32}.get(flat.numel() % 8, torch.int8))
    if hash_tensor and flat.numel() and flat.device.type in ("cpu", "cuda"):  # since torch 2.9
        return change(hash_tensor(flat), torch.int64)
    return flat.long().sum()


@functools.lru_cache
def factors(length, device):  # a longer row has the same first ones: zeros after it add nothing
    own = torch.Generator().manual_seed(0)  # the training's generators stay as they are
    return change(torch.randint(2**62, (length,), generator=own) * 2 + 1, device)


@functools.lru_cache
def directions(length, device):  # random numbers of mean 0 and variance 1. Signs might add to 0
    kind = torch.float32 if device.type == "mps" else torch.float64
    rows = [factors(length, torch.device("cpu")) >> shift & 0xFFFF for shift in (9, 29)]
    return (change(torch.stack(rows), device, kind) / 0xFFFF - 0.5) * 12**0.5


def sketch(tensor):  # random projections: about as large as the tensor
    if os.environ["CHECK_COMPARES"] and hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()  # all ranks of its mesh come here
    return project(local(tensor).flatten()[None])[0]


def numbers_of(batch):  # for each tensor, of each sample: a hash, and a random projection
    tensors = [local(x) for x in tensors_of(batch) if x.dim() and not x.is_sparse]
    tensors = [x for x in tensors if len(x) == len(tensors[0]) and x.numel()]
    for rows in [x.reshape(len(x), -1).contiguous() for x in tensors]:
        words = rows.view(getattr(torch, f"int{min(64, 8 * rows.element_size())}")).long()
        yield (words * factors(words.shape[1], words.device)).sum(1), project(rows)[:, 0]


def project(rows):  # each on two random axes, so that similar rows have similar numbers
    axes = directions(rows.shape[1], rows.device)
    return change(rows.abs() if rows.is_complex() else rows, axes.dtype) @ axes.T


def weights_of(optimizer):
    weights = [x for group in optimizer.param_groups for x in group["params"] if not x.is_meta]
    return [x for x in weights if id(x) not in watch.elsewhere] or weights


def tensors_of(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def random_states(own, in_model=False):  # numbers for those of all generators, by name
    found = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if in_model and torch.accelerator.is_available():
        found["device"] = getattr(torch.get_device_module(), "get_rng_state", torch.get_rng_state)()
    for name, x in own:
        get_state = getattr(x, "getstate", None) or getattr(x, "get_state", None)
        found[f"its {name}"] = get_state() if get_state else x.bit_generator.state
    arrays = {name: x.numpy() if hasattr(x, "numpy") else x for name, x in found.items()}
    return {name: zlib.crc32(pickle.dumps(x)) for name, x in arrays.items()}


def own_generators(data, depth=4):  # the names and random generators that an object holds
    for name, value in [*getattr(data, "__dict__", {}).items()]:
        for x in value[:20] if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, torch.Generator | random.Random) or hasattr(type(x), "_bit_generator"):
                yield name, x
            elif depth and not isinstance(x, (type, type(os))):
                yield from own_generators(x, depth - 1)


def used(before, after):  # random states: equal ones drew equal numbers
    return {x: [old, after.get(x)] for x, old in before.items() if old != after.get(x)}


def shard_of(weight):  # which part of a DTensor is here; "" if it is all of it
    mesh = getattr(weight, "device_mesh", None)
    places = zip(weight.placements, mesh.get_coordinate()) if mesh else ()
    return " ".join(f"{kind}{place}" for kind, place in places if not kind.is_replicate())


def careful(hook):  # its own errors are reported, and do not end the training
    def safe(*args, **kwargs):
        try:
            if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):  # no hook in a graph
                return hook(*args, **kwargs)
        except Exception as error:
            watch.record("trouble", text=f"{hook.__name__}: {type(error).__name__}: {error}"[:200])

    return safe


def wrap(owner, name, before=lambda *a, **k: None, after=lambda *a, **k: None):
    plain, before, after = getattr(owner, name), careful(before), careful(after)

    @functools.wraps(plain)
    def hooked(*args, **kwargs):
        before(*args, **kwargs)
        result = plain(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, hooked)


class Watch:  # what is known in a process; its methods are the hooks
    def __init__(self):
        self.optimizers = {}  # id: what is known of an optimizer that took a step
        self.made, self.loaded = weakref.WeakSet(), []  # all optimizers; those with a loaded state
        self.stepping = []  # optimizers that take a step right now
        self.names, self.owners, self.ddps = {}, {}, {}  # by the id of a parameter
        self.modules = weakref.WeakSet()  # that were called
        self.elsewhere = set()  # ids of weights that other processes train, as stages of a pipeline
        self.now = defaultdict(int)  # of the step under way: backward passes, and what DDP did
        self.state = defaultdict(int)  # of this process: depth of modules, passes over data, calls
        self.done, self.limit, self.pid = 0, int(os.environ["CHECK_STEPS"]), 0  # steps

    def record(self, kind, **values):  # here tensors become numbers, so that Python waits
        if self.pid != os.getpid():  # also in a process that was forked
            self.pid = os.getpid()
            path = f"{os.environ['CHECK_SEEN']}/{process_name(self.pid)}"
            self.file, self.stack = open(path, "a", 1), open(f"{path}.stack", "w")
            self.record("process", parent=os.environ["CHECK_PARENT"])
        self.file.write(json.dumps({"kind": kind, **values}, default=lambda x: x.tolist()) + "\n")
        if kind in ("loss", "step", "batch"):  # if no more comes, Python writes where it stands
            faulthandler.dump_traceback_later(float(os.environ["CHECK_STUCK"]), file=self.stack)

    def learn_names(self):  # of weights; and returns what else the modules hold, for resume
        found = {}
        for path, part in [x for module in self.modules for x in module.named_modules()]:
            path = [x for x in path.split(".") if x not in ("", "module", "_orig_mod")]
            for name, weight in part.named_parameters(recurse=False):
                self.names.setdefault(id(weight), ".".join([*path, name]))
                self.owners.setdefault(id(weight), str(type(part).__mro__))
            if isinstance(part, DDP) or not os.environ["CHECK_COMPARES"]:
                continue
            buffers = {name: part._buffers[name] for name in part._non_persistent_buffers_set}
            for name, x in (vars(part) | buffers).items():
                if isinstance(x, (int, float, torch.Tensor)) and name != "training":
                    found[".".join([*path, name])] = bits(x) if isinstance(x, torch.Tensor) else x
        return found

    def before_module(self, module, args):
        self.state["depth"] += 1
        grad = torch.is_grad_enabled()
        if isinstance(module, DDP) and grad and not self.state["in_backward"]:
            self.now["ddp"] += 1
            self.now["averages"] = module.require_backward_grad_sync
            self.now["in_no_sync"] = not module.require_backward_grad_sync
        if self.state["depth"] > 1 or self.state["in_backward"] or self.done >= self.limit:
            return
        self.modules.add(module)
        modules = [*module.modules()]
        norms = [x for x in modules if getattr(x, "running_mean", None) is not None]
        if not grad and any(getattr(x, "momentum", 0) is None for x in norms):
            return  # swa_utils.update_bn() makes statistics
        layers = [x for x in modules if "Dropout" in type(x).__name__ and getattr(x, "p", 0)]
        layers += [x for x in norms if any(y.requires_grad for y in x.parameters()) or not grad]
        kwargs = sys._getframe(2).f_locals.get("kwargs", {})  # global hooks get none from PyTorch
        first = [x for x in tensors_of(args) if x.dim() > 1 and x[:1].numel() > 1][:1]
        self.state["call"] += 1
        values = {"call": self.state["call"], "pass": self.state.get("pass"), "grad": grad}
        values |= {"step": self.done, "module": type(module).__name__, "norms": norms}
        is_off = not (grad and getattr(module, "module", module).training)  # else a part may rest
        values |= {"layers": len(layers), "in_eval": sum(is_off and not x.training for x in layers)}
        values |= {"zero": any(not x.any() for x in first), "samples": 0, "near": 0}
        for i, (hashes, near) in enumerate(numbers_of((args, kwargs))):
            values["samples"] += (i * 2 + 1) * hashes
            values["near"] += near
        own = [x for part in modules for x in own_generators(part, depth=0)]
        module.__dict__["_check"] = values | {"random": random_states(own, in_model=True)}, own

    def after_module(self, module, args, output):
        self.state["depth"] = max(0, self.state["depth"] - 1)
        (values, own), outputs = module.__dict__.pop("_check", (None, ())), tensors_of(output)
        if isinstance(module, (torch.nn.Linear, torch.nn.modules.conv._ConvNd)) and outputs:
            kind, device = outputs[0].dtype, outputs[0].device.type
            if torch.is_autocast_enabled(device) and kind == torch.float32 == module.weight.dtype:
                self.record("autocast", module=type(module).__name__, gives=str(kind)[6:])
        if values:
            norms = [] if values["grad"] else values["norms"]
            values["norms"] = [bits(x.running_mean) for x in norms]  # DDP sent them at its start
            values["random"] = used(values["random"], random_states(own, in_model=True))
            self.record("forward", **values)
            for x in [x for x in outputs if x.grad_fn is not None and values["grad"]]:
                x.register_hook(lambda _, call=values["call"]: self.record("trained", call=call))

    def before_backward(self, tensors, *args, **kwargs):
        self.now["backward"] += 1
        self.now["averaged"] += self.now.pop("averages", 0)
        self.state["backwards"] += 1
        for known in self.optimizers.values():
            weights = weights_of(known["optimizer"])
            clean = not any(bits(x.grad).item() for x in weights if x.grad is not None)
            known["clean"] = clean or bool(known["clean"])  # None: no backward since the step
            if clean and self.now["had_grads"] and len(self.made) == 1 and not self.stepping:
                new = sum(x._version for x in weights), self.state["call"] > self.now["call"]
                self.now["wiped"] += new == (self.now["version"], True)
        loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        value = local(loss).item() if loss.numel() == 1 else 0
        if self.done < self.limit:
            self.record("loss", value=value, step=self.done, **{"pass": self.state.get("pass")})
        self.state["in_backward"] = 1

    def after_backward(self, result, *args, **kwargs):
        self.state["in_backward"] = 0
        weights = [x for optimizer in self.made for x in weights_of(optimizer)]
        self.now["had_grads"] = any(x.grad is not None for x in weights)
        self.now |= {"version": sum(x._version for x in weights), "call": self.state["call"]}
        if not self.optimizers and self.state["backwards"] >= 20 * self.limit:
            self.end()  # a script without an optimizer

    def before_step(self, optimizer, args, kwargs):
        if not self.now["backward"] and not any(x.get("lr", 1) for x in optimizer.param_groups):
            return  # by such a step, torch.distributed.checkpoint makes an optimizer's state
        if optimizer in self.stepping:
            self.stepping.clear()  # its last step ended by an error, or a subclass calls its step
        self.stepping.append(optimizer)
        if len(self.stepping) > 1:  # one optimizer calls another, as ZeroRedundancyOptimizer does
            return
        if id(optimizer) not in self.optimizers:
            known = {"number": len(self.optimizers), "step": 0, "clean": True}
            self.optimizers[id(optimizer)] = known | {"optimizer": optimizer}
            self.record_start(optimizer, known["number"])
        known = self.optimizers[id(optimizer)]
        known |= {"backward": self.now["backward"], "values": self.gradients_of(optimizer, known)}

    def gradients_of(self, optimizer, known):
        weights, scheduler = weights_of(optimizer), known.get("scheduler", lambda: None)()
        grads = [None if x.grad is None else local(x.grad) for x in weights]
        finite = [x is None or (x._values() if x.is_sparse else x).isfinite().all() for x in grads]
        values = {x: self.now[x] for x in "ddp averaged in_no_sync wiped clipped had_grads".split()}
        values["grads"] = [None if x is None else bits(x) for x in grads]
        skips = hasattr(optimizer, "found_inf")  # a fused one is called, and leaves such a step out
        values["infinite"] = [i for i, good in enumerate(finite) if not (good or skips)]
        values["rates"] = [float(group.get("lr", 1)) for group in optimizer.param_groups]
        is_new = self.now["autocasts"] or not self.now["backward"]  # another optimizer stepped
        values["stale"] = torch.is_autocast_enabled(weights[0].device.type)
        values["stale"] &= torch.is_autocast_cache_enabled() and not is_new
        values["said"] = [float(x) for x in scheduler.get_last_lr()] if scheduler else []
        return values

    def record_start(self, optimizer, number):
        self.learn_names()
        dist = torch.distributed
        group = dist.is_available() and dist.is_initialized()
        here = {id(x) for module in self.modules for x in module.parameters()}
        far = {id(x) for x in weights_of(optimizer) if x.grad is None} - here
        self.elsewhere |= far if group and not self.ddps else set()
        weights = weights_of(optimizer)
        ddp = next((self.ddps[id(x)]() for x in weights if id(x) in self.ddps), None)
        groups = dist.distributed_c10d._world.pg_group_ranks.values() if group else []
        owners = [self.owners.get(id(x), "") for x in weights]
        split = [getattr(x, "tensor_model_parallel", None) for x in weights]  # Megatron's mark
        device = weights[0].device
        machine = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        if device.type != "cpu":
            machine = getattr(torch.get_device_module(device), "get_device_name", str)()
        values = {"number": number, "step": 0, "loads": len(self.loaded), "machine": machine}
        values["names"] = [self.names.get(id(x), f"parameter {i}") for i, x in enumerate(weights)]
        rank, world = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
        values |= {"rank": rank, "world": world, "is_loaded": optimizer in self.loaded}
        values |= {"ddp": dist.get_process_group_ranks(ddp.process_group) if ddp else []}
        values["mesh"] = [x.device_mesh.mesh for x in weights if hasattr(x, "device_mesh")][:1]
        parts = [part for module in self.modules for part in module.modules()]
        values["is_fsdp"] = any("FSDPModule" in str(type(part).__mro__) for part in parts)
        values["in_ddp"] = [id(x) in self.ddps for x in weights]
        values |= {"shapes": [[*x.shape] for x in weights], "shards": [*map(shard_of, weights)]}
        values["whole"] = ["Norm" in x if y is None else not y for x, y in zip(owners, split)]
        values |= {"trainable": [x.requires_grad for x in weights], "groups": [*map(len, groups)]}
        values["dtypes"] = [str(x.dtype).removeprefix("torch.") for x in weights]
        values |= {"weights": [bits(x) for x in weights], "sketches": [sketch(x) for x in weights]}
        values["shared"] = device.type == "cpu" and all(local(x).is_shared() for x in weights)
        values["place"] = [socket.gethostname(), str(device), torch.accelerator.device_count()]
        words = " ".join([*sys.argv[1:], torch.__version__, sys.version])
        self.record("start", **values, settings=re.sub(r"\S*rank\S*( \d+)?", "", words))

    def after_step(self, optimizer, args, kwargs):
        if not self.stepping or optimizer is not self.stepping[0]:
            return
        known = self.optimizers[id(optimizer)]
        known["step"] += 1
        self.done = max(self.done, known["step"])
        self.note_step(optimizer, known)
        self.stepping.clear()
        self.now.clear()
        known["clean"] = None
        if 0 < int(os.environ["CHECK_PAUSE"]) <= known["step"]:
            time.sleep(0.2)  # the signal to stop comes now
        counts = [each["step"] for each in self.optimizers.values()]
        if min(counts) >= self.limit or max(counts) >= 2 * self.limit:
            self.end()

    @careful
    def note_step(self, optimizer, known):
        if known["backward"] != self.now["backward"]:  # a closure ran in it
            known["values"] = self.gradients_of(optimizer, known)
        weights, states = weights_of(optimizer), optimizer.state.values()
        states = [(key, x) for each in states if isinstance(each, dict) for key, x in each.items()]
        values = {name: known[name] for name in ("number", "step", "clean")} | known["values"]
        values["types"] = sorted({f"{key} {x.dtype}" for key, x in states if hasattr(x, "dtype")})
        values |= {"weights": [bits(x) for x in weights], "sketches": [sketch(x) for x in weights]}
        values["attributes"] = self.learn_names()
        self.record("step", **values)
        if known["step"] == 2:
            held = {id(x) for each in self.made for y in each.param_groups for x in y["params"]}
            lost = {x for module in self.modules for x in module.parameters() if x.grad is not None}
            lost = [self.names.get(id(x), "?") for x in lost if id(x) not in held]
            self.record("lost", names=sorted(lost))

    def end(self):
        self.record("end")
        faulthandler.cancel_dump_traceback_later()
        raise SystemExit(0)  # leaves the script as sys.exit() would

    def start_pass(self, iterator, loader):
        own = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        values = {"pass": self.state["passes"], "data": loader.dataset, "size": None}
        values["replaces"] = bool(getattr(loader.sampler, "replacement", False))
        with contextlib.suppress(TypeError, NotImplementedError):  # as of a stream
            values["size"] = len(loader.dataset)
            values["batches"] = len(own)
        iterator._check = {"batches": None} | values | {"maker": type(own).__module__.split(".")[0]}
        self.state["passes"] += 1

    def note_batch(self, batch, iterator):
        one = getattr(iterator, "_check", None)
        if one is None or self.done >= self.limit:
            return
        self.state["pass"], data = one["pass"], one["data"]
        index = iterator._check_at.pop(0)  # workers, too, keep the order
        index = list(index) if hasattr(index, "__iter__") else [index]
        index = [int(x) if hasattr(x, "__index__") else None for x in index]
        while isinstance(data, torch.utils.data.Subset):  # as of random_split()
            index = [None if i is None else int(data.indices[i]) for i in index]
            data = data.dataset
        split = data is not one["data"] and [type(data).__name__, len(data)]
        values = one | {"index": index, "split": split, "data": type(data).__name__}
        parts = [*batch.values()] if isinstance(batch, dict) else batch
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        rows = [len(x) for x in parts if isinstance(x, torch.Tensor) and x.dim()]
        parts = [hashes for hashes, _ in numbers_of(batch)][:3]
        self.record("batch", **values, rows=rows, parts=parts)

    def before_fetch(self, fetcher, index):  # in a worker, if there are some
        fetcher._check_states = random_states(own_generators(fetcher.dataset))

    def after_fetch(self, result, fetcher, index):
        data, states = fetcher.dataset, random_states(own_generators(fetcher.dataset))
        drawn = used(fetcher._check_states, states)
        while isinstance(data, torch.utils.data.Subset):
            data = data.dataset
        worker = torch.utils.data.get_worker_info()
        values = {"worker": worker and worker.id, "at": time.time(), "used": drawn}
        parent = process_name(os.getppid() if worker else os.getpid())
        self.record("fetch", parent=parent, data=type(data).__name__, **values)

    def note_schedule(self, scheduler, *args, **kwargs):
        module = sys._getframe(3).f_globals.get("__name__", "")
        if module == "torch.optim.lr_scheduler" or getattr(scheduler, "_is_initial", False):
            return
        optimizer = getattr(scheduler, "optimizer", None)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        known = self.optimizers.get(id(optimizer), {"step": self.done, "number": 0})
        known["scheduler"] = weakref.ref(scheduler)
        values = {"number": known["number"], "step": known["step"] or self.now["scaled"]}
        self.record("schedule", name=type(scheduler).__name__, caller=module, **values)

    def note_clip(self, *args, **kwargs):  # 2: while scaled; 3: not between backward() and step()
        self.now["clipped"] = 1 + (self.now["scaled"] > 0) if self.now["backward"] else 3

    def note_ddp(self, result, ddp, *args, **kwargs):
        self.ddps |= {id(x): weakref.ref(ddp) for x in ddp.module.parameters()}

    def note_file(self, kind, path):
        path = getattr(path, "name", path)
        if isinstance(path, (str, os.PathLike)):
            self.record(kind, writer=process_name(os.getpid()), path=os.path.abspath(path))

    def note_flags(self, result, *args, **kwargs):
        flags = {name: x for name, x in vars(result[0]).items() if isinstance(x, (str, int, float))}
        self.record("flags", values=flags)


def install():
    """PyTorch calls this at the end of `import torch`."""
    global watch, torch, hash_tensor, change, DDP
    import torch
    from torch.nn.modules import module
    from torch.optim import lr_scheduler, optimizer
    from torch.utils.data import DataLoader, _utils, dataloader

    watch, DDP = Watch(), torch.nn.parallel.DistributedDataParallel
    hash_tensor, change = getattr(torch, "hash_tensor", None), torch.Tensor.to  # may be replaced
    optimizer.register_optimizer_step_pre_hook(careful(watch.before_step))
    optimizer.register_optimizer_step_post_hook(watch.after_step)
    module.register_module_forward_pre_hook(careful(watch.before_module))
    module.register_module_forward_hook(careful(watch.after_module), always_call=True)
    kinds = [lr_scheduler.LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "step" in vars(kind):
            wrap(kind, "step", watch.note_schedule)
    iterator, now = dataloader._BaseDataLoaderIter, watch.now
    wrap(iterator, "__next__", after=watch.note_batch)
    wrap(iterator, "_next_index", after=lambda i, x: vars(x).setdefault("_check_at", []).append(i))
    wrap(iterator, "_reset", lambda x, *a, **k: setattr(x, "_check_at", []))
    wrap(DataLoader, "__iter__", after=watch.start_pass)
    for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
        wrap(fetcher, "fetch", watch.before_fetch, watch.after_fetch)
    wrap(torch.autograd, "backward", watch.before_backward, watch.after_backward)
    wrap(DDP, "__init__", after=watch.note_ddp)
    wrap(argparse.ArgumentParser, "parse_known_args", after=watch.note_flags)
    kind = torch.optim.Optimizer
    wrap(kind, "__init__", lambda x, *a, **k: watch.made.add(x))
    wrap(kind, "state_dict", lambda x, *a, **k: x.state and watch.record("saved"))
    wrap(kind, "load_state_dict", after=lambda _, x, *a, **k: x.state and watch.loaded.append(x))
    wrap(torch.autocast, "__enter__", lambda *a: now.update(autocasts=1))
    wrap(torch, "save", lambda obj, f, *a, **k: watch.note_file("save", f))
    for name in ("replace", "rename"):
        wrap(os, name, lambda src, *a, **k: watch.note_file("move", src))
    wrap(torch.amp.GradScaler, "scale", lambda x, *a, **k: now.update(scaled=x.get_scale() != 1))
    wrap(torch.amp.GradScaler, "unscale_", lambda *a, **k: now.update(scaled=now["scaled"] and -1))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrap(torch.nn.utils, name, watch.note_clip)
