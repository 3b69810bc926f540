# Everything below sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SITE := -c 'import site; print(site.getsitepackages()[0])'
HYDRA_1_4 := $(VENV)/hydra-1.4
FRAMEWORKS := $(VENV)/frameworks
DOCS := $(VENV)/docs
STORES := $(VENV)/stores
TORCH := torch==2.13.0
WORKERS := --numprocesses 2 --dist worksteal
PARTS := $(BIN)/python tests/support/parts.py
# By another name, so that `make -n` does not run the parts.
AGAIN := $(MAKE)
# Python keeps compiled modules even if the environment forbids that: otherwise every rank compiles the package again.
export PYTHONDONTWRITEBYTECODE :=
# What pages of the site load, in place of a CDN: draws diagrams; lets the search run from file://.
SCRIPTS := mermaid@11.17.2 iframe-worker@1.0.4
WITH_FRAMEWORKS := tests/integrations tests/benchmarks/test_integrations.py tests/extensions/callbacks/test_components.py \
	tests/checkpoint/promises/test_torchtitan.py tests/commands/test_convert.py::test_transformers_takes_the_files \
	tests/clusters/test_manifests.py
AZURITE := azurite@3.35.0
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: train plot test test-core test-all frameworks stores docs nightly bench-endurance bench-join bench-noticing bench-proofs bench-replicas bench-restore bench-strangers bench-tiers bench-write bench-integrations fuzz scale gpu gpu-quick slurm dist check format clean

train: $(VENV)/.ready  ## train a small language model on two local ranks
	$(BIN)/python examples/train.py stager=pinned_cached join.throw=true

# Four workers, because a worker waits half of the time; waiting threads of torch sleep.
test: $(HYDRA_1_4)/.ready  ## the tests
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "not slow" --hypothesis-profile=quick $(WORKERS) --numprocesses 4

# With ARGS="--without tiers", without that extension alone.
test-core: $(VENV)/.ready  ## the core's tests, and a training, in a copy without extensions and tools
	$(BIN)/python tests/support/core_alone.py $(WORKERS) $(ARGS)

test-all: $(HYDRA_1_4)/.ready  ## the tests with their longer matrices; a report at the end
	$(PARTS) "tests" "OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS)" "trainers" "$(AGAIN) frameworks"

frameworks: $(FRAMEWORKS)/.ready  ## the tests of stagereg.integrations, with the trainers installed
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest $(WORKERS) $(WITH_FRAMEWORKS)

stores: $(STORES)/.ready  ## checkpoints in SeaweedFS (S3), Azurite and fake-gcs-server
	OMP_NUM_THREADS=1 $(STORES)/bin/python -m pytest $(WORKERS) tests/extensions/buckets/stores

docs: $(DOCS)/.ready  ## the documentation site, to site/index.html; without network once its environment is there
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

# The last part finds pyenv's interpreters too.
nightly: $(HYDRA_1_4)/.ready  ## three hundred kills, five hundred saves twice, new examples, other versions of torch and Python; a report at the end
	$(PARTS) "documentation" "$(AGAIN) docs" \
		"object stores" "$(AGAIN) stores" \
		"kills" "$(BIN)/python tests/benchmarks/kills.py --kills 300" \
		"Slurm" "$(AGAIN) slurm" \
		"endurance" "$(AGAIN) bench-endurance" \
		"fuzz" "$(AGAIN) fuzz ARGS='--seed $$(date +%Y%m%d)'" \
		"new examples" "OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' --hypothesis-profile=explore $(WORKERS)" \
		"other versions" "PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | paste -sd:) $(BIN)/python -m nox"

# With ARGS="--help", and so on.
bench-endurance bench-join bench-noticing bench-proofs bench-replicas bench-restore bench-strangers bench-tiers bench-write: bench-%: $(VENV)/.ready  ## what the project measures to prove itself
	PYTHONPATH=. $(BIN)/python tests/benchmarks/$*.py $(ARGS)

bench-integrations: $(FRAMEWORKS)/.ready  ## what a checkpoint costs, saved by each trainer itself and through stagereg
	PYTHONPATH=. $(FRAMEWORKS)/bin/python tests/benchmarks/integrations.py $(ARGS)

plot: $(VENV)/.ready  ## the plot of the README, measured again: docs/images/stall.json and stall.svg
	$(BIN)/stagereg bench stall --torch-threads 1 --rounds 30 --json docs/images/stall.json
	$(BIN)/python docs/stall_plot.py docs/images/stall.json > docs/images/stall.svg

