# The README's commands. They need Python 3.11 or newer, make and git; the first one fills .venv.
#
#   make demo PYTHON=python3.12               another interpreter
#   make demo DEMO_ARGS="--parallel tp"       options of examples/train_lm.py
#   make test PYTEST_ARGS="-k muon -x"        options of pytest
#   make test-all                             every test and combination, for much longer
#   GOLDEN=accept make test                   rewrite tests/golden/
#   make test-torch TORCH=2.11.0              the core tests with another torch, in an environment of its own
#   make test-clients                         peft, TRL, Lightning's Trainer and torchtitan, which it installs first
#   make gpu-acceptance TORCH=torch           all that a GPU can show, first to last, in one page
#   make test-megatron PYTHON=python3.12      Megatron-core's GPTs on CPU ranks, in an environment of its own
#   make test-frameworks PYTHON=python3.12    DeepSpeed's engine and NeMo AutoModel's recipes, in another one
#   make test-recipes PYTHON=python3.12       hooks of verl, axolotl, ms-swift, LLaMA-Factory and torchft, in a third
#   make test-gpu TORCH=torch                 the tests that need a CUDA device, with the index's GPU build
#   make test-gpu VENV= PYTHON=python3        the same with a Python that has torch already: nothing is installed

PYTHON ?= python3
VENV ?= .venv
# Exact, and installed by itself before everything else: a range would take whichever newer build
# the index offers first, with several GB of GPU libraries. The CPU build, where the index has one.
TORCH ?= torch==2.13.0
VERSION := $(patsubst torch==%,%,$(TORCH))
# The Triton that each torch was made with. Builds of torch for CUDA bring it, those for CPUs bring none. pyproject.toml
# allows these minor versions of torch: of each, `make test-torch` has passed with its last release.
TRITON_2.11 := 3.6.0
TRITON_2.12 := 3.7.1
TRITON_2.13 := 3.7.1
TRITON_2.14 := 3.8.0
TRITON_2.15 := 3.9.0
BESIDE_2.11 := 'numpy<2.4' # Triton 3.6's interpreter needs it, which tests use
MINOR := $(word 1,$(subst ., ,$(VERSION))).$(word 2,$(subst ., ,$(VERSION)))
TRITON ?= $(TRITON_$(MINOR))
EXTRAS ?= dev
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Two workers: most of a test's time ranks wait for one another. A file stays on one worker, and its ranks and captures
# with it; files come in the order of tests/conftest.py, long ones first.
WORKERS ?= 2
XDIST = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
BENCH_ARGS ?=
MUTANTS_ARGS ?=
ACCEPT_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# With VENV= a GPU machine's own Python runs, whose torch is for its driver and must not be replaced.
READY := $(if $(VENV),$(INSTALLED))
OWN := $(if $(VENV),$(BIN)/python,PYTHONPATH="$(CURDIR)" $(PYTHON))
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

# Ranks are processes that share the cores: one thread each.
export OMP_NUM_THREADS := 1
# Some environments forbid Python to keep what it compiles. Then every rank and worker would compile all files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-torch core test-clients test-megatron test-frameworks test-recipes framework test-gpu mutants lint types docs bench bench-gpu gpu-acceptance clean

demo: $(INSTALLED)
	@$(BIN)/python examples/train_lm.py $(DEMO_ARGS)

