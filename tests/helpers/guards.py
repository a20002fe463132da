"""The guards of the collection: what each must catch, as a change that turns its test red.

Each row has the words of tests/README.md's table for the guard and the change; the file that is
changed, the text that is there once, and the text in its place; and the test that must then fail.
With an empty text, the new one is put at the end of the file; with None in its place, the file is
taken away. test_guards.py makes the changes of QUICK, and soak_guards.py those of SLOW.
"""

from typing import NamedTuple


class Guard(NamedTuple):
    guard: str
    change: str
    path: str
    old: str
    new: str | None
    test: str


P, E, F = "test_project.py::", "test_examples.py::", "test_flags.py::"
JOB = f"{P}test_each_script_has_its_job_file"
PAGE = f"{P}test_a_page_names_what_exists"
GPT, IMAGES, HYBRID = "multigpu/gpt.py", "multigpu/images.py", "hybrid/images.py"
FSDP, PIPELINE, SINGLE = "hybrid/gpt_fsdp.py", "hybrid/gpt_pipeline.py", "singlegpu/images.py"
ALONE = "scripts import the standard library and packages alone"
JOBS = "each script has its job file"
DATA = "what is loaded is data"
PAGES = "links, anchors and commands of pages lead somewhere"
LISTED = "each command of a page is typed, or a list says why not"
TYPED = "test_pages.py::test_each_command_is_typed_or_listed"
ON_A_PAGE = "test_pages.py::test_each_listed_command_stands_on_a_page"
LIST = "tests/pages.toml"

QUICK = [
    Guard(ALONE, "an import of ours", GPT, "import argparse\n", "import argparse, multigpu\n",
          f"{P}test_scripts_stand_alone"),
    Guard("each phase is known to the tools", "a phase that report.py does not add up",
          "hybrid/gpt_fsdp.py", 'STEP_PHASES = ("data", ', 'STEP_PHASES = ("data", "clip", ',
          f"{P}test_each_phase_is_known_to_the_tools"),
    Guard(DATA, "a snapshot may hold code", FSDP, "weights_only=True", "weights_only=False",
          f"{P}test_what_is_loaded_is_data"),
    Guard(DATA, "arrays may hold code", "examples/tokens.py", '"train.part", mmap_mode="r"',
          '"train.part", allow_pickle=True', f"{P}test_what_is_loaded_is_data"),
    Guard(JOBS, "a job file is missing", "slurm/singlegpu_gpt.slurm", "", None, JOB),
    Guard(JOBS, "Bash cannot read one", "slurm/quantize_gpt.slurm", "", "if true\n", JOB),
    Guard(JOBS, "one is not queued again", "slurm/multigpu_gpt.slurm", " --requeue", "", JOB),
    Guard(JOBS, "one gets no signal", "slurm/hybrid_images.slurm", "USR2@120", "KILL@120", JOB),
    Guard(JOBS, "one saves nothing", "slurm/multinode_text.slurm", '.py --snapshot', '.py --log',
          JOB),
    Guard(JOBS, "one goes on without a process", "slurm/hybrid_gpt_fsdp.slurm",
          " --kill-on-bad-exit=1", "", JOB),
    Guard(JOBS, "Kubernetes starts what is not there", "multinode/kubernetes.yaml",
          "--, multinode/images.py", "--, multinode/none.py", JOB),
    Guard(JOBS, "a page's line makes another", "slurm/README.md", "sed s/images/", "sed s/a/", JOB),
    Guard(PAGES, "a link to no file", "README.md", "", "[x](none.md)\n", f"{PAGE}[README.md]"),
    Guard(PAGES, "a link to no section", "results.md", "", "[x](#none)\n", f"{PAGE}[results.md]"),
    Guard(PAGES, "no section of another page", "slurm/README.md", "", "[x](../README.md#none)\n",
          f"{PAGE}[slurm/README.md]"),
    Guard(PAGES, "a command of no script", "examples/README.md", "", "`python multigpu/none.py`\n",
          f"{PAGE}[examples/README.md]"),
    Guard(PAGES, "a flag that the script has not", "results.md", "",
          "`torchrun hybrid/gpt_fsdp.py --no_such_flag 2`\n", f"{PAGE}[results.md]"),
    Guard(PAGES, "such a flag in a next line", "pictures/README.md", "--log pictures/late.jsonl",
          "--no_such_log late.jsonl", f"{PAGE}[pictures/README.md]"),
    Guard(PAGES, "such a flag in a table", "multigpu/README.md", "| `--max_grad_norm 1`",
          "| `--max_grad_norms 1`", f"{PAGE}[multigpu/README.md]"),
    Guard(LISTED, "a command that nobody types", "slurm/README.md", "", "`make harder`\n",
          f"{TYPED}[slurm/README.md]"),
    Guard(LISTED, "a script that nobody types", "tools/README.md", "",
          "```sh\npython tools/new.py\n```\n", f"{TYPED}[tools/README.md]"),
    Guard(LISTED, "a row of the list is missing", LIST, "make soak\n", "",
          f"{TYPED}[results.md]"),
    Guard(LISTED, "the list has what no page has", LIST, "make soak\n", "make soak\nmake soap\n",
          ON_A_PAGE),
    Guard(LISTED, "a reason is no sentence", LIST, "It needs the internet.", "internet", ON_A_PAGE),
    Guard(LISTED, "a reason names no test", LIST, "soak_links.py", "soak_chains.py", ON_A_PAGE),
    Guard("README shows what DDP adds", "a line of mnist.py is another", "multigpu/mnist.py",
          "sampler.set_epoch(epoch)", "sampler.set_epoch(1)",
          f"{P}test_readme_shows_what_ddp_adds"),
    Guard("hybrid's page shows the heart of FSDP", "a line of gpt_fsdp.py is another", FSDP,
          "    fully_shard(model, mesh=mesh, mp_policy=policy)\n", "    fully_shard(model)\n",
          f"{P}test_hybrids_page_shows_the_heart_of_fsdp"),
    Guard("a test gives each flag", "a flag that no test gives", IMAGES, '    add("--seed"',
          '    add("--unheard", type=int)\n    add("--seed"',
          f"{F}test_each_flag_is_given_in_a_test"),
    Guard("each example is tried", "one more example", "examples/new.py", "", "x = 1\n",
          f"{E}test_each_example_is_tried"),
]  # fmt: skip

