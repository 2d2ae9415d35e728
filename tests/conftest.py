"""Configures every test process to use 8 virtual CPU devices."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from meshserve.runtime.adapters.bank import AdapterShape
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.program.batch import ANY_MODE, Bucket
from meshserve.runtime.program.compile_cache import use_cache
from meshserve.runtime.resolve import resolved_server
from meshserve.runtime.resolve.buckets import adapter_buckets, declare_buckets
from meshserve.sharding.mesh import use_cpu_devices

from .compiled_programs import compiled_programs

# Compiling is most of the time of these tests. Without optimisation, and with XLA's older emitters, it takes a third of
# the processor time. Whoever sets XLA_FLAGS decides instead, see `make fuzz`.
_COMPILE_FAST = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
)
# By default, XLA aborts a process whose devices wait 40 s for each other, which can happen on a busy machine.
_WAIT_LONG = "--xla_cpu_collective_call_terminate_timeout_seconds=1200 --xla_cpu_collective_timeout_seconds=1200"
# Torch, which computes references, and OpenBLAS would otherwise spin in a thread per core while waiting for others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Many tests compile the same programs, in several processes and runs. Pytest's workers inherit these variables, and so
# do the servers that tests start, which use JAX's own cache with `--cache-dir=`. JAX's key has the program, the flags
# and the versions, and half-written entries are compiled again.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', _COMPILE_FAST)} {_WAIT_LONG}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compiled_programs() / "xla")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
use_cpu_devices(8)
use_cache(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).parent)
# A slow hypothesis example is not a failure either.
hypothesis.settings.register_profile(
    "meshserve", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("meshserve")
# A background job of a shell inherits "ignore SIGINT", and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=3000, help="mutated requests to send (make fuzz: 100,000)")
    parser.addoption("--minutes", type=float, default=0.0, help="minutes of all attacks together (make fuzz: 10)")
    parser.addoption("--simulated", type=int, default=250, help="requests per case of test_simulation.py")
    parser.addoption(
        "--structured",
        type=int,
        default=12,
        help="number of schemas, and of regular expressions, in test_structured.py",
    )
    parser.addoption("--random-requests", type=int, default=30, help="requests to each drafter (make traffic: 1,000)")
    parser.addoption("--draws", type=int, default=8192, help="draws per case of sampling (make sample: 100,000)")
    parser.addoption("--tutorial", action="store_true", help="run the commands of the tutorial (make docs)")
    parser.addoption("--packages", action="store_true", help="build and install the packages (make test-package)")
    parser.addoption("--compile-cuda", action="store_true", help="compile the CUDA sources (make check)")
    parser.addoption("--clients", action="store_true", help="run clients in other languages (make test-clients)")
    parser.addoption("--updates", type=int, default=16, help="weight updates under load (make test-updates: 1,000)")
    parser.addoption("--tunix", default="", help="folder with google-tunix and what it needs (make test-tunix)")
    parser.addoption("--fleet", action="store_true", help="run fleets of real replicas (make test-fleet)")
    parser.addoption("--routers", default="", help="Python of an environment with other routers (make test-fleet)")
    parser.addoption(
        "--client-python", default="", help="Python of an environment with clients (make test-clients-openai)"
    )
    parser.addoption("--client-node", default="", help="folder with clients for Node (make test-clients-openai)")
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run every case of the TPU kernels and of clusters, and compile all programs of servers",
    )


def pytest_collection_finish() -> None:
    """Spares the garbage collector the modules of all tests, and most of its runs while programs are traced."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def opened_cache() -> None:
    """Opens the cache of compiled programs: JAX keeps to the first, which must not be that of a command in a test."""
    jax.jit(lambda: 0)()


@pytest.fixture(scope="session", autouse=True)
def few_shapes(every_program: bool) -> Iterator[None]:
    """Gives the servers of this process steps of 1, 8 and 64 tokens and of their limits only; see `_few_buckets`."""
    with pytest.MonkeyPatch.context() as patch:
        if not every_program:
            patch.setattr(resolved_server, "declare_buckets", _few_buckets)
        yield


