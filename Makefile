# Needs python3 (3.11 or newer, with venv), git and make; everything else is installed here.
PYTHON ?= python3
PYTEST_ARGS ?=

# Python 3.11 has its own pins (jax 0.10 is its last); all newer ones share the newest jax.
CONSTRAINTS = constraints/$(shell $(PYTHON) -c \
	"import sys; print('py311' if sys.version_info < (3, 12) else 'py313')").txt

# The suite simulates its devices, so it runs on the CPU whatever the machine has.
CPU = JAX_PLATFORMS=cpu

# The vendors' compilers: they run without an accelerator, and without a CUDA toolkit.
COMPILERS = compilers
COMPILER_TESTS ?= compilers

STAMPS = .venv/.stamp .venv-compilers/.stamp .venv-newest/.stamp

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-tpu docs format lint test test-wheel test-slow test-compilers test-newest test-cluster test-ray test-gpu bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: .venv/.stamp ## create .venv with the package and its tools

$(STAMPS): extras = dev
.venv-compilers/.stamp .venv-newest/.stamp: extras = dev,$(COMPILERS)
$(STAMPS): pyproject.toml $(wildcard constraints/py*.txt)
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "meshwright needs Python 3.11 or newer; choose one with PYTHON=..."; exit 1; }
	@echo "==> $(@D): creating it with $$($(PYTHON) --version)"
	@rm -f $@
	@$(PYTHON) -m venv $(@D)
	@echo "==> $(@D): installing meshwright[$(extras)] with $(CONSTRAINTS)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(CONSTRAINTS) --editable ".[$(extras)]"
	@echo "==> $(@D): ready"
	@touch $@

demo: venv ## a tour in about a minute; writes meshwright-report.html
	@.venv/bin/python examples/demo.py

demo-tpu: .venv-compilers/.stamp ## the same tour with the TPU's own compiler
	@.venv-compilers/bin/python examples/demo.py --tpu

# The site's tools read the package without importing it, so they need neither JAX nor the package.
.venv-docs/.stamp: constraints/docs.txt
	@echo "==> $(@D): creating it with $$($(PYTHON) --version)"
	@rm -f $@
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

docs: .venv-docs/.stamp ## build the site into site/, strictly; open site/index.html, no server needed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
	@echo "==> site/index.html"

format: venv ## format the code and apply safe fixes
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lint: venv ## check format, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy src

test: lint ## lint, then the suite but whole trainings and what needs the vendors' compilers
	$(CPU) .venv/bin/python -m pytest -n 2 --dist loadfile \
		-m "not compilers and not gpu and not slow and not cluster and not ray" $(PYTEST_ARGS)

test-wheel: ## every block of the README, where only the built wheel is installed
	$(PYTHON) tools/readme_from_wheel.py .venv-wheel $(CONSTRAINTS)

test-slow: .venv/.stamp ## the examples, models that train, models of Flax and Equinox, more processes
	$(CPU) .venv/bin/python -m pytest -n 2 --dist loadfile -m "slow and not compilers" $(PYTEST_ARGS)

test-compilers: .venv-compilers/.stamp ## the tests against libtpu and the CUDA compiler
	$(CPU) .venv-compilers/bin/python -m pytest -n 2 -m "$(COMPILER_TESTS)" tests/compilers $(PYTEST_ARGS)

test-newest: ## everything on the newest Python and jax to be found
	@newest=$$($(PYTHON) tools/newest_python.py) || exit 1; \
	if [ -z "$$newest" ]; then \
		echo "test-newest: NOT RUN, found no newer Python than $$($(PYTHON) --version) here"; \
	else \
		$(MAKE) --no-print-directory .venv-newest/.stamp PYTHON="$$newest" && \
		$(CPU) .venv-newest/bin/python -m pytest -n 2 --dist loadfile \
			-m "not gpu and not cluster and not ray" $(PYTEST_ARGS); \
	fi

# One test after the other: each has four processes, which is twice what two cores hold.
test-cluster: .venv/.stamp ## examples/cluster under a real Slurm and Open MPI, on loopback (apt: see .ci/run)
	$(CPU) .venv/bin/python -m pytest -m cluster tests/cluster $(PYTEST_ARGS)

.venv-ray/.stamp: pyproject.toml constraints/ray.txt
	@echo "==> $(@D): creating it with $$($(PYTHON) --version)"
	@rm -f $@
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints/ray.txt --editable ".[checkpoints]" "ray[train]" pytest
	@touch $@

test-ray: .venv-ray/.stamp ## examples/cluster under a real Ray, in a network of its own (needs root)
	$(CPU) .venv-ray/bin/python -m pytest -m ray tests/cluster $(PYTEST_ARGS)

test-gpu: ## the tests for a machine with a GPU, with the jax it has (PYTHON=...)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

bench: .venv-compilers/.stamp ## run every script of benchmarks/
	@for script in benchmarks/[!_]*.py; do \
		echo "==> $$script"; .venv-compilers/bin/python "$$script" || exit 1; \
	done

clean: ## remove the virtual environments, caches and builds
	rm -rf .venv .venv-compilers .venv-docs .venv-newest .venv-ray .venv-wheel build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} + || true
