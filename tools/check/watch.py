"""The watch: hooks that note what a training does, and change nothing in it.

PyTorch loads this file in each process of a job, at the end of `import torch`. Each process writes
a file of records, and the rules read them later. A record is a line of JSON. Its `kind` is one of:

process    the first one of a process
  parent           machine and number of the process that has started the job
missing    PyTorch has no such internal name
  name, kinds      the name, and the kinds of faults that go unseen without it
trouble    a hook has failed
  text             its name, and the error
flags      the script has read its command line with argparse
  values           {flag: value}, of texts and numbers
start      an optimizer is about to take its first step. A list has an item for each of its weights
  optimizer, step  its number, in the order of first steps; 0. A later optimizer may have the same
                   weights, or take the place of one that is gone. It then has the number of the
                   earlier one, and no start
  rank, world      of torch.distributed; 0 and 1 without it
  group_sizes      the sizes of all process groups
  settings         flags and versions, as one text, without what names a rank
  place            [host, device, number of devices of the host]
  machine          the GPU's name, or the CPU's kernels and threads
  names, shapes, dtypes, trainable   of the weights. One that no module has is "parameter N"
  counts           how often each weight is in the optimizer
  numbers          how many numbers of each weight are in this process
  parts            which part of each weight is in this process; "" where it is the whole
  is_whole         whether each rank has the whole weight, if the model is split by hand
  in_ddp           whether DDP knows the weight
  stands_in        whether optimizers hold flat parts (ZeRO) in place of the weights of modules
  exchanges        whether all_to_all was called before, as between experts
  ddp_ranks        the ranks that DDP averages over; [] without DDP
  mesh             the ranks of the mesh of a sharded model, in nested lists; [] without one
  sharded_by       "", "FSDP1", "FSDP2"
  shares_memory    whether processes share the memory of all weights
  states_loaded    how many optimizers have loaded a state that is not empty
  has_loaded       whether this one has
  bits, sketches   of the weights; see the functions of these names
step       an optimizer has taken a step. A list has an item for each of its weights
  optimizer, step  its number; its steps until now, from 1 on
  began            "zeroed": before at least one backward pass since its own last step, all
                   gradients were 0 or None. Its first step also gets this, though it is not known.
                   "old": gradients were left before each of these passes. "unchanged": there was
                   no backward pass
  keeps            whether a loss that it shares with another optimizer, which has since stepped,
                   has left gradients that this step adds to those of its own loss
  gradients        their bits; null: no gradient; 0: all zeros
  infinite         indices of weights with inf or nan in the gradient
  had_gradients    whether the last backward pass has left any gradient; false if there was none
                   since the last step of any optimizer
  rates            the learning rate of each group
  scheduled        the rates that the scheduler says; [] without one
  ddp_calls        forward passes of DDP since the last step
  averaged         backward passes since then in which DDP has averaged
  in_no_sync       whether DDP's last forward pass was in no_sync()
  zeroed_between   how often gradients were zeroed between two backward passes
  zeroed_unsynced  how often gradients of a pass in no_sync() were zeroed so
  clipped          "no", "right", "scaled" (by a GradScaler), "outside" (not between backward() and
                   step()), "negative" or "zero" (the limit), "nothing" (a generator of weights that
                   is used up)
  clip_norm        the largest norm that clipping has found; null: none is known
  passes           of each backward pass since gradients were zeroed, or since the last step of any
                   optimizer, the pass over a DataLoader
  one_autocast     whether an autocast that was entered before the last step is still on
  types            names and types of tensors in the optimizer's state
  attributes       {name: value or bits} of what modules hold and no state_dict saves; {} if no runs
                   are compared
  bits, sketches   of the weights
  bits_before      the bits of the weights before the step
  object           a number of the optimizer itself. Several can be one `optimizer`: those of the
                   same weights, and those that take the place of one that is gone
  weights          a number of each weight: in two optimizers it is the same for the same weight
skipped    a GradScaler has left out a step
  optimizer        its number; null if it has taken no step yet
unowned    after the second step of an optimizer
  names, shapes    of weights that have a gradient, and are in no optimizer
remade     an optimizer takes the place of one that has had the same weights
  optimizer, step  the number of both; the steps that were taken before
  types            of the old one's state, as in its last step
  has_loaded       whether the new one has loaded a state that is not empty
  is_same          whether the weights are as the old one has left them
forward    a module was called that no other module has called
  call, step       its number; the steps that were taken before
  module, number   its type; its number, in the order of first calls
  has_grad         whether gradients were on
  loader_pass      the pass over a DataLoader that gave its inputs, or else the last batch; null:
                   there was none
  layers           how many layers it has of Dropout with a rate other than 0, and of BatchNorm.
                   With gradients on, only of a BatchNorm that has weights to train
  layers_in_eval   how many of them are in eval(); 0 if the module is in train(), with gradients
  in_eval          whether the module is
  drops            a function that drops numbers though the module is in eval(), and gradients are
                   off; "": none
  norms            bits of BatchNorm's running means, where gradients were off
  autocast         the type of autocast; "": it was off
  takes_result     whether an input is the result of another module
  from_loader      whether a loader has given an input, as it is
  is_zero          whether all inputs are zeros
  samples, near    of each row of the inputs a hash, and a random projection. If from_loader, only
                   of what a loader has given; 0: no input has rows
  beginnings       [place, hashes, projections] of each column that may say where in the batch a
                   sample begins: what it adds to samples and near
  random           {generator: [state before, state after]} of those from which it has drawn
trained    a gradient has come back to the result of a call
  call             its number
autocast   autocast is on, and a layer gives float32
  module, gives    the type of the layer; the type of its result
loss       a backward pass begins
  value            of the loss; of several losses their sum; null if one of them has several numbers
  step, loader_pass   as of forward; the pass of the last call with gradients, or of the last batch
  scale            of a GradScaler; null: none has scaled the loss
cross_entropy   it is called with gradients
  step             as of forward
  sums_to_1        whether the first rows that it is given have no negative number, and the sum 1
  is_input         whether its targets that are not negative are the ids that the model was given
redrawn    a module was called in a backward pass, and random numbers were drawn
  step             the steps that were taken before
batch      a DataLoader has given a batch
  loader_pass      the number of the pass
  data, size       the type of the data set, or if it is a Subset, of the whole; the length of the
                   loader's data set (null: it has none)
  number           of the data set itself, or of the whole, in the order of first batches of this
                   process. One that is made again has another number
  split            of a Subset, as by random_split(): [type, length] of the whole; false without it
  index            of each sample in the data set; null: not known
  batches          of the whole pass; null: not known
  replaces         whether the sampler may take a sample twice
  maker            the package of the batch sampler, or where there is none, of the sampler
  rows             the length of each tensor
  hashes           of each of the first three tensors, a hash of each row
fetch      a data set has made a batch, maybe in a worker
  parent           the process that trains
  data, worker     the type of the data set; the worker's number; null: none
  at               seconds since 1970
  random           as of forward
schedule   a scheduler has stepped
  optimizer, step  whose rate it sets, or 0 if that has taken no step; the steps of that before, or
                   "skipped": none, but one was left out
  name, caller     the scheduler's type; the module that has called it
  scheduler        its number, in the order of first steps
  is_used          whether its optimizer, or one with the same groups, has ever taken a step; true
                   if it has no optimizer
saved      an optimizer has given its state, which is not empty
save       torch.save() writes a file
move       os.replace() or os.rename() moves a file from this path
moved      the same call moves it to this path
load       torch.load() reads a file. This one and the three before have the same fields
  writer, path     the process; the file
  step             the steps that were taken before
end        the last step that is watched was taken
"""