fuzz: $(VENV)/.ready  ## 35,000 mutations of what comes from elsewhere, each read by all that reads it; findings to fuzz-report
	$(BIN)/python tests/benchmarks/fuzz.py $(ARGS)

scale: $(VENV)/.ready  ## what a save sends and costs on thousands of simulated ranks
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python tests/benchmarks/scale.py

# Offline: make gpu-quick VENV= PYTHON=the Python that has torch, Hydra, pytest and hypothesis
gpu: $(if $(VENV),$(VENV)/.ready)  ## on a machine with an NVIDIA GPU: its tests and benchmarks, to gpu-report/gpu.md
	$(if $(VENV),$(BIN)/python,$(PYTHON)) tests/benchmarks/gpu.py --out gpu-report $(ARGS)

gpu-quick: $(if $(VENV),$(VENV)/.ready)  ## the same in at most 8 minutes on one GPU: tests, checks of twelve risks, short benchmarks
	$(if $(VENV),$(BIN)/python,$(PYTHON)) tests/benchmarks/gpu.py --quick --out gpu-report $(ARGS)

# As root, since it makes machines; a user's own Slurm is not touched.
slurm: $(VENV)/.ready  ## the scripts of docs/slurm.md on a Slurm cluster in the lab, which is set up and ended
	(command -v slurmctld && command -v munged) >/dev/null || apt-get install --yes --quiet slurm-wlm munge || true
	STAGEREG_SLURM=1 $(BIN)/python -m pytest tests/clusters/test_slurm.py

dist: $(VENV)/.ready  ## the wheel and the source distribution, checked, and tried in an environment without the checkout
	$(BIN)/python -m nox --session release

check: $(VENV)/.ready  ## lint, format, types, and the wording of messages and pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/support/prose.py

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site *.egg-info

# torch comes first and alone: without a GPU, its CPU build spares gigabytes of CUDA libraries.
$(VENV)/.ready: pyproject.toml constraints.txt setup.py stagereg/kernel/copy.c stagereg/base/tensors.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v nvidia-smi >/dev/null || $(PIP) --no-deps --retries 0 --timeout 15 --index-url $(CPU_INDEX) $(TORCH) || true
	$(PIP) $(TORCH) setuptools wheel
	$(BIN)/python -m pip uninstall --quiet --yes stagereg  # the name before hydra-stagereg
	$(PIP) --no-build-isolation --editable ".[dev,report]"
	touch $@

$(FRAMEWORKS)/.ready: $(VENV)/.ready constraints-frameworks.txt
	$(BIN)/python -m venv --clear --without-pip $(FRAMEWORKS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-frameworks.txt \
		--target "$$($(FRAMEWORKS)/bin/python $(SITE))"
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(FRAMEWORKS)/bin/python $(SITE))/beside.pth"
	touch $@

$(STORES)/.ready: $(VENV)/.ready constraints-stores.txt
	$(BIN)/python -m venv --clear --without-pip $(STORES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-stores.txt \
		--target "$$($(STORES)/bin/python $(SITE))"
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(STORES)/bin/python $(SITE))/beside.pth"
	npm install --silent --no-audit --no-fund --prefix $(STORES) $(AZURITE)
	touch $@

$(DOCS)/.ready: $(VENV)/.ready constraints-docs.txt
	$(BIN)/python -m venv --clear --without-pip $(DOCS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-docs.txt \
		--target "$$($(DOCS)/bin/python $(SITE))"
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(DOCS)/bin/python $(SITE))/beside.pth"
	cd $(DOCS) && npm pack --silent $(SCRIPTS)
	cd $(DOCS) && tar xzf mermaid-*.tgz package/dist/mermaid.min.js && tar xzf iframe-worker-*.tgz package/shim/index.js
	rm $(DOCS)/*.tgz
	touch $@

# For tests only: an environment inside the first that differs from it in Hydra and OmegaConf.
$(HYDRA_1_4)/.ready: $(VENV)/.ready constraints-hydra-1.4.txt
	$(BIN)/python -m venv --clear --without-pip $(HYDRA_1_4)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-hydra-1.4.txt \
		--target "$$($(HYDRA_1_4)/bin/python $(SITE))"
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(HYDRA_1_4)/bin/python $(SITE))/beside.pth"
	touch $@
