# Each target sets up .venv first. make demo: one process, then two, on synthetic data, and the
# speedup. make test: the suite, some 9 minutes on 2 cores. make test-oldest: the same with the
# oldest torch that requirements.txt allows. make soak: what takes long, 50 minutes.
PYTHON ?= python3
RUN := .venv/bin/python
DEMO := --batch_size 128 --epochs 2 --max_steps 40 --log runs/demo.jsonl
# One thread a process; glibc keeps memory that is freed, which a CPU's next step asks for again.
DEMO_ENV := OMP_NUM_THREADS=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1073741824
DEMO_ENV += MALLOC_TOP_PAD_=67108864

.PHONY: demo test test-oldest soak lint

demo: .venv/installed
	@mkdir -p runs && rm -f runs/demo.jsonl
	@export $(DEMO_ENV); \
	test "$$(nvidia-smi -L 2>/dev/null | wc -l)" -ge 2 || export CUDA_VISIBLE_DEVICES=; \
	$(RUN) singlegpu/images.py $(DEMO) && $(RUN) multigpu/images.py --num_gpus 2 $(DEMO) && \
	$(RUN) report.py runs/demo.jsonl

test: .venv/installed lint
	$(RUN) -m pytest

test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest

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

.venv-oldest/installed: requirements.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet torch==2.11.0 torchvision==0.26.0 -r requirements.txt
	touch $@