import argparse
import contextlib
import faulthandler
import functools
import gc
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import socket
import sys
import time
import types
import weakref
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field

NUM_STEPS = int(os.environ["CHECK_STEPS"])
PAUSE_AT = int(os.environ["CHECK_PAUSE"])  # the step at which the job is told to stop; 0: none
HANG_SECONDS = float(os.environ["CHECK_STUCK"])  # after so long, Python writes where it stands
COMPARES_RUNS = bool(os.environ["CHECK_COMPARES"])
BATCHES_KEPT = 8  # a step takes its inputs from the last batches of a loader
PASSES_KEPT = 4  # validations may come between a batch and its step
UNOWNED_STEP = 2  # after it, weights that have a gradient and no optimizer are looked for
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
ROWS_READ = 64  # of what cross_entropy is given
SUM_DIGIT = 0.01  # in 16 bits, shares may add up to a sum that is so far from 1
# Flags that name a process, such as --local_rank 1 of torchrun, and --worker-id=3f of Ray. A flag
# such as --lora_rank 8 names none.
NAMES_OF_RANKS = r"(?<!\S)-{0,2}"
NAMES_OF_RANKS += r"(((local|node|global|machine)[-_])?rank[= ]\d+"
NAMES_OF_RANKS += r"|worker[-_](id|launch\S*?)[= ]\S+)(?!\S)"
BLOCK = 1 << 16  # so many numbers of a row are multiplied at once, by cached vectors as long
BLOCKS = 4  # of a weight: so many blocks at once, which are to fit into the cache of a CPU

watch = None  # of this process; install() makes it


def install():
    """Puts the hooks in. PyTorch calls this at the end of `import torch`."""
    global watch, torch, DDP, change_type
    import torch

    watch, DDP = Watch(), torch.nn.parallel.DistributedDataParallel
    change_type = torch.Tensor.to  # a training may replace it by its own
    watch.open_file()
    # A child has no thread of the timer, and would wait for it for ever if it set it again.
    os.register_at_fork(
        before=faulthandler.cancel_dump_traceback_later,
        after_in_parent=watch.start_timer,
        after_in_child=careful(watch.open_file),
    )
    hooks = [hook_modules, hook_functions, hook_optimizers, hook_loaders, hook_schedulers]
    if torch.distributed.is_available():
        hooks.append(hook_exchanges)
    for put_in in (*hooks, hook_files):
        careful(put_in)()


def hook_modules():
    from torch.nn.modules import module

    module.register_module_forward_pre_hook(careful(watch.before_module))
    module.register_module_forward_hook(careful(watch.after_module), always_call=True)
    wrap(torch.autograd, "backward", watch.before_backward, watch.after_backward)
    wrap(DDP, "__init__", after=watch.note_ddp)
    wrap(torch.autocast, "__enter__", before=watch.note_autocast)


def hook_functions():
    """Hooks functions of torch.nn.functional. PyTorch's own modules call these, too."""
    functional = torch.nn.functional
    hooks = {
        "cross_entropy": watch.note_cross_entropy,
        "scaled_dot_product_attention": watch.note_attention,
    }
    for name in DROPOUTS:
        hooks[name] = watch.note_dropout
    for name, hook in hooks.items():
        plain = getattr(functional, name)
        wrap(functional, name, before=hook)
        let_jit_compile(getattr(functional, name), plain)


def let_jit_compile(hooked, plain):
    """torch.jit.script() compiles the plain function in place of the hooked one."""
    builtins = torch.jit._builtins
    name = builtins._find_builtin(plain)
    if name is not None:
        builtins._register_builtin(hooked, name)
    hooked.__prepare_scriptable__ = lambda: plain


def hook_optimizers():
    from torch.optim.optimizer import Optimizer
    from torch.optim.optimizer import register_optimizer_step_post_hook as call_after_steps
    from torch.optim.optimizer import register_optimizer_step_pre_hook as call_before_steps

    call_before_steps(careful(watch.before_step))
    call_after_steps(watch.after_step)
    wrap(Optimizer, "__init__", before=watch.note_optimizer)
    wrap(Optimizer, "state_dict", before=watch.note_state_saved)
    wrap(Optimizer, "load_state_dict", after=watch.note_state_loaded)
    wrap(torch.amp.GradScaler, "scale", before=watch.note_scale)
    wrap(torch.amp.GradScaler, "unscale_", before=watch.note_unscale)
    wrap(torch.amp.GradScaler, "step", watch.before_scaler_step, watch.after_scaler_step)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrap(torch.nn.utils, name, before=watch.note_clip, after=watch.note_norm)


def hook_exchanges():
    for name in ("all_to_all", "all_to_all_single"):
        wrap(torch.distributed, name, before=watch.note_exchange, kinds=["weights"])


def hook_loaders():
    """Most of these names are internal to PyTorch. wrap() records the ones that are missing."""
    from torch.utils.data import _utils, dataloader

    iterator = getattr(dataloader, "_BaseDataLoaderIter", None)
    kinds = ["shares", "order", "inputs", "samples", "augmentation", "validation"]
    wrap(iterator, "__next__", after=watch.note_batch, kinds=kinds)
    wrap(iterator, "_next_index", after=watch.note_index, kinds=kinds)
    wrap(iterator, "_reset", before=watch.note_reset, kinds=kinds)
    wrap(torch.utils.data.DataLoader, "__iter__", after=watch.start_pass)
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(_utils.fetch, name, None)
        wrap(fetcher, "fetch", watch.before_fetch, watch.after_fetch, kinds=["augmentation"])


def hook_schedulers():
    from torch.optim.lr_scheduler import LRScheduler

    kinds = [LRScheduler]
    for kind in kinds:  # the list grows by the classes that are derived from each
        kinds += kind.__subclasses__()
        if "step" in vars(kind):
            wrap(kind, "step", before=watch.note_schedule)


def hook_files():
    wrap(argparse.ArgumentParser, "parse_known_args", after=watch.note_flags)
    wrap(torch, "save", before=watch.note_save)
    wrap(torch, "load", before=watch.note_load)
    for name in ("replace", "rename"):
        wrap(os, name, before=watch.note_move)


def careful(hook):
    """Returns the hook as one whose own errors are reported, and do not end the training."""

    def safe(*args, **kwargs):
        try:
            if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):  # no hook in a graph
                return hook(*args, **kwargs)
        except Exception as error:
            watch.record("trouble", text=f"{hook.__name__}: {type(error).__name__}: {error}"[:200])

    return safe


def nothing(*args, **kwargs):
    pass


def wrap(owner, name, before=nothing, after=nothing, kinds=()):
    """Replaces owner.name by a function that also calls before(...) and after(result, ...)."""
    if not hasattr(owner, name):
        watch.record("missing", name=f"{getattr(owner, '__name__', owner)}.{name}", kinds=kinds)
        return
    plain, before, after = getattr(owner, name), careful(before), careful(after)

    @functools.wraps(plain)
    def hooked(*args, **kwargs):
        before(*args, **kwargs)
        result = plain(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, hooked)


