"""Every program that a server compiles is declared and has room; a few of them compiled for TPU slices that are not
there, of what `make check-tpu` compiles."""

import collections
import dataclasses
import importlib.util
import itertools
import os
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from meshserve.benchmarks.checks import check_tpu
from meshserve.runtime.api.config import ServeConfig
from meshserve.runtime.planning.aot import DryServer
from meshserve.runtime.planning.compiled_plan import program_faults
from meshserve.runtime.planning.kernel_selection import choose_kernels
from meshserve.runtime.program.batch import server_buckets
from meshserve.runtime.program.compile_cache import CompileWatch
from meshserve.runtime.program.step import CacheShape, StepRunner
from meshserve.runtime.startup import launch
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.locate import find_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.chips import compiler_options, target
from meshserve.sharding.memory import added_bytes
from meshserve.sharding.mesh import make_mesh

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'meshserve[tpu]' (Linux)"
)


@pytest.fixture(scope="module", autouse=True)
def no_tpu():
    """Else the compiler complains that it finds no TPU host, and refuses to run in two test processes at a time."""
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
    [*itertools.product(PROGRAMS, ["v5e:2x4", "v6e:2x4"]), (("step", 1), "tpu7x:2x2x1")],
    ids=str,
)
def test_a_program_compiles_in_place_with_its_kernels_and_all_reduces(slice_name, key):
    planner = check_tpu.planner("qwen3-8b", slice_name)
    server = DryServer.on(planner.target, planner.model)
    shape = planner.cache_shape(planner.plan().served_pages)
    report = server.report(key, server.programs(planner.buckets, shape, has_processors=True)[key])
    assert program_faults(planner, report, server.cache_bytes(shape)) == []
    assert report.peak_bytes < planner.target.chip.hbm_bytes


@dataclasses.dataclass(frozen=True)
class Start:
    """What a start of the demo model did."""

    config: ServeConfig
    runner: StepRunner
    num_compiles: int  # after the weights were there
    kept_bytes: int  # of each device, when the cache's size was chosen


@pytest.fixture(scope="module", params=[False, True], ids=["", "keeps outputs"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """With steps of so few tokens that sampling under controls needs more than any of them."""

    def choose(*args):
        return dataclasses.replace(choose_kernels(*args), has_output_buffers=request.param)

    config = ServeConfig(model="demo", tp=2, max_running=64, max_step_tokens=64, dtype="float32", cache_dir="")
    files, num_compiles, kept = find_model("demo"), 0, []
    jax.clear_caches()  # of the start before

    def load(*place):
        nonlocal num_compiles
        loaded = load_model(files.weights, *place)
        num_compiles = watch.counts.num_compiles
        return loaded

    def num_pages(mesh, fraction, page_bytes, kept_bytes):
        kept.append(kept_bytes)
        return 8

    with CompileWatch() as watch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "num_pages_that_fit", num_pages)
        patch.setattr(launch, "choose_kernels", choose)
        runner, *_ = launch.build_runner(config, read_model(files.small / "config.json"), load)
        yield Start(config, runner, watch.counts.num_compiles - num_compiles, *kept)


def test_a_server_compiles_what_is_declared_and_nothing_else(start):
    model, config = read_model(find_model("demo").small / "config.json"), start.config
    server = DryServer(
        model=model,
        config=config,
        target=target("cpu:2"),
        mesh=make_mesh(2),
        layout=model_layout(model, 2),
        dtype=jnp.dtype("float32"),
    )
    shape = CacheShape(num_pages=8, page_size=config.page_size, max_running=config.max_running, max_request_pages=16)
    declared = server.programs(server_buckets(config), shape, has_processors=True)
    assert start.num_compiles == len(declared) + 1, "the largest step twice: first with one page, to size the cache"


def test_the_cache_leaves_room_for_every_program(start):
    figures = start.runner.figures
    assert start.kept_bytes == figures.scratch_bytes + figures.processor_bytes + (start.config.reserve_mib << 20)


def test_sampling_under_controls_may_need_more_than_a_step(start):
    """Else the test before shows little."""
    steps = max(map(added_bytes, start.runner._programs.values()))
    assert start.runner.figures.scratch_bytes > steps


@needs_compiler
def test_a_slice_of_several_hosts_is_laid_along_its_wires(monkeypatch):
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
def test_programs_beyond_the_memories_of_the_chip_are_refused():
    assert check_tpu.refusals("v5e:2x4") == []  # v6e's compiler takes three times as long


@needs_compiler
def test_the_planned_cache_is_the_largest_that_compiles():
    planner = check_tpu.planner("qwen3-0.6b", "v6e:2x4", max_running=1, max_step_tokens=1)
    server, guess = DryServer.on(planner.target, planner.model), planner.plan().max_pages
    bucket = planner.buckets[-1]
    assert server.fits(bucket, planner.cache_shape(guess * 98 // 100))
    assert not server.fits(bucket, planner.cache_shape(guess * 102 // 100))