EFFECTS = {  # a flag and a script of test_flags.test_effects: the change, and what it does
    ("--precision tf32", SINGLE): ('args.precision == "tf32" else "h', 'False else "h'),
    ("--precision bf16", SINGLE): ("args.precision in DTYPES)", "args.precision == 'fp16')"),
    ("--precision fp16", SINGLE): ("args.precision in DTYPES)", "args.precision == 'bf16')"),
    ("--precision bf16", PIPELINE): ("args.precision in DTYPES)", "args.precision == 'fp16')"),
    ("--precision bf16 --grad_accum_steps 1", FSDP): (
        "gathered, sent_type = DTYPES.get(args.precision),",
        "gathered, sent_type = None,",
    ),
    ("--comm_hook bf16", IMAGES): ("COMM_HOOKS[args.comm_hook]", 'COMM_HOOKS["none"]'),
    ("--comm_hook bf16", "multinode/images.py"): (
        "COMM_HOOKS[args.comm_hook]", 'COMM_HOOKS["none"]'),
    ("--comm_hook bf16", HYBRID): ("COMM_HOOKS[args.comm_hook]", 'COMM_HOOKS["none"]'),
    ("--comm_hook bf16", FSDP): ("SENT_TYPES[args.comm_hook]", 'SENT_TYPES["none"]'),
    ("--num_workers 2", SINGLE): ('"num_workers": args.num_workers', '"num_workers": 0'),
    ("--num_workers 2", IMAGES): ('"num_workers": args.num_workers', '"num_workers": 0'),
    ("--num_workers 2", PIPELINE): ('"num_workers": args.num_workers', '"num_workers": 0'),
    ("--checkpoint_activations", FSDP): ("if args.checkpoint_activations:", "if False:"),
    ("--grad_accum_steps 3", SINGLE): ("range(args.grad_accum_steps)", "range(1)"),
    ("--grad_accum_steps 3", "multinode/images.py"): ("= is_last  # like", "= True  #"),
    ("--grad_accum_steps 3", FSDP): ("range(1, args.grad_accum_steps + 1)", "range(1, 2)"),
}  # fmt: skip

RESUMED = {  # the test of test_training.py that resumes a run of this script
    SINGLE: "1-singlegpu/images.py-mlp---num_workers 1 --precision fp16",
    IMAGES: "2-multigpu/images.py-mlp---num_workers 1 --precision fp16",
    "multinode/images.py": "2-multinode/images.py-mlp---grad_accum_steps 2 --precision fp16",
    HYBRID: "2-hybrid/images.py-mlp---num_stages 2 --precision fp16",
    PIPELINE: "2-hybrid/gpt_pipeline.py-gpt---num_stages 2 --precision fp16 --batch_size 24",
    FSDP: "2-hybrid/gpt_fsdp.py-gpt---precision bf16 --batch_size 24",
}
SNAPSHOT = [  # what is left out at a resume, and the change in a script; in gpt_fsdp.py another
    ("the snapshot has no optimizer", '"optimizer": optimizer, "scaler": scaler}',
     '"scaler": scaler}'),
    ("the snapshot has no scaler", ', "scaler": scaler}', "}"),
    ("a resumed run starts at step 0", 'return snapshot["step"]', "return 0"),
    ("a resumed run reads the epoch from its start",
     "num_taken = (start_step % steps_per_epoch) * per_step", "num_taken = 0"),
]  # fmt: skip
OF_SHARDS = {  # it has no scaler
    SNAPSHOT[0][0]: ("dcp.save(shards | {", 'dcp.save({"model": shards["model"]} | {'),
    SNAPSHOT[2][0]: ('return int(newest.name.removeprefix("step-"))', "return 0"),
    SNAPSHOT[3][0]: SNAPSHOT[3][1:],
}

