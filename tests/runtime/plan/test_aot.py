"""Tests that all programs of a server are declared and fit, and compiles a few programs of `make check-tpu`."""

import collections
import dataclasses
import importlib.util
import itertools
import os
from collections.abc import Iterator

import jax
import pytest

from meshserve.benchmarks.checks import check_tpu
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan.aot import DryServer
from meshserve.runtime.plan.compiled_plan import program_faults
from meshserve.runtime.plan.memory_plan import Planner
from meshserve.runtime.program.compile_cache import CompileWatch
from meshserve.runtime.program.step_runner import ALLOCATE, SET_PAGE_ROW, StepRunner
from meshserve.runtime.resolve.resolved_server import PlacedServer, resolve_here
from meshserve.runtime.startup import runner_build
from meshserve.runtime.startup.launch import open_model
from meshserve.sharding.chips import compiler_options, target
from meshserve.sharding.memory import added_bytes
from meshserve.sharding.mesh import make_mesh

# JAX keeps compiled programs (tests/conftest.py), but cannot read back those of a chip that is not here.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'meshserve[tpu]' (Linux)"
)


@pytest.fixture(scope="module", autouse=True)
def no_tpu():
    """Lets the compiler run without a TPU host, and in several test processes at the same time."""
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_LOG_DIR": "disabled",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


PROGRAMS = [
    ("step", 1),
    ("step", 64),
    ("allocate cache", 0),
    ("set page row", 0),
    ("sample", 8),
    ("prompt", 512),
    ("set row", 0),
    ("pad logits", 4),
]


@needs_compiler
@pytest.mark.parametrize(
    ("key", "slice_name"),
    # All on one slice, one on another, and below one on v6e; `make check-tpu` compiles every program for all slices.
    [*itertools.product(PROGRAMS, ["v5e:2x4"]), (("step", 1), "tpu7x:2x2x1")],
    ids=str,
)
def test_a_program_compiles_in_place_with_its_kernels_and_all_reduces(slice_name, key):
    planner = check_tpu.planner("qwen3-8b", slice_name)
    server = DryServer.on(planner.target, planner.server)
    shape = planner.server.cache_shape(planner.plan().served_pages)
    report = server.report(key, server.programs(shape).to_lower()[key])
    assert program_faults(planner, report, server.cache_bytes(shape)) == []
    assert report.peak_bytes < planner.target.chip.hbm_bytes


@dataclasses.dataclass(frozen=True)
class Start:
    """The startup of the demo model."""

    server: PlacedServer
    runner: StepRunner
    num_compiles: int
    used_bytes: int  # per device, beside weights and cache, when the cache was sized


@pytest.fixture(scope="module", params=[False, True], ids=["", "output buffers"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts with steps of so few tokens that sampling with logits processors needs more memory than any of them."""
    config = ServeConfig(model="demo", tp=2, max_running=64, max_step_tokens=64, dtype="float32", cache_dir="")
    model, make_params = open_model("demo", random_weights=False)
    server = resolve_here(config, model, make_mesh(2))
    kernels = dataclasses.replace(server.kernels, has_output_buffers=request.param)
    server = dataclasses.replace(server, kernels=kernels)
    used = []
    structure, params = make_params(model, server.layout, server.mesh, server.dtype)
    jax.clear_caches()  # those of the previous startup

    def num_pages(mesh, fraction, page_bytes, used_bytes):
        used.append(used_bytes)
        return 8

    with CompileWatch() as watch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_build, "num_pages_that_fit", num_pages)
        runner = runner_build.compile_runner(server, structure, params)
        num_compiles = watch.counts.num_compiles
    runner.start(params)
    yield Start(server, runner, num_compiles, *used)


def test_a_server_compiles_what_is_declared_and_nothing_else(start: Start) -> None:
    """The runner, compiling ahead of time and the planner see the same programs."""
    server = start.server
    shape = server.cache_shape(8)
    dry = DryServer(target=target("cpu:2"), server=server)
    declared = dry.programs(shape).to_lower()
    compiled = {bucket.key for bucket in start.runner._programs} | {ALLOCATE, SET_PAGE_ROW}
    compiled |= start.runner._known_processors._programs.keys()
    assert compiled == declared.keys()
    assert start.num_compiles == len(declared) + 1, "the largest step twice: first with one page, to size the cache"
    planner = Planner.on(target("cpu:2"), server.requested, server.model, num_devices=2)
    assert planner.server.buckets == server.buckets
    assert planner.plan().num_programs == start.runner.figures.num_programs == len(server.buckets)


def test_the_cache_leaves_room_for_every_program(start):
    figures = start.runner.figures
    assert start.used_bytes == figures.scratch_bytes + figures.processor_bytes + start.server.reserve_bytes


def test_logits_processors_may_need_more_memory_than_a_step(start):
    """Otherwise the previous test would show little."""
    steps = max(map(added_bytes, start.runner._programs.values()))
    assert start.runner.figures.scratch_bytes > steps


@needs_compiler
def test_a_slice_of_several_hosts_is_ordered_along_its_links(monkeypatch):
    devices = list(target("v6e:4x4").mesh().devices.flat)
    assert len(set(devices)) == 16
    hosts = collections.Counter(device.process_index for device in devices)
    assert hosts == dict.fromkeys(range(4), 4)
    for device, following in zip(devices, [*devices[1:], devices[0]], strict=True):
        hops = [abs(a - b) for a, b in zip(device.coords, following.coords, strict=True)]
        assert sum(hops) == 1, "each sends to a neighbour, the last to the first"
    monkeypatch.setattr(jax, "devices", lambda: sorted(devices, key=lambda device: device.id))
    assert list(make_mesh(16).devices.flat) == devices
    part = make_mesh(8).devices.flat
    assert collections.Counter(device.process_index for device in part) == dict.fromkeys(range(4), 2)
    with pytest.raises(ValueError, match="tp is 6 and there are 4 processes"):
        make_mesh(6)


@needs_compiler
def test_the_compiler_is_told_what_the_chip_and_the_mesh_want():
    sums = {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true"}
    assert compiler_options(target("v6e:2x4").mesh()) == sums
    assert compiler_options(target("v6e:2x4").mesh(1)) == {}
    tiles = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
    assert compiler_options(target("tpu7x:2x2x1").mesh()) == compiler_options(target("tpu7x:2x2x1").mesh(1)) == tiles


@needs_compiler
def test_programs_beyond_the_memories_of_the_chip_are_refused(every_case: bool):
    if not every_case:
        pytest.skip("takes half a minute; `make check-tpu` does it for every slice")
    assert check_tpu.refusals("v5e:2x4") == []  # v6e's compiler takes three times as long


@needs_compiler
def test_the_planned_cache_is_the_largest_that_compiles():
    planner = check_tpu.planner("qwen3-0.6b", "v6e:2x4", max_running=1, max_step_tokens=1)
    server, guess = DryServer.on(planner.target, planner.server), planner.plan().max_pages
    bucket = planner.server.buckets[-1]
    assert server.fits(bucket, planner.server.cache_shape(guess * 98 // 100))
    assert not server.fits(bucket, planner.server.cache_shape(guess * 102 // 100))
