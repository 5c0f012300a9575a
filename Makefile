# make train   set up what is missing, then train ResNet-50 on 2 ranks under horovodrun
# make test    set up what is missing, then run the checks and the tests
# The rest is for those who change trainkit: see CONTRIBUTING.md.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := $(VENV)/.peers
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
RANKS  ?= 2
ARGS   ?=

.PHONY: train announce test setup check fix unit golden parallel faults hosts e2e ray slurm mpi docs slow horovod-suite peers bench bench-gpu requirements audit dist clean

train: announce $(READY)
	@start=$$(date +%s); \
	. $(BIN)/activate && horovodrun -np $(RANKS) python -m trainkit fit conf=resnet50 $(ARGS) || exit $$?; \
	echo "training took $$(( $$(date +%s) - start )) s; set-up took $$(cat $(READY)) s when it was made"

# Printed first, while there is nothing else to see; the times are measured (README, Figures).
announce:
	@echo "Trains ResNet-50 on 1,437 handwritten digits for 5 epochs, on $(RANKS) ranks under horovodrun $(ARGS)"
	@$(MAKE) -s -q $(READY) 2> /dev/null && echo "  set-up    is done" \
		|| echo "  set-up    into $(VENV): 5 GB of packages, Horovod's build; 187 s on 2 cores with nothing cached, then never again"
	@echo "  training  88 s on 2 cores without a GPU; over 90 % accuracy"
	@echo "  results   runs/resnet50/<date_time>: checkpoints, metrics.csv, curves for TensorBoard"

test: check docs unit golden parallel faults hosts e2e ray slurm mpi

setup: $(READY)

$(READY): requirements.txt pyproject.toml
	@set -e; start=$$(date +%s); \
	"$(PYTHON)" -m venv $(VENV) || { echo "Python's venv module is missing: apt-get install python3-venv (or set PYTHON=...)"; exit 1; }; \
	echo "Installing the pinned packages into $(VENV) (5 GB with CUDA's libraries, a few minutes) ..."; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .; \
	$(BIN)/python -m trainkit horovod install; \
	echo $$(( $$(date +%s) - start )) > $(READY)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

unit: $(READY)
	$(BIN)/pytest -q -n 2 tests/unit tests/properties tests/architecture tests/ports

golden: $(READY)
	$(BIN)/pytest -q -n 2 tests/golden

# Two at a time: ranks are idle while they import and while they wait for one another. A file stays with one worker, whose tests
# share a launcher's start. DeepSpeed's tests come after the others: it stands beside the environment, where only they see it.
parallel: $(READY)
	$(BIN)/pytest -q -n 2 --dist loadfile tests/parallel -m "not slow" --ignore tests/parallel/test_zero.py
	@test -d $(VENV)/deepspeed || DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --target $(VENV)/deepspeed deepspeed==0.19.8 hjson==3.1.0 py-cpuinfo==9.0.0 ninja==1.13.2 einops==0.8.2 msgpack==1.2.4 \
		|| { rm -rf $(VENV)/deepspeed; echo "DeepSpeed cannot be installed here: its tests are skipped"; }
	PYTHONPATH=$(CURDIR)/$(VENV)/deepspeed $(BIN)/pytest -q -n 2 --dist loadfile tests/parallel/test_zero.py -m "not slow"

faults: $(READY)
	$(BIN)/pytest -q tests/faults -m "not slow"

# Network namespaces of this machine, with sshd in each if it is installed: needs root, and iproute2.
hosts: $(READY)
	$(BIN)/pytest -q tests/hosts -m "not slow"

e2e: $(READY)
	$(BIN)/pytest -q -n 2 --dist loadscope tests/e2e -m "not slow"

# One cluster of raylets on this machine for all tests.
ray: $(READY)
	$(BIN)/pytest -q tests/ray -m "not slow"

# One Slurm on this machine for all tests. Root's apt-get installs it; without Slurm the tests are skipped, and say why.
slurm: $(READY)
	@command -v slurmctld > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
		&& export DEBIAN_FRONTEND=noninteractive && apt-get -qq update > /dev/null \
		&& apt-get -qq install -y --no-install-recommends slurmctld slurmd slurm-client munge > /dev/null; } \
		|| echo "Slurm cannot be installed here: its tests are skipped"
	$(BIN)/pytest -q -rs tests/slurm -m "not slow"

# Horovod with MPI stands beside the environment, where only these tests see it: the environment's own has none. Root's apt-get
# installs Open MPI; without it the tests are skipped, and say why. The wheel comes from the cache, if it was built before.
mpi: $(READY)
	@command -v mpicxx > /dev/null && command -v mpirun > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
		&& export DEBIAN_FRONTEND=noninteractive && apt-get -qq update > /dev/null \
		&& apt-get -qq install -y --no-install-recommends libopenmpi-dev openmpi-bin > /dev/null; } \
		|| echo "Open MPI cannot be installed here: its tests are skipped"
	@rm -rf $(VENV)/mpi $(VENV)/mpi-wheel; if command -v mpicxx > /dev/null && command -v mpirun > /dev/null; then \
		$(BIN)/python -m trainkit horovod wheel --mpi --out $(VENV)/mpi-wheel \
		&& $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/mpi $(VENV)/mpi-wheel/*.whl; fi
	$(BIN)/pytest -q -rs -n 2 --dist loadfile tests/mpi -m "not slow"

# The site, into build/site; a warning is an error.
docs: $(READY)
	$(BIN)/sphinx-build -q -E -W --keep-going -b html docs build/site

# With the other trainers and a browser, if they are there: make peers, apt-get install chromium.
slow: $(READY)
	$(BIN)/pytest -q tests -m slow

# Horovod's own tests at its last release, but for those of TensorFlow, MXNet, Ray and Spark: ARGS="parallel single integration".
horovod-suite: $(READY)
	$(BIN)/python -m tests.horovod_suite $(ARGS)

# The trainers that the benchmarks compare with, into the same environment; DALI beside it, where it installs: it brings along
# what torch would take up.
$(PEERS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(VENV)/dali nvidia-dali-cuda130==2.4.0 \
		|| echo "without DALI"
	touch $(PEERS)

peers: $(PEERS)

bench: $(PEERS)
	$(BIN)/python -m benchmarks.everything $(ARGS)
	$(BIN)/python -m benchmarks.page

bench-gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# requirements.txt again, from pyproject.toml: versions stay where they can; UPGRADE=--upgrade takes the newest.
requirements: $(READY)
	$(BIN)/uv pip compile -q pyproject.toml --extra dev --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
		--custom-compile-command "make requirements" $(UPGRADE) -o requirements.txt

# Licences of all that is installed. Known vulnerabilities: .github/workflows/ci.yml, which needs PyPI's database.
audit: $(READY)
	$(BIN)/uv tool run --python $(BIN)/python pip-licenses --python $(BIN)/python --order license

# What a release uploads, checked.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation -o dist .
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