@dataclass
class Turn:
    """What has happened since the last step of any optimizer."""

    backwards: int = 0
    ddp_calls: int = 0
    averages_next: bool = False  # whether DDP averages in the next backward pass
    averaged: int = 0
    in_no_sync: bool = False
    zeroed_between: int = 0
    zeroed_unsynced: int = 0
    had_gradients: bool = False
    was_unsynced: bool = False  # whether the last backward pass was in no_sync()
    versions: int = 0  # of the weights at the end of the last backward pass; a change raises it
    calls: int = 0  # of modules, at that time
    loader_pass: int | None = None  # that gave the inputs of the last call with gradients
    has_entered_autocast: bool = False
    scaling: str = "no"  # of the loss by a GradScaler: "no", "scaled", "unscaled"
    scale: float | None = None
    clipped: str = "no"
    clip_norm: float | None = None
    passes: list = field(default_factory=list)
    ids: list = field(default_factory=list)  # of the tokens that the last call was given


@dataclass
class Known:
    """What is known of an optimizer that has taken a step."""

    optimizer: weakref.ref
    number: int
    weight_ids: list
    shapes: list
    step: int = 0
    began: str = "zeroed"  # see the record "step"
    is_shared: bool = False  # whether a pass since it was zeroed gave gradients to others, too
    is_left: bool = False  # and an optimizer has stepped since
    keeps: bool = False  # see the record "step"
    scheduler: object = None  # a weak reference, or None
    backwards: int = 0  # of the turn when `values` were noted
    values: dict = field(default_factory=dict)
    types: list = field(default_factory=list)  # of its state after its last step
    bits: list = field(default_factory=list)  # of the weights then


