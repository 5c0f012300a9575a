# make train     set up what is missing, then train ResNet-50 on 2 ranks under horovodrun
# make test      set up what is missing, then the tests that answer in minutes
# make test-all  all tests
# The rest is for those who change trainkit: see CONTRIBUTING.md.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.14 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  := $(VENV)/.tests
PEERS  := $(VENV)/.peers
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
RANKS  ?= 2
ARGS   ?=
# The groups of tests/groups.toml, each a command: make parallel ray
GROUPS := $(shell sed -n 's/^\[\([a-z]*\)\]$$/\1/p' tests/groups.toml 2> /dev/null)
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv installs in a tenth of pip's time. Where it cannot, as with an index that only pip's settings name, pip does.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) 2> $(VENV)/uv.log || $(PIP) $(1)

# Without bytecode each process compiles torch anew, 5 s of it: a shell that asks for none (as images often do) has it here.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode
endif

.PHONY: train announce setup test test-all test-due check fix docs $(GROUPS) horovod-suite peers composer bench bench-gpu requirements audit dist sbom clean

train: announce $(READY)
	@start=$$(date +%s); \
	. $(BIN)/activate && horovodrun -np $(RANKS) python -m trainkit fit conf=resnet50 $(ARGS) || exit $$?; \
	echo "training took $$(( $$(date +%s) - start )) s; set-up took $$(cat $(READY)) s when it was made"; \
	echo "for commands of your own: . $(BIN)/activate"

# Printed first, while there is nothing else to see; the times are measured (README, Figures).
announce:
	@echo "Trains ResNet-50 on 1,437 handwritten digits for 5 epochs, on $(RANKS) ranks under horovodrun $(ARGS)"
	@$(MAKE) -s -q $(READY) 2> /dev/null && echo "  set-up    is done" \
		|| echo "  set-up    into $(VENV): 5.5 GB of packages, Horovod's build; 2 to 6 minutes on 2 cores with nothing cached, then never again"
	@echo "  training  1 to 5 minutes on 2 cores without a GPU; over 90 % accuracy"
	@echo "  results   runs/resnet50/<date_time>: checkpoints, metrics.csv, curves for TensorBoard"

setup: $(READY)

$(READY): requirements.txt pyproject.toml
	@set -e; start=$$(date +%s); \
	"$(PYTHON)" -m venv $(VENV) || { echo "Python's venv module is missing: apt-get install python3-venv (or set PYTHON=...)"; exit 1; }; \
	echo "Installing the pinned packages into $(VENV) (5.5 GB with CUDA's libraries) ..."; \
	$(PIP) "uv>=0.5" || echo "uv cannot be installed: pip installs the packages, which takes minutes"; \
	$(call INSTALL,--require-hashes -r requirements.txt); \
	$(call INSTALL,--no-deps -e .); \
	$(BIN)/python -m trainkit horovod install; \
	echo $$(( $$(date +%s) - start )) > $(READY)

# What the tests need beyond that: Ray, Lightning, transformers, Sphinx ...
$(TESTS): $(READY) requirements-dev.txt
	@echo "Installing what the tests need into $(VENV) ..."
	@$(call INSTALL,--require-hashes -r requirements-dev.txt)
	@touch $(TESTS)

test: $(TESTS)
	@$(BIN)/python -m tests.groups quick

test-all: $(TESTS)
	@$(BIN)/python -m tests.groups all

# The groups whose sources changed since they last ran, while the minutes last: make test-due MINUTES=25
test-due: $(TESTS)
	@$(BIN)/python -m tests.groups due $(if $(MINUTES),minutes=$(MINUTES))

# What `check` does is in tests/groups.toml, as for every group.
$(GROUPS): $(TESTS)
	@$(BIN)/python -m tests.groups $@ $(if $(ARGS),-- $(ARGS))

fix: $(TESTS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, into build/site; a warning is an error. From nothing, with -E: make docs ARGS=-E
docs: $(TESTS)
	$(BIN)/sphinx-build -q -W --keep-going $(ARGS) -b html docs build/site

# Horovod's own tests at its last release, but for those of TensorFlow, MXNet, Ray and Spark: ARGS="parallel single integration".
horovod-suite: $(TESTS)
	$(BIN)/python -m tests.horovod_suite $(ARGS)

# The trainers that the benchmarks compare with, into the same environment; DALI beside it, where it installs: it brings along
# what torch would take up.
$(PEERS): $(TESTS)
	$(PIP) -r benchmarks/requirements.txt
	$(PIP) --target $(VENV)/dali nvidia-dali-cuda130==2.4.0 \
		|| echo "without DALI"
	touch $(PEERS)

peers: $(PEERS)

# Composer's column of benchmarks.conformance: its torch is another one, so it is beside the others.
$(VENV)/composer/.ready: benchmarks/conformance/composer.txt | $(READY)
	$(BIN)/python -m venv $(VENV)/composer
	$(BIN)/uv pip install --quiet --python $(VENV)/composer/bin/python -r $< \
		|| $(VENV)/composer/bin/python -m pip install --quiet -r $<
	touch $@

composer: $(VENV)/composer/.ready

bench: $(PEERS)
	$(BIN)/python -m benchmarks.everything $(ARGS)
	$(BIN)/python -m benchmarks.page

bench-gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# Both sets of pins again, from pyproject.toml: versions stay where they can; UPGRADE=--upgrade takes the newest. What training
# needs has the versions that the tests ran with.
COMPILE = $(BIN)/uv pip compile -q pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
	--custom-compile-command "make requirements"
requirements: $(TESTS)
	$(COMPILE) --extra dev $(UPGRADE) -o requirements-dev.txt
	$(COMPILE) --extra horovod --constraint requirements-dev.txt --upgrade -o requirements.txt

# Licences of all that is installed. Known vulnerabilities: .github/workflows/ci.yml, which needs PyPI's database.
audit: $(TESTS)
	$(BIN)/uv tool run --python $(BIN)/python pip-licenses --python $(BIN)/python --order license

# What a release uploads, checked: whoever builds this commit again gets the same bytes.
dist: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct 2> /dev/null || echo 0)
dist: $(TESTS)
	rm -rf dist build/again
	$(BIN)/python -m build --no-isolation -o dist .
	$(BIN)/python -m build --no-isolation -o build/again . > /dev/null
	cd dist && for file in *; do cmp "$$file" "../build/again/$$file" || exit 1; done
	$(BIN)/twine check --strict dist/*

# What training installs, with hashes, as CycloneDX.
sbom: $(TESTS)
	mkdir -p dist
	$(BIN)/uv tool run --quiet --python $(BIN)/python --from cyclonedx-bom==7.5.0 cyclonedx-py requirements requirements.txt \
		--pyproject pyproject.toml --output-reproducible -o dist/trainkit.cdx.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
