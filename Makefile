# `make demo`, `make test` and `make docs`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# Install with pip's own progress. In an environment that has packages already, a page of
# "Requirement already satisfied" is left out. A pipe hides pip's exit code: the stamp tells success.
# Modules are compiled when they are first imported; to compile all of them takes half a minute.
define install
	@echo "Installing Counterfoil into $(VENV): one to three minutes the first time"
	@rm -f $@.part; \
	install() { $(PIP) install --no-compile -c constraints.txt -e ".[$(EXTRAS)]" && touch $@.part; }; \
	if [ -e $(VENV)/.demo ] || [ -e $(VENV)/.dev ]; \
	then install | { grep -v '^Requirement already satisfied' || true; }; else install; fi; \
	test -e $@.part && mv $@.part $@
endef

# Modules that the tests import are compiled here: otherwise each worker compiles all of them. Errors
# are for the tests themselves to report.
define compile
	-@$(PYTEST) --collect-only -qq >/dev/null 2>&1
endef

# The tests, by three processes that share their imports: some tests wait, so two processes leave two
# cores idle at times. Beside them what reads the source, at low priority. Its output follows theirs.
# Either may fail.
define checked
	@notes=$$(mktemp); \
	nice -n 19 $(MAKE) --no-print-directory --keep-going lint typecheck doctests links >$$notes 2>&1 & \
	reading=$$!; trap "kill $$reading" INT TERM; \
	OMP_NUM_THREADS=1 $(2) $(BIN)/python -m tests.forked 3 --dist=loadfile --no-loadscope-reorder --durations=15 -m $(1); \
	tested=$$?; wait $$reading; read=$$?; cat $$notes; rm -f $$notes; \
	[ $$tested -eq 0 ] && [ $$read -eq 0 ]
endef
PYTEST := $(BIN)/python -m pytest
unexport PYTHONDONTWRITEBYTECODE  # each process that a test starts would compile the package anew

.PHONY: demo test test-all doctests docs links lint format typecheck bench clean help \
        pinned pins sbom audit release-check

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/: .*## /\t/' | expand -t 14

demo: $(VENV)/.demo      ## a pretrained model on scenes, served; a small one trains meanwhile (ARGS=my-photos/)
	$(BIN)/counterfoil demo $(ARGS)

test: $(VENV)/.dev       ## lint, types, doctests and the fast tests
	$(call checked,"not slow and not gpu")

test-all: $(VENV)/.dev   ## everything: slow tests, and more examples of each property
	$(call checked,"not gpu",HYPOTHESIS_PROFILE=thorough)

doctests: $(VENV)/.dev   ## the examples in docstrings
	OMP_NUM_THREADS=1 $(PYTEST) -p tests.conftest --doctest-modules $$(grep --recursive --files-with-matches --include='*.py' '>>>' src)

# Warnings are errors (mkdocs.yml), but not with --quiet; the theme's own notice is no warning of ours.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
docs: $(VENV)/.dev       ## the documentation in site/, with the tutorials run: some minutes
	$(MKDOCS)

links: $(VENV)/.dev      ## the documentation without running tutorials: links, anchors, public names
	@folder=$$(mktemp -d); RUN_TUTORIALS=false $(MKDOCS) --site-dir $$folder; \
	built=$$?; rm -rf $$folder; exit $$built

lint: $(VENV)/.dev       ## ruff, check only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev     ## ruff, mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/.dev  ## mypy over src/
	$(BIN)/mypy

# Those that need a run, a folder of data, a file for their results or a GPU are called by hand.
NEEDS_ARGUMENTS := %/audit_scenes.py %/checked_captions.py %/epoch.py %/evaluate_coco.py %/false_alarms.py %/faults.py \
  %/maxsim_blocks.py %/search_scale.py
bench: $(VENV)/.dev      ## the programs of benchmarks/, with their default sizes
	for program in $(filter-out $(NEEDS_ARGUMENTS),$(wildcard benchmarks/[a-z]*.py)); do \
	  echo "== $$program"; $(BIN)/python $$program || exit 1; done

# The supply chain: see SECURITY.md. Hashes cannot be checked for an editable install, so the
# requirements come first, with hashes, and then the package alone, by the build backend that is
# among them.
pinned: $(BIN)/python    ## what CI installs: every file by its SHA-256
	$(PIP) install --no-compile --require-hashes --no-deps -r requirements-ci.txt
	$(PIP) install --no-compile --no-deps --no-build-isolation -e .
	$(compile)
	touch $(VENV)/.dev $(VENV)/.demo

pins:                    ## write requirements-ci.txt anew (needs uv and the package index)
	$(PYTHON) .ci/supply_chain.py pins

sbom: $(VENV)/.dev       ## sbom.json: what is installed, in the format of CycloneDX
	$(BIN)/python .ci/supply_chain.py sbom sbom.json

audit: $(VENV)/.dev      ## bandit over src/, known vulnerabilities of what CI installs (needs a network)
	$(BIN)/python -m bandit --quiet --recursive --configfile pyproject.toml src
	$(BIN)/python -m pip_audit --require-hashes --disable-pip --requirement requirements-ci.txt

release-check: $(VENV)/.dev  ## build the release twice and compare SHA-256 (needs hatchling)
	$(BIN)/python .ci/supply_chain.py release-check

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Counterfoil needs Python 3.10 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: EXTRAS := app,vision
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(install)

$(VENV)/.dev: EXTRAS := dev
$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(install)
	$(compile)
	touch $(VENV)/.demo
