# Needs python3 (3.11 or newer), make and the package index. Everything is installed in .venv, once.
#   make run        plan, show, run and verify a sample model on eight virtual devices; results in run/
#   make test       lint, types, tests (about what every commit must pass)
#   make test-all   the same with the long sweeps

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
MODEL := onnx:light_resnet50
PLAN := run/light_resnet50.plan.onnx

.PHONY: run test test-all lint clean
.DELETE_ON_ERROR:

run: $(INSTALLED)
	@mkdir -p run
	@printf '\n== plan: the cheapest way to run ResNet-50 on 2 x 4 devices ==\n'
	$(BIN)/parallegg plan $(MODEL) --mesh data=2,model=4 --hardware cpu -o $(PLAN)
	@printf '\n== show: what the plan does ==\n'
	$(BIN)/parallegg show $(PLAN)
	@printf '\n== run: once, on random inputs ==\n'
	$(BIN)/parallegg run $(PLAN) --model $(MODEL) --random -o run/outputs.npz
	@printf '\n== verify: the plan against the model, in float64 ==\n'
	$(BIN)/parallegg verify $(MODEL) $(PLAN)
	@printf '\nDone. The plan is %s (open it with any ONNX viewer), its outputs are run/outputs.npz.\n' $(PLAN)

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
