# The developer's interface. A fresh machine needs `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-gpu check kernels format bench bench-constrained bench-peers sizes clean

demo: $(VENV)/run.stamp
	$(BIN)/palmette pull
	$(BIN)/python examples/demo.py

test: $(VENV)/dev.stamp
	$(BIN)/palmette pull
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow and not gpu"

test-slow: $(VENV)/dev.stamp
	$(BIN)/palmette pull
	$(BIN)/python -m pytest -q -m "slow and not gpu"

# On a machine with a CUDA device; skipped, with the reason, on others.
test-gpu: $(VENV)/dev.stamp
	env -u TRITON_INTERPRET $(BIN)/python -m pytest -q -m gpu -rs -W default tests/gpu

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .link && ln -sfn .. .link/palmette
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_tiny.py

# Registers, spills, shared memory and instructions of the GPU kernels; needs no GPU.
kernels: $(VENV)/dev.stamp
	env -u TRITON_INTERPRET $(BIN)/python benchmarks/machine_code/aot.py --jobs 2

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev.stamp
	$(BIN)/palmette pull
	$(BIN)/python benchmarks/throughput.py

# SUITE and MASKBENCH are collections of schemas, as benchmarks/constrained.py describes them.
bench-constrained: $(VENV)/dev.stamp
	$(BIN)/palmette pull
	$(BIN)/python benchmarks/constrained.py $(if $(SUITE),--suite $(SUITE)) \
		$(if $(MASKBENCH),--maskbench $(MASKBENCH)) $(if $(GGUF),--gguf $(GGUF))

# Other servers, in environments of their own under the user's cache; an hour on a quiet machine.
bench-peers: $(VENV)/dev.stamp
	$(BIN)/palmette pull
	$(BIN)/python benchmarks/peers.py $(PEERS)

sizes:
	@$(PYTHON) benchmarks/sizes.py

clean:
	rm -rf $(VENV) .link build dist *.egg-info

$(VENV)/pip.stamp:
	$(PYTHON) -m venv $(VENV)
	touch $@

# What a user installs: the core and the server, without torch.
$(VENV)/run.stamp: $(VENV)/pip.stamp pyproject.toml constraints.txt
	$(INSTALL) -e '.[serve]'
	touch $@

# What a developer needs: torch and transformers as oracles, the server, linters.
$(VENV)/dev.stamp: $(VENV)/pip.stamp pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	touch $@ $(VENV)/run.stamp