class Watch:
    """What is known in this process. Its methods are the hooks."""

    def __init__(self):
        self.pid = 0  # of the process that has opened the file
        self.known = weakref.WeakKeyDictionary()  # {optimizer: Known}
        self.all_known = []
        self.objects = weakref.WeakKeyDictionary()  # {optimizer: number} of those that step
        self.objects_seen = 0
        self.optimizers = weakref.WeakSet()  # all that were made
        self.loaded = weakref.WeakSet()  # those that have loaded a state
        self.states_loaded = 0
        self.stepping = []  # optimizers that take a step right now
        self.names, self.owners = {}, {}  # by the id of a weight: its name, its module's types
        self.ddps = {}  # by the id of a weight: a weak reference to its DDP
        self.modules = weakref.WeakKeyDictionary()  # {module: number} of those that were called
        self.modules_called = 0
        self.inner = weakref.WeakSet()  # modules that others have called, in the first steps
        self.schedulers = weakref.WeakKeyDictionary()  # {scheduler: number}
        self.outer = None  # values of the outermost call that goes on
        self.exchanges = False  # whether all_to_all was called
        self.elsewhere = set()  # ids of weights that other processes train, as a pipeline's stages
        self.given = {}  # {pass: hashes of the rows of its last batches}, the newest pass last
        self.turn = Turn()
        self.marks = []  # of gradients before the backward pass, if there are several optimizers
        self.steps_done = 0
        self.depth = 0  # of modules that are being called
        self.calls = 0
        self.backwards = 0
        self.in_backward = False
        self.random_before = {}  # a backward pass
        self.recomputes = False  # whether a module was called in the last backward pass
        self.is_kwargs_missing = False
        self.steps_before_scaler = 0
        self.passes = 0  # over data
        self.current_pass = None
        self.data_sets = {}  # by the id of a data set: its number, and a weak reference to it
        self.data_sets_seen = 0

    # == Records ==
    def open_file(self):
        self.pid = os.getpid()
        path = f"{os.environ['CHECK_SEEN']}/{process_name(self.pid)}"
        self.file, self.stack = open(path, "a", 1), open(f"{path}.stack", "w")
        self.record("process", parent=os.environ["CHECK_PARENT"])

    def record(self, kind, **values):
        """Writes a record. Tensors become numbers here, so that Python waits for them."""
        if self.pid != os.getpid():  # this process was forked
            self.open_file()
        line = json.dumps({"kind": kind, **values}, default=lambda tensor: tensor.tolist())
        self.file.write(line + "\n")
        if kind in ("process", "loss", "step", "batch"):
            self.start_timer()

    def start_timer(self):
        """Where no progress is recorded for long, Python writes where it stands."""
        faulthandler.dump_traceback_later(HANG_SECONDS, file=self.stack)

    # == Calls of modules ==
    def before_module(self, module, args):
        self.depth += 1
        has_grad = torch.is_grad_enabled()
        if isinstance(module, DDP) and has_grad and not self.in_backward:
            self.turn.ddp_calls += 1
            self.turn.averages_next = module.require_backward_grad_sync
            self.turn.in_no_sync = not module.require_backward_grad_sync
        self.recomputes |= self.in_backward
        is_inner = self.depth > 1 or self.in_backward
        if is_inner and has_grad and self.steps_done < UNOWNED_STEP:
            self.inner.add(module)
        is_loss = isinstance(module, torch.nn.modules.loss._Loss)
        if is_inner or is_loss or self.steps_done >= NUM_STEPS:
            return
        inputs = args, self.keyword_arguments(sys._getframe(2))
        if not any(is_wrapped(tensor) for tensor in tensors_of(inputs)):
            self.note_call(module, inputs, has_grad)

    def note_call(self, module, inputs, has_grad):
        if module not in self.modules:
            self.modules[module] = self.modules_called
            self.modules_called += 1
        modules = [*module.modules()]
        norms = [part for part in modules if getattr(part, "running_mean", None) is not None]
        if not has_grad and any(getattr(norm, "momentum", 0) is None for norm in norms):
            return  # swa_utils.update_bn() makes statistics
        values = self.values_of_call(module, norms, has_grad)
        values |= self.values_of_layers(module, modules, norms, has_grad)
        values |= self.values_of_inputs(inputs)
        if has_grad:
            self.turn.loader_pass = values["loader_pass"]
            self.note_ids(inputs)
        generators = [found for part in modules for found in own_generators(part, depth=0)]
        values["random"] = random_states(generators, in_model=True)
        module.__dict__["_check"] = values, norms, generators
        self.outer = values

    def keyword_arguments(self, frame):
        """PyTorch gives these hooks no keyword arguments. The frame that calls them has some."""
        if "kwargs" not in frame.f_locals and not self.is_kwargs_missing:
            self.is_kwargs_missing = True
            self.record("missing", name="kwargs of Module._call_impl", kinds=["shares", "inputs"])
        return frame.f_locals.get("kwargs", {})

    def values_of_call(self, module, norms, has_grad):
        self.calls += 1
        device = next((weight.device.type for weight in module.parameters()), "cpu")
        autocast = ""
        if torch.is_autocast_enabled(device):
            autocast = name_of(torch.get_autocast_dtype(device))
        return {
            "call": self.calls,
            "step": self.steps_done,
            "module": type(module).__name__,
            "number": self.modules[module],
            "has_grad": has_grad,
            "autocast": autocast,
        }

    def values_of_layers(self, module, modules, norms, has_grad):
        dropouts = [part for part in modules if "Dropout" in type(part).__name__]
        layers = [layer for layer in dropouts if getattr(layer, "p", 0)]
        for norm in norms:
            is_trained = any(weight.requires_grad for weight in norm.parameters())
            if is_trained or not has_grad:
                layers.append(norm)
        # If the module is in train(), a part of it may stay in eval() on purpose.
        in_eval = not getattr(module, "module", module).training
        is_training = has_grad and not in_eval
        layers_in_eval = 0 if is_training else sum(not layer.training for layer in layers)
        values = {"layers": len(layers), "layers_in_eval": layers_in_eval}
        return values | {"in_eval": in_eval, "drops": ""}

    def values_of_inputs(self, inputs):
        tensors = [local(tensor) for tensor in tensors_of(inputs)]
        tensors = [tensor for tensor in tensors if tensor.numel() and not tensor.is_sparse]
        hashed = [(tensor, hashes_of(tensor)) for tensor in matrices_of(tensors)]
        passes = [self.pass_of(tensor, hashes) for tensor, hashes in hashed]
        given = [pair for pair, number in zip(hashed, passes) if number is not None]
        results = [tensor for tensor in tensors_of(inputs) if tensor.grad_fn is not None]
        long = [tensor for tensor in tensors if tensor.numel() > 1]
        known = [number for number in passes if number is not None]
        return {
            # Between a batch and its step, there may be the pass of a validation. A mask of ones
            # is in the batches of both. So the earliest pass counts.
            "loader_pass": min(known, default=self.current_pass),
            "takes_result": bool(results),
            "from_loader": bool(known),
            "is_zero": bool(long) and not any(tensor.any() for tensor in tensors),
        } | numbers_of_samples(given or hashed)

    def note_ids(self, inputs):
        """Keeps the ids of tokens that a call was given."""
        tensors = [local(tensor) for tensor in tensors_of(inputs)]
        dense = [tensor for tensor in tensors if tensor.numel() and not tensor.is_sparse]
        self.turn.ids = [tensor for tensor in dense if are_ids(tensor)] or self.turn.ids

    def pass_of(self, tensor, hashes):
        """Returns the pass over a loader that has given all rows of a tensor. None: none has."""
        key, unknown = row_type(tensor), {*hashes.tolist()}
        for number, batches in reversed(self.given.items()):
            for batch in reversed(batches):
                unknown -= batch.get(key, set())
                if not unknown:
                    return number
        return None

    def after_module(self, module, args, output):
        self.depth = max(0, self.depth - 1)
        outputs = tensors_of(output)
        if isinstance(module, (torch.nn.Linear, torch.nn.modules.conv._ConvNd)) and outputs:
            self.note_type(module, outputs[0])
        values, norms, generators = module.__dict__.pop("_check", (None, (), ()))
        if values is None:
            return
        self.outer = None
        # DDP sends the statistics of rank 0 when a call starts. So they are read at its end.
        means = [] if values["has_grad"] else [bits_of(norm.running_mean) for norm in norms]
        values["norms"] = means
        values["random"] = drawn(values["random"], random_states(generators, in_model=True))
        self.record("forward", **values)
        if not values["has_grad"]:
            return
        for tensor in outputs:
            if tensor.grad_fn is not None:
                note = functools.partial(self.note_trained, values["call"])
                tensor.register_hook(note)

    def note_trained(self, call, gradient):
        self.record("trained", call=call)

    def note_type(self, layer, output):
        is_wide = output.dtype == torch.float32 == layer.weight.dtype
        if is_wide and torch.is_autocast_enabled(output.device.type):
            self.record("autocast", module=type(layer).__name__, gives=name_of(output.dtype))

    def note_ddp(self, result, ddp, *args, **kwargs):
        for weight in ddp.module.parameters():
            self.ddps[id(weight)] = weakref.ref(ddp)

    def note_autocast(self, *args):
        self.turn.has_entered_autocast = True

    # == Functions ==
    def note_cross_entropy(self, *args, **kwargs):
        given = args[0] if args else kwargs["input"]
        target = args[1] if len(args) > 1 else kwargs["target"]
        is_training = torch.is_grad_enabled() and self.steps_done < NUM_STEPS
        if is_training and is_plain(given) and is_plain(target) and given.numel():
            values = {"sums_to_1": sum_to_1(given), "is_input": are_inputs(target, self.turn.ids)}
            self.record("cross_entropy", step=self.steps_done, **values)

    def note_dropout(self, tensor=None, p=0.5, training=True, *args, **kwargs):
        caller = sys._getframe(3).f_globals.get("__name__")
        if training and caller != "torch.nn.modules.dropout":  # else it is counted as a layer
            self.note_drop("dropout", kwargs.get("input", tensor), p)

    def note_attention(self, query, *args, **kwargs):
        share = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0)
        self.note_drop("scaled_dot_product_attention", query, share)

    def note_drop(self, name, tensor, share):
        outer = self.outer
        if share and outer and outer["in_eval"] and not outer["has_grad"] and is_plain(tensor):
            outer["drops"] = name

    # == Backward passes ==
    def before_backward(self, tensors, *args, **kwargs):
        turn = self.turn
        turn.backwards += 1
        turn.averaged += turn.averages_next
        turn.averages_next = False
        self.backwards += 1
        are_zeroed = [self.note_gradients_before(known) for known in self.known.values()]
        if all(are_zeroed):
            turn.passes.clear()
        several = self.known.values() if len(self.known) > 1 else ()
        self.marks = [(known, marks_of_gradients(known)) for known in several]
        loader_pass = self.current_pass if turn.loader_pass is None else turn.loader_pass
        turn.passes.append(loader_pass)
        values = {"value": value_of(tensors), "scale": turn.scale}
        if self.steps_done < NUM_STEPS:
            self.record("loss", **values, step=self.steps_done, loader_pass=loader_pass)
        self.in_backward, self.recomputes = True, False
        self.random_before = random_states((), in_model=True)

    def note_gradients_before(self, known):
        """Returns whether all gradients are zeros, or there are none."""
        weights = weights_of(known.optimizer())
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        are_zeroed = not any(has_numbers(local(gradient)) for gradient in gradients)
        is_first = self.turn.backwards == 1  # after a step
        known.is_left = not are_zeroed and (known.is_left or (known.is_shared and is_first))
        known.is_shared &= not are_zeroed
        known.began = "zeroed" if are_zeroed or known.began == "zeroed" else "old"
        turn = self.turn
        is_alone = len(self.optimizers) == 1 and not self.stepping
        if are_zeroed and turn.had_gradients and is_alone:
            versions = sum(weight._version for weight in weights)
            if versions == turn.versions and self.calls > turn.calls:
                turn.zeroed_between += 1
                turn.zeroed_unsynced += turn.was_unsynced
        return are_zeroed

    def after_backward(self, result, *args, **kwargs):
        self.in_backward = False
        moved = drawn(self.random_before, random_states((), in_model=True))
        if self.recomputes and moved.keys() & {"torch", "device"}:
            self.record("redrawn", step=self.steps_done)
        weights = [weight for optimizer in self.optimizers for weight in weights_of(optimizer)]
        turn = self.turn
        turn.had_gradients = any(weight.grad is not None for weight in weights)
        turn.versions = sum(weight._version for weight in weights)
        turn.calls = self.calls
        turn.was_unsynced = turn.in_no_sync
        given = [known for known, marks in self.marks if marks_of_gradients(known) - marks]
        for known in given:  # those that this pass has given gradients
            is_alone = all(each is known for each in given)
            known.keeps = known.is_left and is_alone
            known.is_shared |= not is_alone
        if not self.known and self.backwards >= 20 * NUM_STEPS:
            self.end()  # a script without an optimizer

    def note_scale(self, scaler, *args, **kwargs):
        self.turn.scale = scaler.get_scale()
        self.turn.scaling = "scaled" if self.turn.scale != 1 else "no"

    def note_unscale(self, *args, **kwargs):
        if self.turn.scaling == "scaled":
            self.turn.scaling = "unscaled"

    def note_clip(self, parameters=(), limit=0, *args, **kwargs):
        limit = kwargs.get("max_norm", kwargs.get("clip_value", limit))
        turn = self.turn
        if turn.clipped in ("negative", "zero"):
            return
        if isinstance(limit, (int, float)) and limit <= 0:
            turn.clipped = "negative" if limit < 0 else "zero"
        elif isinstance(parameters, types.GeneratorType) and parameters.gi_frame is None:
            turn.clipped = "nothing" if turn.clipped == "no" else turn.clipped
        elif not turn.backwards:
            turn.clipped = "outside"
        else:
            turn.clipped = "scaled" if turn.scaling == "scaled" else "right"

    def note_norm(self, norm, *args, **kwargs):
        """Notes the norm that clip_grad_norm_() has returned. clip_grad_value_() returns None."""
        if is_plain(norm):
            found = norm.nan_to_num(1.0).item()
            self.turn.clip_norm = max(self.turn.clip_norm or 0.0, found)

    # == Steps of optimizers ==
    def note_optimizer(self, optimizer, *args, **kwargs):
        self.optimizers.add(optimizer)

    def before_step(self, optimizer, args, kwargs):
        if not self.turn.backwards and not any(rates_of(optimizer)):
            return  # torch.distributed.checkpoint takes such a step to make a state
        if optimizer in self.stepping:
            self.stepping.clear()  # its last step has raised, or a subclass calls super().step()
        self.stepping.append(optimizer)
        if len(self.stepping) > 1:  # one optimizer calls another, as ZeroRedundancyOptimizer does
            return
        if optimizer not in self.known:
            self.learn_names()
            self.known[optimizer] = self.known_of(optimizer)
            self.objects[optimizer] = self.objects_seen
            self.objects_seen += 1
        known = self.known[optimizer]
        known.backwards = self.turn.backwards
        known.values = self.values_of_gradients(optimizer, known)

    def known_of(self, optimizer):
        """Returns what is known of a new optimizer, or of an earlier one whose number it gets."""
        weights = weights_of(optimizer)
        weight_ids = [id(weight) for weight in weights]
        shapes = [weight.shape for weight in weights]
        alike = [known for known in self.all_known if known.shapes == shapes]
        if alike:
            gc.collect()  # so that the weak reference to one that is gone gives None
        for known in alike:
            if known.optimizer() is None or known.weight_ids == weight_ids:
                if known.weight_ids == weight_ids:
                    self.record_remade(optimizer, known)
                known.optimizer, known.weight_ids = weakref.ref(optimizer), weight_ids
                return known
        known = Known(weakref.ref(optimizer), len(self.all_known), weight_ids, shapes)
        self.all_known.append(known)
        self.record_start(optimizer, known.number)
        return known

    def record_remade(self, optimizer, known):
        bits = [int(bits_of(weight)) for weight in weights_of(optimizer)]
        self.record(
            "remade",
            optimizer=known.number,
            step=known.step,
            types=known.types,
            has_loaded=optimizer in self.loaded,
            is_same=bits == [int(each) for each in known.bits],
        )

    def record_start(self, optimizer, number):
        dist = torch.distributed
        has_group = dist.is_available() and dist.is_initialized()
        has_others = has_group and dist.get_world_size() > 1
        self.find_weights_elsewhere(optimizer, has_others)
        weights = weights_of(optimizer)
        ddps = [self.ddps[id(weight)]() for weight in weights if id(weight) in self.ddps]
        ddp = next((ddp for ddp in ddps if ddp is not None), None)
        values = {"optimizer": number, "step": 0}
        values["rank"] = dist.get_rank() if has_group else 0
        values["world"] = dist.get_world_size() if has_group else 1
        values["group_sizes"] = self.group_sizes() if has_group else []
        values["ddp_ranks"] = dist.get_process_group_ranks(ddp.process_group) if ddp else []
        values["in_ddp"] = [id(weight) in self.ddps for weight in weights]
        values["stands_in"] = self.stands_in()
        values["exchanges"] = self.exchanges
        values["states_loaded"] = self.states_loaded
        values["has_loaded"] = optimizer in self.loaded
        values |= values_of_place(weights)
        values |= self.values_of_weights(weights)
        values |= self.values_of_shards(weights)
        self.record("start", **values)

    def stands_in(self):
        """Whether optimizers hold other weights than those of the modules, as ZeRO's flat parts."""
        called = set()
        for module in self.modules:
            called |= {id(weight) for weight in module.parameters() if weight.requires_grad}
        return bool(called) and not called & self.owned_weights()

    def owned_weights(self):
        """The ids of the weights of all optimizers."""
        owned = set()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                owned |= {id(weight) for weight in group["params"]}
        return owned

    def note_exchange(self, *args, **kwargs):
        self.exchanges = True

    def find_weights_elsewhere(self, optimizer, has_others):
        """An optimizer may hold weights that this process neither calls nor trains."""
        called = {id(weight) for module in self.modules for weight in module.parameters()}
        without = {id(weight) for weight in weights_of(optimizer) if weight.grad is None}
        if has_others and not self.ddps:
            self.elsewhere |= without - called

    def group_sizes(self):
        world = getattr(torch.distributed.distributed_c10d, "_world", None)
        if not hasattr(world, "pg_group_ranks"):
            self.record("missing", name="_world.pg_group_ranks", kinds=["weights"])
            return []
        return [len(ranks) for ranks in world.pg_group_ranks.values()]

    def values_of_weights(self, weights):
        owners = [self.owners.get(id(weight), "") for weight in weights]
        # Megatron's mark on each weight says whether it is split.
        marks = [getattr(weight, "tensor_model_parallel", None) for weight in weights]
        whole = []
        for owner, mark in zip(owners, marks):
            whole.append("Norm" in owner if mark is None else not mark)
        counts = Counter(id(weight) for weight in weights)
        return {
            "names": [self.names.get(id(w), f"parameter {i}") for i, w in enumerate(weights)],
            "counts": [counts[id(weight)] for weight in weights],
            "shapes": [[*weight.shape] for weight in weights],
            "numbers": [local(weight).numel() for weight in weights],
            "dtypes": [name_of(weight.dtype) for weight in weights],
            "trainable": [weight.requires_grad for weight in weights],
            "is_whole": whole,
            "bits": [bits_of(weight) for weight in weights],
            "sketches": [sketch_of(weight) for weight in weights],
        }

    def values_of_shards(self, weights):
        parts = {id(weight): part_of(weight) for weight in weights}
        meshes = [weight.device_mesh.mesh for weight in weights if hasattr(weight, "device_mesh")]
        mesh, sharded_by = meshes[0].tolist() if meshes else [], ""
        for part in [part for module in self.modules for part in module.modules()]:
            kinds = str(type(part).__mro__)
            if "FSDPModule" in kinds:
                sharded_by = "FSDP2"
            is_fsdp1 = "FullyShardedDataParallel" in kinds
            if is_fsdp1 and "NO_SHARD" not in str(part.sharding_strategy):
                sharded_by = "FSDP1"
                mesh = torch.distributed.get_process_group_ranks(part.process_group)
                for weight in part.parameters():
                    parts[id(weight)] = f"shard {part.rank} of {part.world_size}"
        parts = [parts[id(weight)] for weight in weights]
        return {"parts": parts, "mesh": mesh, "sharded_by": sharded_by}

    def values_of_gradients(self, optimizer, known):
        turn, weights = self.turn, weights_of(optimizer)
        gradients = [None if w.grad is None else local(w.grad) for w in weights]
        finite = [gradient is None or is_finite(gradient) for gradient in gradients]
        # A GradScaler tells a fused optimizer of inf or nan, and that leaves the step out itself.
        leaves_out = hasattr(optimizer, "found_inf")
        infinite = [i for i, is_fine in enumerate(finite) if not (is_fine or leaves_out)]
        device = weights[0].device.type
        autocast = torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()
        # If this turn has no backward pass, another optimizer has stepped after the last pass.
        is_new = turn.has_entered_autocast or not turn.backwards
        scheduler = known.scheduler() if known.scheduler else None
        return {
            "ddp_calls": turn.ddp_calls,
            "averaged": turn.averaged,
            "in_no_sync": turn.in_no_sync,
            "zeroed_between": turn.zeroed_between,
            "zeroed_unsynced": turn.zeroed_unsynced,
            "clipped": turn.clipped,
            "clip_norm": turn.clip_norm,
            "passes": turn.passes,
            "had_gradients": turn.had_gradients,
            "bits_before": [bits_of(weight) for weight in weights],
            "gradients": [None if g is None else bits_of_gradient(g) for g in gradients],
            "infinite": infinite,
            "rates": rates_of(optimizer),
            "one_autocast": autocast and not is_new,
            "scheduled": [float(x) for x in scheduler.get_last_lr()] if scheduler else [],
        }

    def after_step(self, optimizer, args, kwargs):
        if not self.stepping or optimizer is not self.stepping[0]:
            return
        known = self.known.get(optimizer)
        if known is None:  # before_step() had an error of its own, and has recorded it
            self.end_turn(None)
            return
        known.step += 1
        self.steps_done = max(self.steps_done, known.step)
        careful(self.record_step)(optimizer, known)
        self.end_turn(known)
        if 0 < PAUSE_AT <= known.step:
            time.sleep(0.2)  # the signal to stop comes now
        counts = [each.step for each in self.all_known]
        # Many optimizers may take a few steps each, and some none at all.
        are_many = sum(counts) >= 20 * NUM_STEPS
        if min(counts) >= NUM_STEPS or max(counts) >= 2 * NUM_STEPS or are_many:
            self.end()

    def record_step(self, optimizer, known):
        if known.backwards != self.turn.backwards:  # a closure ran in the step
            known.values = self.values_of_gradients(optimizer, known)
        weights = weights_of(optimizer)
        known.types = types_of_state(optimizer)
        known.bits = [bits_of(weight) for weight in weights]
        values = {"optimizer": known.number, "step": known.step, "began": known.began}
        values |= known.values | {"types": known.types, "bits": known.bits, "keeps": known.keeps}
        values["object"] = self.objects[optimizer]
        values["weights"] = [id(weight) for weight in weights]
        values["sketches"] = [sketch_of(weight) for weight in weights]
        values["attributes"] = self.learn_names()
        self.record("step", **values)
        if known.step == UNOWNED_STEP:
            self.record_unowned()

    def record_unowned(self):
        owned, found = self.owned_weights(), {}
        for module in [*self.modules, *self.inner]:
            for name, weight in module.named_parameters():
                has_gradient = weight.is_leaf and weight.grad is not None
                if has_gradient and id(weight) not in owned:
                    # A layer in a plain list is in no other module: it is named by its own type.
                    name = self.names.get(id(weight), f"{type(module).__name__}.{name}")
                    found[id(weight)] = name, [*weight.shape]
        found = sorted(found.values())
        names, shapes = [name for name, _ in found], [shape for _, shape in found]
        self.record("unowned", names=names, shapes=shapes)

    def end_turn(self, known):
        self.stepping.clear()
        self.turn = Turn()
        if known:
            known.began = "unchanged"
            known.is_shared = known.is_left = known.keeps = False

    def before_scaler_step(self, scaler, optimizer, *args, **kwargs):
        known = self.known.get(optimizer)
        self.steps_before_scaler = known.step if known else 0

    def after_scaler_step(self, result, scaler, optimizer, *args, **kwargs):
        known = self.known.get(optimizer)
        if known and known.step > self.steps_before_scaler:
            return
        self.record("skipped", optimizer=known.number if known else None)
        scaling = self.turn.scaling
        self.end_turn(known)
        self.turn.scaling = scaling  # so that a scheduler that steps now is not called too early

    def end(self):
        self.record("end")
        faulthandler.cancel_dump_traceback_later()
        raise SystemExit(0)  # leaves the script as sys.exit() would

    def learn_names(self):
        """Learns the names of weights. Returns what else the modules hold, for --resume."""
        held = {}
        parts = [named for module in self.modules for named in module.named_modules()]
        for path, part in parts:
            path = [word for word in path.split(".") if word not in ("", "module", "_orig_mod")]
            for name, weight in part.named_parameters(recurse=False):
                self.names.setdefault(id(weight), ".".join([*path, name]))
                self.owners.setdefault(id(weight), str(type(part).__mro__))
            if isinstance(part, DDP) or not COMPARES_RUNS:
                continue
            unsaved = getattr(part, "_non_persistent_buffers_set", ())
            buffers = {name: part._buffers[name] for name in unsaved}
            for name, value in (vars(part) | buffers).items():
                if isinstance(value, torch.Tensor):
                    held[".".join([*path, name])] = bits_of(value)
                elif isinstance(value, (int, float)) and name != "training":
                    held[".".join([*path, name])] = value
        return held

    def note_schedule(self, scheduler, *args, **kwargs):
        caller = sys._getframe(3).f_globals.get("__name__", "")
        if caller == "torch.optim.lr_scheduler" or getattr(scheduler, "_is_initial", False):
            return
        optimizer = getattr(scheduler, "optimizer", None)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        known = self.known_by_groups(optimizer)
        step = known.step if known else 0
        if known:
            known.scheduler = weakref.ref(scheduler)
        if not step and self.turn.scaling != "no":
            step = "skipped"
        self.record(
            "schedule",
            optimizer=known.number if known else 0,
            step=step,
            name=type(scheduler).__name__,
            caller=caller,
            scheduler=self.schedulers.setdefault(scheduler, len(self.schedulers)),
            is_used=optimizer is None or known is not None,
        )

    def known_by_groups(self, optimizer):
        """Returns what is known of an optimizer, or of one with its groups, as inside a wrapper.

        None: neither has taken a step.
        """
        groups = {id(group) for group in getattr(optimizer, "param_groups", ())}
        for other, known in self.known.items():
            if groups & {id(group) for group in other.param_groups}:
                return known
        return None

    def note_state_saved(self, optimizer, *args, **kwargs):
        if optimizer.state:
            self.record("saved")

    def note_state_loaded(self, result, optimizer, *args, **kwargs):
        if optimizer.state:
            self.loaded.add(optimizer)
            self.states_loaded += 1

    # == Data ==
    def start_pass(self, iterator, loader):
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        about = {"loader_pass": self.passes, "size": None, "batches": None}
        about["replaces"] = bool(getattr(loader.sampler, "replacement", False))
        about["maker"] = type(sampler).__module__.split(".")[0]
        with contextlib.suppress(TypeError, NotImplementedError):  # as of a stream
            about["size"] = len(loader.dataset)
            about["batches"] = len(sampler)
        iterator._check = about, loader.dataset
        self.passes += 1

    def note_reset(self, iterator, *args, **kwargs):
        iterator._check_indices = []  # of batches that are under way

    def note_index(self, index, iterator):
        vars(iterator).setdefault("_check_indices", []).append(index)

    def note_batch(self, batch, iterator):
        about, data = getattr(iterator, "_check", (None, None))
        if about is None or self.steps_done >= NUM_STEPS:
            return
        self.current_pass = about["loader_pass"]
        index = iterator._check_indices.pop(0)
        index = list(index) if hasattr(index, "__iter__") else [index]
        index = [int(i) if hasattr(i, "__index__") else None for i in index]
        if not getattr(iterator, "_in_order", True):
            index = [None] * len(index)  # workers may give their batches in another order
        whole = data
        while isinstance(whole, torch.utils.data.Subset):  # as of random_split()
            index = [None if i is None else int(whole.indices[i]) for i in index]
            whole = whole.dataset
        split = whole is not data and [type(whole).__name__, len(whole)]
        parts = [*batch.values()] if isinstance(batch, dict) else batch
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        rows = [len(part) for part in parts if isinstance(part, torch.Tensor) and part.dim()]
        hashes = self.keep_batch(batch)
        values = {"index": index, "split": split, "data": type(whole).__name__, "rows": rows}
        values["number"] = self.number_of(whole)
        self.record("batch", **about, **values, hashes=hashes[:3])

    def number_of(self, data):
        """Returns the number of a data set. A new one gets the next number."""
        number, known = self.data_sets.get(id(data), (None, None))
        known = known() if isinstance(known, weakref.ref) else known
        if known is not data:  # one that is gone may have had this id
            number = self.data_sets_seen
            self.data_sets_seen += 1
            try:
                self.data_sets[id(data)] = number, weakref.ref(data)
            except TypeError:  # a list has no weak references: so it is kept
                self.data_sets[id(data)] = number, data
        return number

    def keep_batch(self, batch):
        """Keeps hashes of the rows of a batch, and returns them for each tensor."""
        tensors = [local(tensor) for tensor in tensors_of(batch)]
        tensors = [tensor for tensor in tensors if tensor.numel() and not tensor.is_sparse]
        kept, found = {}, []
        for tensor in matrices_of(tensors):
            hashes = hashes_of(tensor).tolist()
            kept.setdefault(row_type(tensor), set()).update(hashes)
            found.append(hashes)
        batches = self.given.pop(self.current_pass, deque(maxlen=BATCHES_KEPT))
        batches.append(kept)
        self.given[self.current_pass] = batches
        if len(self.given) > PASSES_KEPT:
            del self.given[next(iter(self.given))]
        return found

    def before_fetch(self, fetcher, index):
        fetcher._check_random = random_states(own_generators(fetcher.dataset))

    def after_fetch(self, result, fetcher, index):
        data, states = fetcher.dataset, random_states(own_generators(fetcher.dataset))
        while isinstance(data, torch.utils.data.Subset):
            data = data.dataset
        worker = torch.utils.data.get_worker_info()
        # Where a server forks the workers, it is their parent for the system.
        pid = multiprocessing.parent_process().pid if worker else os.getpid()
        self.record(
            "fetch",
            parent=process_name(pid),
            data=type(data).__name__,
            worker=worker.id if worker else None,
            at=time.time(),
            random=drawn(fetcher._check_random, states),
        )

    # == Files and flags ==
    def note_save(self, *args, **kwargs):
        self.note_file("save", args[1] if len(args) > 1 else kwargs["f"])

    def note_move(self, *args, **kwargs):
        self.note_file("move", args[0] if args else kwargs["src"])
        self.note_file("moved", args[1] if len(args) > 1 else kwargs["dst"])

    def note_load(self, *args, **kwargs):
        self.note_file("load", args[0] if args else kwargs["f"])

    def note_file(self, kind, file):
        """A file is a path, or what open() has returned."""
        if isinstance(file, io.IOBase):
            file = getattr(file, "name", None)
        if isinstance(file, (str, os.PathLike)):
            values = {"path": os.path.abspath(file), "step": self.steps_done}
            self.record(kind, writer=process_name(os.getpid()), **values)

    def note_flags(self, result, *args, **kwargs):
        flags = vars(result[0]).items()
        values = {name: value for name, value in flags if isinstance(value, (str, int, float))}
        self.record("flags", values=values)


