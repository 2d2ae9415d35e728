"""Compiles the programs of a resolved server, sizes its KV cache from the memory that they leave, and warms it up."""

import logging
import time
from collections.abc import Sequence

import jax
import jax.monitoring
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.memory import added_bytes, num_pages_that_fit, shard_bytes

from ..cluster.preflight import Cluster
from ..draft.draft_build import Drafting
from ..draft.model.drafting_runner import RunnerBeside
from ..program.batch import Bucket
from ..program.expert_tokens import ExpertTokens
from ..program.processors.processor_programs import LogitsProcessors
from ..program.program_store import ProgramStore
from ..program.step_runner import StepRunner
from ..resolve.resolved_server import PlacedServer
from ..resolve.server_programs import ServerPrograms

_log = logging.getLogger(__name__)
_WARM_UP_RUNS = 2  # the second run of a program may still change its graph


def compile_runner(
    server: PlacedServer,
    structure: nnx.GraphDef,
    params: nnx.State,
    *,
    measured: Mesh | None = None,
    reserved_bytes: int = 0,
    draft: Drafting | None = None,
    cluster: Cluster | None = None,
    store: ProgramStore | None = None,
) -> StepRunner:
    """Compiles every program of a server and returns its runner, which has not been started.

    Args:
      server: The resolved server.
      structure: The structure of its model.
      params: Its parameters, as arrays or as shapes with shardings.
      measured: The devices whose free memory limits the cache; by default all devices of the mesh.
      reserved_bytes: Memory of each device that will be allocated before the cache; negative if memory will be freed.
      draft: The draft model or head beside it, whose weights are loaded and whose pages lie beside these.
      cluster: The other processes of the mesh, which must compile the same programs.
      store: Where compiled programs are kept between starts, if they are.

    Raises:
      ValueError: The devices or kernels do not support a program.
      MemoryError: The devices have no room for a cache.
      ClusterError: The processes have different programs, or one of them has failed.
    """
    # Kernels and scratch memory do not depend on the number of pages, so a cache of one page is enough to measure them.
    head = draft.head if draft is not None else None
    one_page = server.programs(structure, params, server.cache_shape(1), head)
    processors = None
    if one_page.processors is not None:
        processors = LogitsProcessors(one_page.processors, server.compile_threads, store)
    num_pages = server.requested_pages
    if not num_pages:
        used_bytes = _scratch_bytes(one_page, processors, store) + server.reserve_bytes + reserved_bytes
        used_bytes += server.adapter_bytes + server.adapter_staging_bytes
        used_bytes += server.host_cache.staging_bytes if server.host_cache is not None else 0
        page_bytes = server.page_bytes
        if draft is not None:
            used_bytes, page_bytes = used_bytes + draft.output_bytes, page_bytes + draft.page_bytes
        num_pages = num_pages_that_fit(measured or server.mesh, server.memory_fraction, page_bytes, used_bytes)
    if cluster is not None:
        num_pages = cluster.num_pages(
            num_pages,
            mesh=server.mesh.devices.tolist(),
            buckets=server.buckets,
            state=one_page.state,
            kernels=server.kernel_names,
            adapters=server.adapters,
        )
    shape = server.cache_shape(num_pages)
    started = time.monotonic()
    runner = server.programs(structure, params, shape, head).compile_runner(processors, server.compile_threads, store)
    counts = one_page.state.expert_tokens
    if counts is not None and server.layout.experts is not None:
        runner.expert_tokens = ExpertTokens(server.layout.experts, counts, server.mesh.local_devices[0])
    _log.info("%d step programs ready after %.1f s; %s", len(server.buckets), time.monotonic() - started, shape)
    return runner


def _scratch_bytes(programs: ServerPrograms, processors: LogitsProcessors | None, store: ProgramStore | None) -> int:
    """Returns the bytes on each device that programs need in addition to weights and cache."""
    largest = programs.buckets[-1]

    def step_bytes() -> int:
        return added_bytes(programs.lower_step(largest).compile())

    scratch = store.number(programs, largest.key, step_bytes) if store is not None else step_bytes()
    if processors is not None:
        scratch = max(scratch, processors.scratch_bytes) + processors.device_bytes
    return scratch + shard_bytes(programs.output_buffers)


def warm_up(
    runner: StepRunner | RunnerBeside, buckets: Sequence[Bucket], chains: Sequence[Bucket], *, max_running: int
) -> None:
    """Runs every program of a started runner that has no requests yet, and waits for the devices.

    On a GPU the first run of a program records its CUDA graph, and cuBLAS prepares for its shapes. This takes tens of
    milliseconds, which the first requests would wait for, and which would be taken for the cost of a step.

    Each step computes one token, at the first position of the first slot. This writes to the first page, which belongs
    to no request yet. All processes of a server call this at the same point of their start.

    Args:
      runner: The runner.
      buckets: The buckets of its steps.
      chains: The buckets in which it proposes draft tokens, if it does.
      max_running: The number of slots.
    """
    started = time.monotonic()
    for _ in range(_WARM_UP_RUNS):
        for bucket in buckets:
            jax.block_until_ready(runner.run(bucket, _one_token(bucket, max_running)))
        if isinstance(runner, RunnerBeside):
            _warm_up_drafts(runner, buckets, chains, max_running)
    served = runner.served if isinstance(runner, RunnerBeside) else runner
    if served.expert_tokens is not None and served.state.expert_tokens is not None:
        served.expert_tokens.begin(served.state.expert_tokens)
    seconds = time.monotonic() - started
    jax.monitoring.record_event_duration_secs("/meshserve/start/warm_up_duration", seconds)
    _log.info("ran every program in %.1f s", seconds)


def _warm_up_drafts(
    runner: RunnerBeside, buckets: Sequence[Bucket], chains: Sequence[Bucket], max_running: int
) -> None:
    for chain in chains:
        proposed = runner.propose(chain, _one_token(chain, max_running))
    for bucket in buckets:
        if bucket.num_steps == 1:
            packed = _one_token(bucket, max_running)
            nowhere = np.full(proposed.shape, packed.size, np.int32)
            jax.block_until_ready(runner.run_drafted(bucket, packed, nowhere))


def _one_token(bucket: Bucket, max_running: int) -> np.ndarray:
    """Returns the vector [bucket.size] of a step of one request with one token."""
    packed = np.zeros(bucket.size, np.int32)
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    fields["positions"][1:] = -1
    fields["slots"][1:] = max_running
    fields["page_slot"][:] = max_running
    fields["sample_position"][0] = 1
    if bucket.num_steps > 1:
        fields["num_steps"][0] = bucket.num_steps
    return packed