# Meant for under ten minutes on two idle cores. What it leaves out is marked `full`: tests/test_selection.py says what
# that may be.
test: $(INSTALLED)
	$(BIN)/python -m pytest $(XDIST) -m "not full" $(PYTEST_ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(XDIST) $(PYTEST_ARGS)

# The core tests (tests/harness/core.py) with another torch: make test-torch TORCH=2.11.0. With another Python as well:
# make test-torch TORCH=2.13.0 PYTHON=python3.12. An index with CPU builds saves several GB a version:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. To be free of the disk space remove .venv-torch-*.
test-torch: VENV = .venv-torch-$(VERSION)$(filter-out -python3,-$(notdir $(PYTHON)))
test-torch:
	@$(MAKE) --no-print-directory core VENV=$(VENV) TORCH=torch==$(VERSION) EXTRAS=page,test

core: $(INSTALLED)
	@$(BIN)/python -c 'import sys, torch, triton; print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__); sys.exit(torch.__version__.partition("+")[0] != "$(VERSION)" and "pyproject.toml does not allow torch $(VERSION), so pip replaced it")'
	$(BIN)/python -m pytest $(XDIST) -m "not full" $$($(BIN)/python tests/harness/core.py) $(PYTEST_ARGS)

# Clients that `make test` skips, because they bring half a GB of other packages; none replaces torch. Imported first, so
# that none is skipped here. With the environment of test-torch: VENV=.venv-torch-2.15.0 TORCH=torch==2.15.0.
test-clients: $(VENV)/.clients
	$(BIN)/python -c 'import lightning.pytorch, peft, torchtitan.components.optimizer, torchtitan.models.llama3, trl'
	$(BIN)/python -m pytest -rs tests/clients/test_lightning.py tests/clients/test_peft.py tests/clients/test_torchtitan_package.py $(PYTEST_ARGS)
	$(BIN)/python -m pytest -rs tests/end_to_end/test_moe_models.py -m "not full" -k torchtitan $(PYTEST_ARGS)
	$(BIN)/python -m pytest -rs tests/docs/test_scripts.py -k "test_a_framework or lora" $(PYTEST_ARGS)

# Frameworks in environments of their own, on CPU ranks. What is BARE comes without its dependencies, which are for GPUs;
# emerging-optimizers needs Python 3.12.
test-megatron: VENV = .venv-megatron
test-megatron: FILES = tests/clients/test_megatron.py
test-megatron: BARE = megatron-core==0.19.2 emerging-optimizers==0.3.0
test-megatron: WITH = absl-py psutil

test-frameworks: VENV = .venv-frameworks
test-frameworks: FILES = tests/clients/test_deepspeed.py tests/clients/test_automodel.py
test-frameworks: BARE = nemo-automodel==0.7.0
test-frameworks: WITH = deepspeed==0.19.8

test-recipes: VENV = .venv-recipes
test-recipes: FILES = tests/clients/test_recipes.py tests/packages/test_packages.py # timm's Muon needs torchvision
test-recipes: REMOVED = .venv-recipes/lib/python3*/site-packages/tests # verl's, which would be found before ours
test-recipes: BARE = axolotl==0.21.0 llamafactory==0.9.5 ms-swift==4.6.0 torchft==0.2.0 verl==0.9.1 \
	megatron-core==0.19.2 emerging-optimizers==0.3.0
test-recipes: WITH = absl-py accelerate addict codetiming datasets hydra-core json_repair loguru modelscope numba omegaconf \
	opentelemetry-exporter-otlp-proto-http orjson peft pillow ray tensordict timm torchdata torchvision transformers==5.24.0 trl

test-megatron test-frameworks test-recipes:
	@$(MAKE) --no-print-directory framework VENV=$(VENV) EXTRAS=page,test FILES="$(FILES)" BARE="$(BARE)" WITH="$(WITH)" REMOVED="$(REMOVED)"

framework: $(INSTALLED)
	@$(PIP) --no-deps $(BARE)
	@$(PIP) $(TORCH) $(WITH)
	@rm -rf $(REMOVED)
	$(BIN)/python -m pytest -rs $(FILES) $(PYTEST_ARGS)

# Kernels compiled for the device, not interpreted. Without one each test is skipped and says why. Only files with such
# tests are imported: others may need packages that a GPU machine lacks.
test-gpu: $(READY)
	env -u TRITON_INTERPRET $(OWN) -m pytest -m gpu -rs $$(grep -rl 'mark\.gpu' tests --include='test_*.py') $(PYTEST_ARGS)

# What tests would not notice: MUTANTS_ARGS="--seed 2 --count 60 --minutes 120". A change takes a minute on idle cores.
mutants: $(INSTALLED)
	$(BIN)/python tests/harness/mutants.py $(MUTANTS_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(INSTALLED)
	$(BIN)/mypy

# The site in build/site; `python -m http.server -d build/site` shows it. Without network once it is installed.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/step_latency.py $(BENCH_ARGS)

# Meant for under eight minutes on one GPU; --dry runs it without one, tiny.
bench-gpu: $(READY)
	@$(OWN) benchmarks/gpu.py $(BENCH_ARGS)

# What to run first where there is a GPU: what may be wrong or hang, then tests, tuning and the benchmark, for an hour.
# ACCEPT_ARGS=--dry runs it without one, tiny.
# In parts of under nine minutes, without make, a smoke test first: docs/gpu.md.
gpu-acceptance: $(READY)
	@env -u TRITON_INTERPRET $(OWN) -m acceptance $(ACCEPT_ARGS)

# Keeps $(VENV), which takes minutes to fill.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "canzona_compile needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV): minutes the first time, seconds afterwards"
	@$(PIP) $(TORCH) $(if $(TRITON),'triton==$(TRITON); sys_platform == "linux"') $(BESIDE_$(MINOR))
	@echo "installing canzona_compile and its tools"
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.docs: $(INSTALLED)
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.clients: $(INSTALLED)
	@$(PIP) $(TORCH) --editable '.[clients]'
	@touch $@