# == What is read of a process and of its weights ==
def process_name(pid):
    return f"{socket.gethostname()}-{pid}"


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def values_of_place(weights):
    device = weights[0].device
    machine = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if device.type != "cpu":
        machine = getattr(torch.get_device_module(device), "get_device_name", str)()
    words = " ".join([*sys.argv[1:], torch.__version__, sys.version.split()[0]])
    are_shared = device.type == "cpu" and all(local(weight).is_shared() for weight in weights)
    return {
        "place": [socket.gethostname(), str(device), torch.accelerator.device_count()],
        "machine": machine,
        "settings": re.sub(NAMES_OF_RANKS, "", words),
        "shares_memory": are_shared,
    }


def weights_of(optimizer):
    """Returns the weights that this process trains. If it trains none: all that it holds."""
    weights = []
    for group in optimizer.param_groups:
        weights += [weight for weight in group["params"] if not weight.is_meta]
    here = [weight for weight in weights if id(weight) not in watch.elsewhere]
    return here or weights


def rates_of(optimizer):
    return [float(group.get("lr", 1)) for group in optimizer.param_groups]


def types_of_state(optimizer):
    """Names and types of tensors in its state."""
    found = set()
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if hasattr(value, "dtype"):
                found.add(f"{name} {value.dtype}")
    return sorted(found)


