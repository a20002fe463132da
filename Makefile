# make demo: one process, then two, on synthetic data; make test: the whole suite. Both set up .venv first.
PYTHON ?= python3
RUN := .venv/bin/python
DEMO := --threads 1 --batch_size 128 --epochs 2 --max_steps 40 --log runs/demo.csv

.PHONY: demo test lint

demo: .venv/installed
	@mkdir -p runs && rm -f runs/demo.csv
	@test "$$(nvidia-smi -L 2>/dev/null | wc -l)" -ge 2 || export CUDA_VISIBLE_DEVICES=; \
	$(RUN) singlegpu/images.py $(DEMO) && $(RUN) multigpu/images.py --num_gpus 2 $(DEMO) && $(RUN) report.py runs/demo.csv

test: .venv/installed lint
	$(RUN) -m pytest

lint: .venv/installed
	.venv/bin/ruff check .
	$(RUN) tests/check_copies.py

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --requirement requirements.txt
	touch $@
