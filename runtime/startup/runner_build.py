"""Compiles the programs of a resolved server, and sizes its KV cache from the memory that they leave free."""

import logging
import time

from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.memory import added_bytes, num_pages_that_fit, shard_bytes

from ..cluster.preflight import Cluster
from ..expert_counts.expert_tokens import ExpertTokens
from ..planning.resolved_server import PlacedServer
from ..planning.server_programs import ServerPrograms
from ..program.processor_programs import LogitsProcessors
from ..program.step_runner import StepRunner
from .draft_build import Drafting

_log = logging.getLogger(__name__)


def compile_runner(
    server: PlacedServer,
    structure: nnx.GraphDef,
    params: nnx.State,
    *,
    measured: Mesh | None = None,
    reserved_bytes: int = 0,
    draft: Drafting | None = None,
    cluster: Cluster | None = None,
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
        processors = LogitsProcessors(one_page.processors, num_threads=server.compile_threads)
    num_pages = server.requested_pages
    if not num_pages:
        used_bytes = _scratch_bytes(one_page, processors) + server.reserve_bytes + reserved_bytes
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
        )
    shape = server.cache_shape(num_pages)
    started = time.monotonic()
    runner = server.programs(structure, params, shape, head).compile_runner(processors, server.compile_threads)
    counts = one_page.state.expert_tokens
    if counts is not None and server.layout.experts is not None:
        runner.expert_tokens = ExpertTokens(server.layout.experts, counts, server.mesh.local_devices[0])
    _log.info("%d step programs ready after %.1f s; %s", len(server.buckets), time.monotonic() - started, shape)
    return runner


def _scratch_bytes(programs: ServerPrograms, processors: LogitsProcessors | None) -> int:
    """Returns the bytes on each device that programs need in addition to weights and cache."""
    scratch = added_bytes(programs.lower_step(programs.buckets[-1]).compile())
    if processors is not None:
        scratch = max(scratch, processors.scratch_bytes) + processors.device_bytes
    return scratch + shard_bytes(programs.output_buffers)