def is_finite(gradient):
    numbers = gradient._values() if gradient.is_sparse else gradient
    return bool(numbers.isfinite().all())


def part_of(weight):
    """Which part of a DTensor is in this process; "" if it is all of it."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return ""
    places = zip(weight.placements, mesh.get_coordinate())
    return " ".join(f"{kind}{place}" for kind, place in places if not kind.is_replicate())


def local(tensor):
    """Returns the part of a DTensor that is in this process. Another tensor is its own part."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def is_wrapped(tensor):
    """Whether a tensor stands for another one, or for many, as in torch.func.vmap()."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_plain(tensor):
    """Whether a tensor holds its own numbers. A DTensor or a stand-in of a compiler does not."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not is_wrapped(tensor)


def are_ids(tensor):
    """Whether a tensor has rows of whole numbers, as the ids of tokens are."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return is_plain(tensor) and is_whole and tensor.dim() == 2 and tensor.shape[1] > 1


def are_inputs(target, inputs):
    """Whether the targets of cross_entropy are the ids that a module was given as its inputs.

    A module may also be given the targets on purpose. So a single equal input counts only if the
    module has no other, and two equal inputs always count.
    """
    count = sum(are_equal(ids, target) for ids in inputs)
    return count > 1 or count == len(inputs) == 1


def are_equal(ids, target):
    """Whether targets are these ids. It skips negative ones. If all are alike, it says no."""
    is_alike = target.numel() == ids.numel() and target.device == ids.device
    if target.is_floating_point() or not is_alike:
        return False
    target, ids = target.flatten(), ids.flatten()
    ids, target = ids[target >= 0], target[target >= 0]
    return len(target) > 1 and bool((ids == target).all() & (target != target[0]).any())


def sum_to_1(given):
    """Whether the classes of a sample are shares of 1. It reads only some rows, to be quick."""
    rows = given.detach()
    rows = rows[None] if rows.dim() == 1 else rows[:ROWS_READ]
    while rows.dim() > 2:
        rows = rows[..., 0]
    is_1 = (rows.float().sum(1) - 1).abs() < SUM_DIGIT
    return bool((rows >= 0).all() & is_1.all())


def value_of(losses):
    """Returns the sum of losses of one number each. None: it is not known."""
    losses = tensors_of(losses)  # none of a generator, which the backward pass itself needs
    if losses and all(loss.numel() == 1 for loss in losses):
        return sum(local(loss).item() for loss in losses)
    return None


def tensors_of(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


# == Numbers for tensors ==
def bits_of(tensor):
    """Returns a number for all bits of a tensor, on its device. It is 0 if all bits are 0."""
    tensor = local(tensor)
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    flat = tensor.contiguous().flatten().view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 4 else flat  # the next view() needs this
    flat = flat.view(torch.int8 if len(flat) % 4 else torch.int32)
    axis = factors(flat.device)[0][0]
    end = len(flat) // BLOCK * BLOCK
    rest = (flat[end:] * axis[: len(flat) - end]).sum()
    if not end:
        return rest
    hashes = [(blocks * axis).sum(1) for blocks in flat[:end].view(-1, BLOCK).split(BLOCKS)]
    return hashes_of(torch.cat([*hashes, rest[None]])[None])[0]


def bits_of_gradient(gradient):
    """As bits_of(), but 0 for zeros of either sign. Clipping to 0 makes negative zeros."""
    return (bits_of(gradient) | 1) * has_numbers(gradient)


def has_numbers(gradient):
    """Whether a gradient is not all zeros, of either sign."""
    numbers = gradient._values() if gradient.is_sparse else gradient
    return numbers.any()


def marks_of_gradients(known):
    """Returns what changes if a backward pass adds to a gradient, or makes one."""
    gradients = [weight.grad for weight in weights_of(known.optimizer()) if weight.grad is not None]
    return {(id(gradient), local(gradient)._version) for gradient in gradients}


def sketch_of(weight):
    """Two random projections of a weight. They roughly keep the distance of two weights."""
    if COMPARES_RUNS and hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()  # all ranks of its mesh must call this, and do
    rows = local(weight).flatten()[None]
    return project(rows)[0]


def matrices_of(tensors):
    """Returns the tensors that are as long as the first one, as matrices of a row for a sample."""
    tensors = [tensor for tensor in tensors if tensor.dim()]
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    return [tensor.reshape(len(tensor), -1).contiguous() for tensor in tensors]


def numbers_of_samples(columns):
    """Returns what the record "forward" says of samples, which have a row in each column.

    A column is a pair of a tensor and the hashes of its rows.
    """
    samples, near, beginnings = 0, 0, []
    for place, (tensor, hashes) in enumerate(columns):
        own, own_near = (place * 2 + 1) * hashes, projections_of(tensor)
        samples += own
        near += own_near
        if may_be_beginnings(tensor):
            beginnings.append([place, own, own_near])
    if len(beginnings) == len(columns):
        beginnings = []
    return {"samples": samples, "near": near, "beginnings": beginnings}


def may_be_beginnings(rows):
    """Whether these numbers may say where each sample of a batch begins, or whose a row is.

    Such are the offsets of nn.EmbeddingBag, and the vector `batch` of a batch of graphs. They begin
    at 0 and never fall. So do some batches of labels, but not all.
    """
    is_whole = not rows.is_floating_point() and not rows.is_complex()
    if not is_whole or rows.dtype == torch.bool or rows.shape[1] != 1:
        return False
    numbers = rows[:, 0]
    return bool((numbers[1:] >= numbers[:-1]).all() & (numbers[0] == 0))


def row_type(rows):
    return rows.dtype, rows.shape[1]


def hashes_of(rows):
    """A number for the bits of each row. Zeros at a row's end add nothing to it."""
    # A sign is the highest bit. In words of 64 bits, two changed signs would add up to 0.
    size = 32 if rows.is_floating_point() or rows.is_complex() else 64
    whole = getattr(torch, f"int{min(size, 8 * rows.element_size())}")
    return add_blocks(rows.view(whole), factors(rows.device), torch.int64)[:, 0]


