# make demo: train and certify a model on one machine; make cifar: the same on CIFAR-10. make test: all
# tests. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
# FFCV is compiled against these libraries; where they are not, everything but FFCV works.
FFCV_NEEDS := libopencv-dev libturbojpeg0-dev pkg-config
FFCV_STAMP := $(if $(shell pkg-config --exists opencv4 libturbojpeg 2>/dev/null && echo yes),$(VENV)/.installed-ffcv)

# Idle threads sleep: they do not spin on cores that others use.
WAIT_POLICY_FROM := $(origin OMP_WAIT_POLICY)
export OMP_WAIT_POLICY ?= passive

.PHONY: env demo cifar cifar-source test check lint bench image clean

env: $(STAMP) $(FFCV_STAMP)
	@test -n "$(FFCV_STAMP)" || echo "without FFCV, whose tests skip: apt-get install $(FFCV_NEEDS)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "error: $(PYTHON) is older than 3.10; say make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@echo "installing into $(VENV); a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@# On all cores, where pip has one. What some packages carry for other Pythons does not compile.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

$(VENV)/.installed-ffcv: $(STAMP)
	@echo "installing FFCV; half a minute"
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ffcv]'; \
		then touch $@; else echo "without FFCV, whose tests skip: it could not be compiled, see above"; fi

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m lipnext_scale.train --config configs/digits.yaml
	$(BIN)/python -m lipnext_scale.certify --run runs/digits

# The official archive, or the directory unpacked from it.
CIFAR ?= cifar-10-python.tar.gz

cifar-source:
	@test -e data/cifar10/test.index.json -o -e "$(CIFAR)" || { echo "error: $(CIFAR): no such file; say make cifar CIFAR=PATH, \
	of cifar-10-python.tar.gz (www.cs.toronto.edu/~kriz/cifar.html) or the directory in it"; exit 2; }

# Its cores are its own, so threads may spin, unless the environment says otherwise.
ifneq ($(WAIT_POLICY_FROM),environment)
cifar: export OMP_WAIT_POLICY = active
endif
cifar: cifar-source $(STAMP)
	@test -e data/cifar10/test.index.json || $(BIN)/python -m data_prep.cifar --source "$(CIFAR)" --out data/cifar10
	$(BIN)/python -m lipnext_scale.train --config configs/cifar10_small.yaml
	$(BIN)/python -m lipnext_scale.certify --run runs/cifar10_small
	$(BIN)/python -m lipnext_scale.attack --run runs/cifar10_small --samples 100

# A file's tests share what they start. The order is that of tests/conftest.py.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
# Hundreds of processes are started: each would compile the package anew.
test check: export PYTHONDONTWRITEBYTECODE :=

# What must not depend on how a CPU adds up: run again with other kernels.
NUMERIC := tests/manifold tests/models tests/optim tests/distributed/test_distributed_parity.py \
	$(addprefix tests/certification/test_certification_,fuzz.py lipschitz.py radius.py rounding.py) \
	$(addprefix tests/layers/test_layers_,families.py certificate.py)

# Everything: style, types, all tests.
test: env lint
	$(BIN)/python -m pytest $(PARALLEL) -m '' tests
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest $(PARALLEL) -m '' $(NUMERIC)

# What a contributor runs all day.
check: env lint
	$(BIN)/python -m pytest $(PARALLEL) tests

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: export OMP_WAIT_POLICY = active
bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.manifold_step
	$(BIN)/python -m benchmarks.block
	$(BIN)/python -m benchmarks.sharded_step
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.certify
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.engines

# The container image (docs/container.md); make image IMAGE_ARGS='--build-arg BASE=debian:bookworm-slim'
IMAGE ?= lipnext_scale
image:
	docker build --tag $(IMAGE) --build-arg REVISION=$$(git rev-parse HEAD) $(IMAGE_ARGS) .

clean:
	rm -rf runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
