# Each target sets up .venv first. make demo: one process, then two, on synthetic data, and the
# speedup. make test: the suite, 7 to 8 minutes on 2 cores. make test-torch TORCH=2.12.1: the same
# with that torch, by default the oldest of requirements.txt. make soak: what takes long, 90 minutes;
# TEST_NUM_WORKERS=2 gives all training scripts of either workers.
PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^torch>=\([0-9.]*\).*/\1/p' requirements.txt)
RUN := .venv/bin/python
DEMO := --batch_size 128 --epochs 2 --max_steps 40 --log runs/demo.jsonl
# One thread a process; glibc keeps memory that is freed, which a CPU's next step asks for again.
DEMO_ENV := OMP_NUM_THREADS=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1073741824
DEMO_ENV += MALLOC_TOP_PAD_=67108864

.PHONY: demo test test-torch soak lint

demo: .venv/installed
	@mkdir -p runs && rm -f runs/demo.jsonl
	@export $(DEMO_ENV); \
	test "$$(nvidia-smi -L 2>/dev/null | wc -l)" -ge 2 || export CUDA_VISIBLE_DEVICES=; \
	$(RUN) singlegpu/images.py $(DEMO) && $(RUN) multigpu/images.py --num_gpus 2 $(DEMO) && \
	$(RUN) report.py runs/demo.jsonl

test: .venv/installed lint
	$(RUN) -m pytest

test-torch: .venv-$(TORCH)/installed
	.venv-$(TORCH)/bin/python -m pytest

soak: .venv/installed
	$(RUN) -m pytest -n 0 -vv -s --durations=0 -o python_files='soak_*.py' tests/soak

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(RUN) tests/check_copies.py

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --requirement requirements.txt
	touch $@

.venv-$(TORCH)/installed: requirements.txt
	$(PYTHON) -m venv .venv-$(TORCH)
	.venv-$(TORCH)/bin/pip install --quiet torch==$(TORCH) --requirement requirements.txt
	touch $@