def projections_of(rows):
    """A random projection of each row: rows that are alike have numbers that are alike."""
    return project(rows)[:, 0]


def project(rows):
    rows = rows.abs() if rows.is_complex() else rows
    axes = directions(rows.device)
    return add_blocks(rows, axes, axes[0].dtype)


def add_blocks(rows, vectors, dtype):
    """Projects rows block by block, so that no product is longer than a block.

    A block is multiplied by an axis and summed. The sum is multiplied by the block's own number.
    """
    axes, numbers = vectors
    total = torch.zeros(len(rows), len(axes), dtype=dtype, device=rows.device)
    for start in range(0, rows.shape[1], BLOCK):
        block = change_type(rows[:, start : start + BLOCK], dtype)
        number = numbers[start // BLOCK % BLOCK]
        for place, axis in enumerate(axes[:, : block.shape[1]]):
            total[:, place] += (block * axis).sum(1) * number
    return total


@functools.lru_cache
def factors(device):
    """Random odd numbers: an axis of hashes, and a number for each block."""
    own = torch.Generator().manual_seed(0)  # the generators of the training stay as they are
    numbers = torch.randint(2**62, (2, BLOCK), generator=own) * 2 + 1
    numbers = change_type(numbers, device)
    return numbers[:1], numbers[1]


@functools.lru_cache
def directions(device):
    """Random numbers of mean 0 and variance 1: two axes, and a number for each block."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    own = torch.Generator().manual_seed(1)
    numbers = change_type(torch.rand(3, BLOCK, generator=own, dtype=torch.float64), device, dtype)
    numbers = (numbers - 0.5) * 12**0.5
    return numbers[:2], numbers[2]


# == Random numbers ==
def random_states(generators, in_model=False):
    """Returns numbers for the states of all generators, by name."""
    states = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if in_model and torch.accelerator.is_available():
        module = torch.get_device_module()
        states["device"] = getattr(module, "get_rng_state", torch.get_rng_state)()
    for name, generator in generators:
        get_state = getattr(generator, "getstate", None) or getattr(generator, "get_state", None)
        states[f"its {name}"] = get_state() if get_state else generator.bit_generator.state
    numbers = {}
    for name, state in states.items():
        state = state.numpy() if hasattr(state, "numpy") else state
        numbers[name] = zlib.crc32(pickle.dumps(state))
    return numbers


def own_generators(owner, depth=4):
    """Yields the names and the random generators that an object holds."""
    for name, value in [*getattr(owner, "__dict__", {}).items()]:
        for held in value[:20] if isinstance(value, (list, tuple)) else [value]:
            is_generator = isinstance(held, torch.Generator | random.Random)
            if is_generator or hasattr(type(held), "_bit_generator"):
                yield name, held
            elif depth and not isinstance(held, (type, type(os))):
                yield from own_generators(held, depth - 1)


def drawn(before, after):
    """Returns {name: [state before, state after]} of generators from which numbers were drawn."""
    found = {}
    for name, state in before.items():
        if state != after.get(name):
            found[name] = [state, after.get(name)]
    return found