@pytest.fixture(scope="module")
def greedy_programs(few_shapes: None, every_program: bool) -> Iterator[None]:
    """Compiles a module's servers for greedy requests alone, which takes half the time. Others cannot be served."""

    def greedy_buckets(**limits: Any) -> tuple[Bucket, ...]:
        buckets = [each for each in _few_buckets(**limits) if each.mode in (ANY_MODE, SamplingMode.GREEDY)]
        return tuple(replace(each, mode=SamplingMode.GREEDY) for each in buckets)

    def greedy_adapter_buckets(plain: tuple[Bucket, ...], adapters: AdapterShape) -> tuple[Bucket, ...]:
        return tuple(replace(each, mode=SamplingMode.GREEDY) for each in adapter_buckets(plain, adapters))

    with pytest.MonkeyPatch.context() as patch:
        if not every_program:
            patch.setattr(resolved_server, "declare_buckets", greedy_buckets)
            patch.setattr(resolved_server, "adapter_buckets", greedy_adapter_buckets)
        yield


def _few_buckets(**limits: Any) -> tuple[Bucket, ...]:
    """Leaves out most of the small shapes: they differ in nothing but their sizes, and compiling takes the time."""
    kept = {1, 8, 64, limits["max_running"], limits["max_step_tokens"]}
    is_large = limits["max_step_tokens"] > 256  # as of plans for accelerators
    return tuple(each for each in declare_buckets(**limits) if is_large or each.num_tokens in kept)


@pytest.fixture(scope="session")
def every_program(pytestconfig: pytest.Config) -> bool:
    """Whether servers of tests compile all programs that servers of users would."""
    return pytestconfig.getoption("--every-case")


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """Compiles the programs of a module's servers with optimisation, for those that compute longer than this takes."""
    from meshserve.runtime.program import step
    from meshserve.runtime.program.processors import processor_programs
    from meshserve.sharding import chips

    def compiler_options(*args: Any, **keywords: Any) -> dict[str, Any]:
        return {**chips.compiler_options(*args, **keywords), "xla_backend_optimization_level": 1}

    with pytest.MonkeyPatch.context() as patch:
        if _COMPILE_FAST in os.environ["XLA_FLAGS"]:
            patch.setattr(step, "compiler_options", compiler_options)
            patch.setattr(processor_programs, "compiler_options", compiler_options)
        yield


@pytest.fixture(scope="session")
def second_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random model with the tokenizer and template of published ones; see `second_model.py`."""
    from .second_model import save_second_model  # imports torch

    return save_second_model(tmp_path_factory.mktemp("second") / "second-model")


@pytest.fixture(autouse=True)
def removed_log_handlers() -> Iterator[None]:
    """Removes the log handlers of commands that a test runs: they write to its standard error, which ends with it."""
    root = logging.getLogger()
    before = root.handlers[:]
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)


@pytest.fixture
def num_draws(pytestconfig: pytest.Config) -> int:
    """Number of tokens drawn per distribution case: few in `make test`, 100,000 in `make sample`."""
    return pytestconfig.getoption("--draws")


@pytest.fixture
def num_simulated(pytestconfig: pytest.Config) -> int:
    """Number of requests per simulated case: few in `make test`, 20,000 in `make simulate`."""
    return pytestconfig.getoption("--simulated")


@pytest.fixture
def every_case(pytestconfig: pytest.Config) -> bool:
    """Whether to run the cases that take too long for `make test`."""
    return pytestconfig.getoption("--every-case")


@pytest.fixture
def num_random_requests(pytestconfig: pytest.Config) -> int:
    """Number of requests to each drafter in test_random_traffic.py."""
    return pytestconfig.getoption("--random-requests")


@pytest.fixture
def num_structured(pytestconfig: pytest.Config) -> int:
    """Number of outputs per kind of constraint, schema and regex: few in `make test`, 1,000 in `make structured`."""
    return pytestconfig.getoption("--structured")
