# Each target sets up .venv first.
# make demo: runs mnist.py in one process and in two, and quantizes it. 25 s, on made-up images.
# make test: the suite, 8 minutes on 2 cores.
# make test-torch TORCH=2.12.1: the same with that torch, by default the oldest of requirements.txt.
# make soak: what takes long, two hours; TEST_NUM_WORKERS=2 gives all training scripts workers.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^torch>=\([0-9.]*\).*/\1/p' requirements.txt)
RUN := "$(CURDIR)/.venv/bin/python"
OUT := runs
DEMO := --synthetic --epochs 2 --batch_size 1200

.PHONY: demo test test-torch soak lint

demo: .venv/installed
	@mkdir -p $(OUT) && cd $(OUT) && export OMP_NUM_THREADS=1 && \
	idle=$$({ head -1 /proc/stat; sleep 1; head -1 /proc/stat; } | \
		awk '{ ticks = $$5 - ticks } END { print ticks / 100 }') && \
	gpus=$$($(RUN) -c 'import torch; print(torch.accelerator.device_count())') && \
	{ [ "$$gpus" -ge 2 ] || export CUDA_VISIBLE_DEVICES=; } && \
	{ $(RUN) "$(CURDIR)/singlegpu/mnist.py" $(DEMO) && echo && \
	$(RUN) "$(CURDIR)/multigpu/mnist.py" --num_gpus 2 $(DEMO) && echo && \
	$(RUN) "$(CURDIR)/quantize/mnist.py" --synthetic && echo; } | tee demo.txt && \
	awk -F ' *[|] *' -v idle="$$idle" -f "$(CURDIR)/tests/helpers/demo.awk" demo.txt

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
	$(RUN) tests/check_measures.py

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install '.[dev]'
	rm -rf build *.egg-info  # what pip leaves
	touch $@

.venv-$(TORCH)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-$(TORCH)
	.venv-$(TORCH)/bin/pip install --quiet torch==$(TORCH) '.[dev]'
	rm -rf build *.egg-info
	touch $@
