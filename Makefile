# Needs python3 (3.11 or newer), make and the package index. Everything is installed in .venv, once.
#   make run            build, plan, train and verify a small GPT on eight virtual devices; results in run/
#   make run-inference  plan, run and verify ResNet-50
#   make test           lint, types, tests (about what every commit must pass)
#   make test-all       the same with the long sweeps

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
SIZES := --layers 2 --width 128 --heads 8 --vocabulary 128 --context 64 --batch 16
STEP := --train --loss cross-entropy:logits --clip-norm 1 --mesh data=2,model=4
PLAN := run/gpt.plan.onnx
PLAIN := run/data-parallel.plan.onnx
RESNET := onnx:light_resnet50

.PHONY: run run-inference test test-all lint clean
.DELETE_ON_ERROR:

run: $(INSTALLED)
	@mkdir -p run
	@printf '\n== model: a GPT of 0.4 million weights, as ONNX ==\n'
	$(BIN)/python -m parallegg.builders gpt $(SIZES) -o run/gpt.onnx
	@printf '\n== plan: the cheapest way to train it on 2 x 4 devices with 6 MB each ==\n'
	$(BIN)/parallegg plan run/gpt.onnx $(STEP) --memory 6MB -o $(PLAN)
	@printf '\n== show: what the plan does; S0 is split along dimension 0, R is whole on every device ==\n'
	$(BIN)/parallegg show $(PLAN)
	@printf '\n== the same step by plain data parallelism, with as much memory as it takes ==\n'
	$(BIN)/parallegg plan run/gpt.onnx $(STEP) --scheme data-parallel -o $(PLAIN)
	@printf '\n== compare: both under the same costs ==\n'
	$(BIN)/parallegg compare $(PLAN) $(PLAIN)
	@printf '\n== train: under the plan, on what the standard library of Python says of itself ==\n'
	$(BIN)/parallegg train $(PLAN) --model run/gpt.onnx --data examples/docstrings.py:batches --steps 200 \
	  --learning-rate 0.003 --schedule cosine --warmup 20 --metrics run/metrics.jsonl -o run/gpt.state.npz
	@printf '\n== verify: loss, weights and moments after a step of the plan against the model, in float64 ==\n'
	$(BIN)/parallegg verify run/gpt.onnx $(PLAN)
	@printf '\nDone. In run/: the plan (%s, for any ONNX viewer), metrics.jsonl, the trained weights.\n' $(PLAN)

run-inference: $(INSTALLED)
	@mkdir -p run
	$(BIN)/parallegg plan $(RESNET) --mesh data=2,model=4 -o run/resnet50.plan.onnx
	$(BIN)/parallegg show run/resnet50.plan.onnx
	$(BIN)/parallegg run run/resnet50.plan.onnx --model $(RESNET) --random -o run/outputs.npz
	$(BIN)/parallegg verify $(RESNET) run/resnet50.plan.onnx

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ""

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@mkdir -p build/types
	@ln -sfn ../.. build/types/parallegg
	@# Without files pyright succeeds; so what it found is looked at, too.
	$(BIN)/pyright --stats > build/pyright.txt; status=$$?; \
	  sed '/^Loading\|^Auto-excluding\|^\[FG\]/d; /^Completed/,$$d' build/pyright.txt; \
	  grep -q '^Found [1-9]' build/pyright.txt && exit $$status

# Installed again only when pyproject.toml changes.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11; try make PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[test]'
	touch $@

clean:
	rm -rf .venv run build dist *.egg-info