OF_PIPELINES = {
    SNAPSHOT[3][0]: ("num_taken = (start_step % steps_per_epoch) * num_pipelines", "num_taken = 0"),
}
OTHERS = {FSDP: OF_SHARDS, PIPELINE: OF_PIPELINES}

TABLE, STOPS, SHARES = "examples/table.py", "test_stops.py::", "examples train alike on N processes"
CURVE = f"{E}test_examples_train_with_one_loss_curve"
SLOW = [
    Guard("README's commands run: of a GPT, photographs, an own task and tools",
          "a flag that is not there", "README.md", "--sample 500",
          "--samples_of 500", f"{P}test_readme_commands"),
    Guard("commands of pages end well", "a flag of no script", "singlegpu/README.md",
          "images.py --max_steps 50", "images.py --no_such 50",
          "soak/soak_pages.py::test_the_commands_of_a_page_end_well[singlegpu/README.md]"),
    *[Guard("flags have their effects", f"{flag} does nothing in {path}", path, *change,
            f"{F}test_effects[{flag}-{path.removesuffix('.py')}]")
      for (flag, path), change in EFFECTS.items()],
    Guard("flags have their effects", "--learning_rate is not set", IMAGES,
          'group["lr"] = rate * scale', "pass", f"{F}test_rate_and_norm"),
    Guard("flags have their effects", "--seed is not used", SINGLE, "manual_seed(args.seed)",
          "manual_seed(1)", f"{F}test_seed"),
    Guard("flags have their effects", "--eval_every is not used", SINGLE, "args.eval_every or ", "",
          f"{F}test_steps_and_rows[singlegpu/images.py-1-"
          "--epochs 2 --eval_every 3-at0]"),
    Guard("flags have their effects", "--max_steps is not used", SINGLE, "args.max_steps or ", "",
          f"{F}test_steps_and_rows[singlegpu/images.py-1---epochs 2 --max_steps 7-at1]"),
    Guard("flags have their effects", "--compile is not used", IMAGES,
          "torch.compile(model) if args.compile else model", "model",
          f"{F}test_compile[multigpu]"),
    Guard("flags have their effects", "--schedule is not used", PIPELINE,
          "SCHEDULES[args.schedule]", 'SCHEDULES["1f1b"]', f"{F}test_pipeline"),
    Guard("models have their layers", "--dropout is not used", "singlegpu/gpt.py",
          "self.dropout(self.projection(y))", "self.projection(y)", f"{F}test_models[gpt]"),
    Guard("paste.py replaces functions", "it keeps the old ones", "tools/paste.py",
          "if number not in dropped", "if True", f"{E}test_pasted_functions_stand_once"),
    Guard("paste.py refuses what would not be trained", "any task", "tools/paste.py",
          "if not called & new.keys():", "if False:", f"{E}test_what_paste_says"),
    Guard("examples do what they say", "early stopping: later", "examples/README.md",
          "if bad_rows == 3:", "if bad_rows == 30:",
          f"{E}test_early_stopping_and_live_logging[multigpu-2]"),
    Guard("examples do what they say", "live logging: of a stop, too", "examples/README.md",
          "if rank == 0 and not is_stopped:", "if rank == 0 and True:",
          f"{E}test_a_stop_with_the_lines_of_the_page[multigpu-2]"),
    Guard("a folder of classes is split", "the other way round", "examples/README.md",
          "(( number++ % 10 )) || part=val", "(( number++ % 10 )) && part=val",
          f"{P}test_a_folder_of_classes_is_split"),
    Guard("a train.py becomes DDP", "no DistributedDataParallel", "multigpu/README.md",
          "+model = nn.parallel.DistributedDataParallel(model)\n", "+model.module = model\n",
          f"{P}test_a_train_py_of_ones_own_becomes_ddp[3]"),
    Guard("examples do what they say", "ema.py: the average is lost", "examples/ema.py",
          "update(model.network)", "None", f"{E}test_an_average_survives_a_resume"),
    Guard("examples do what they say", "muon.py: no resume", "examples/muon.py", ", self.state\n",
          ", {}\n", f"{E}test_muon"),
    Guard("examples do what they say", "the page: a judge that learns", "examples/README.md",
          "weight.detach() for name", "weight for name",
          f"{E}test_a_generator_leaves_no_gradients_in_its_judge"),
    Guard("examples do what they say", "tokens.py: other tokens", "examples/tokens.py",
          '[count - num_val :])', '[:num_val])', f"{E}test_tokens"),
    Guard("examples do what they say", "show_log.py: each rank's rows", "examples/show_log.py",
          'row["rank"] == 0 and ', "", f"{E}test_rows_of_a_log_in_tensorboard"),
    Guard("examples do what they say", "table.py: float32", TABLE, "np.float64", "np.float32",
          f"{E}test_a_table_of_unlike_columns[table]"),
    Guard(SHARES, "README: a sum", "examples/README.md", "mse_loss(model(features), targets)",
          'mse_loss(model(features), targets, reduction="sum")', f"{CURVE}[README]"),
    Guard(SHARES, "table.py: a sum", TABLE, "mse_loss(predictions, targets)",
          'mse_loss(predictions, targets, reduction="sum")', f"{CURVE}[table]"),
    Guard(SHARES, "forecast.py: a sum", "examples/forecast.py", "mse_loss(predictions, future)",
          'mse_loss(predictions, future, reduction="sum")', f"{CURVE}[forecast]"),
    Guard(SHARES, "lora.py: a sum", "examples/lora.py", "tokens[:, 1:].flatten())",
          'tokens[:, 1:].flatten(), reduction="sum")', f"{CURVE}[lora]"),
    Guard(SHARES, "huggingface.py: weights of 16 bits", "examples/huggingface.py",
          '    options["dtype"] = torch.float32', "    #", f"{CURVE}[huggingface]"),
    Guard(SHARES, "segmentation.py: a mean of labelled pixels", "examples/segmentation.py",
          "return loss / masks.numel()", "return loss / (masks != NO_LABEL).sum()",
          f"{CURVE}[segmentation]"),
    Guard(SHARES, "ema.py: another in each process", "examples/ema.py", "decay=0.99)",
          "decay=torch.rand(()).item() if dist.is_initialized() else 0.9)", f"{CURVE}[ema]"),
    Guard(SHARES, "contrastive.py: own negatives", "examples/contrastive.py",
          "if dist.is_initialized():", "if False:", f"{CURVE}[contrastive]"),
    Guard("workers draw other numbers", "all processes have one seed", IMAGES,
          "set_seed(args.seed, start_step, rank)", "set_seed(args.seed, start_step)",
          f"{E}test_what_workers_draw"),
    *[Guard("a resumed run has undisturbed weights", f"{words} ({path})", path,
            *OTHERS.get(path, {}).get(words, change),
            f"test_training.py::test_a_resumed_run_has_the_weights_of_an_undisturbed_one[{test}]")
      for path, test in RESUMED.items() for words, *change in SNAPSHOT
      if path != FSDP or words in OF_SHARDS],
    Guard("each kind of tools/check has a fault", "a kind without one", "tools/check/rules.py",
          "KINDS = [", "def another(job):\n    yield None\n\n\nKINDS = [another, ",
          "test_check.py::test_every_kind_has_a_fault"),
    Guard("a kind that must be right is seen", "the order is not seen", "tools/check/rules.py",
          "def order(job):\n", "def order(job):\n    return ()\n",
          "test_training.py::test_one_loss_curve[3-multigpu/gpt.py-gpt-]"),
    Guard("a kind that is excepted is not seen", "one that is seen", "tests/test_training.py",
          'UNSEEN = {FSDP: "layers', 'UNSEEN = {FSDP: "order layers',
          "test_training.py::test_one_loss_curve[2-hybrid/gpt_fsdp.py-gpt-"
          "--checkpoint_activations --grad_accum_steps 3]"),
    Guard("tools/check leaves no process", "it leaves its job", "tools/check/__main__.py",
          "signum in (signal.SIGTERM, ", "signum in (",
          "test_check.py::test_no_process_is_left"),
    Guard("no worker is left", "they are not ended", GPT, "        worker.kill()", "        pass",
          f"{STOPS}test_resumed_weights_are_those_of_an_undisturbed_run[multigpu]"),
    Guard("nothing listens beyond this machine", "on another network", IMAGES,
          '{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}',
          '{"GLOO_SOCKET_IFNAME": os.popen("ip route show default").read().split()[4]}',
          "soak/soak_faults.py::test_killed_jobs_end_with_undisturbed_weights[multigpu]"),
]  # fmt: skip
GUARDS = [*QUICK, *SLOW]
