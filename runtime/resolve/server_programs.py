"""Declares every program that a server compiles: its key, and how to lower it.

The server, compiling ahead of time and the planner all iterate this one declaration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.kernels.readback.cuda import PinnedTokens
from meshserve.sharding.mesh import named_sharding

from ..adapters.bank import AdapterBank, DeviceAdapters
from ..backend.kernels import Kernels
from ..host_cache import page_copies
from ..host_cache.sizes import HostCacheSize
from ..program.batch import Bucket, ProgramKey
from ..program.head_contract import HeadContract
from ..program.output_buffers import OutputBufferKey, output_buffer_shapes
from ..program.processors.processor_programs import LogitsProcessors, ProcessorPrograms
from ..program.program_store import ProgramStore, compile_programs
from ..program.readback_runner import ReadbackRunner
from ..program.step import DeviceState, set_page_row, sharded_step, weights_of
from ..program.step_runner import ALLOCATE, SET_PAGE_ROW, StepRunner

# Keys of the programs that copy pages between the cache and blocks; see `page_copies`.
SAVE_PAGES: ProgramKey = ("save pages", 0)
WRITE_PAGES: ProgramKey = ("write pages", 0)


@dataclass(frozen=True, kw_only=True)
class ServerPrograms:
    """The programs of a server with a cache of a given size. `params` may be shapes with shardings."""

    structure: nnx.GraphDef
    params: nnx.State
    mesh: Mesh
    buckets: Sequence[Bucket]
    kernels: Kernels
    state: DeviceState[jax.ShapeDtypeStruct]  # with shardings
    processors: ProcessorPrograms | None = None
    host_cache: HostCacheSize | None = None
    head: HeadContract | None = None  # a trained head, whose state is in `state`
    adapters: AdapterBank | None = None

    @cached_property
    def output_buffers(self) -> dict[OutputBufferKey, jax.ShapeDtypeStruct]:
        """The arrays that steps write their outputs to, with shardings."""
        return output_buffer_shapes(self.kernels, self.params, self.buckets, self.mesh)

    def to_lower(self) -> dict[ProgramKey, Callable[[], jax.stages.Lowered]]:
        """Returns all programs."""
        return self.to_lower_for_steps() | (self.processors.to_lower() if self.processors is not None else {})

    def to_lower_for_steps(self) -> dict[ProgramKey, Callable[[], jax.stages.Lowered]]:
        """Returns the programs of `StepRunner`, which depend on the number of pages."""
        programs: dict[ProgramKey, Callable[[], jax.stages.Lowered]]
        programs = {bucket.key: partial(self.lower_step, bucket) for bucket in self.buckets}
        assert len(programs) == len(self.buckets), "two buckets have the same key"
        if self.host_cache is not None:
            cache, block_pages = self.state.cache, self.host_cache.block_pages
            programs[SAVE_PAGES] = partial(page_copies.lower_save, cache, block_pages)
            programs[WRITE_PAGES] = partial(page_copies.lower_write, cache, block_pages)
        if self.adapters is not None:
            programs |= self.adapters.to_lower()
        return programs | {
            ALLOCATE: partial(_lower_allocate, (self.state, self.output_buffers)),
            SET_PAGE_ROW: partial(_lower_set_page_row, self.state.page_table, self.mesh),
        }

    def lower_step(self, bucket: Bucket) -> jax.stages.Lowered:
        """Lowers the step of a bucket, which need not be one of `buckets`."""
        packed = jax.ShapeDtypeStruct((bucket.size,), jnp.int32, sharding=named_sharding(self.mesh, ()))
        buffers = tuple(output_buffer_shapes(self.kernels, self.params, [bucket], self.mesh).values())
        program = sharded_step(self.structure, self.params, self.kernels, bucket, self.mesh, self.head, self.adapters)
        weights = weights_of(self.params) + (self.head.weights if self.head is not None else ())
        weights += self.adapters.leaves if self.adapters is not None and bucket.num_adapters else ()
        return program.lower(weights, self.state, buffers, packed)

    def compile_runner(
        self, processors: LogitsProcessors | None = None, num_threads: int = 1, store: ProgramStore | None = None
    ) -> StepRunner:
        """Compiles the programs of a `StepRunner`, `num_threads` at a time, and returns the runner.

        The processors, if the server has any, are compiled before: they do not depend on the number of pages.
        """
        programs = compile_programs(self, self.to_lower_for_steps(), num_threads, store)
        copies = None
        if self.host_cache is not None:
            shape = page_copies.block_shape(self.state.cache, self.host_cache.block_pages)
            gather, scatter = programs[SAVE_PAGES], programs[WRITE_PAGES]
            copies = page_copies.PageCopies(self.host_cache, shape, gather, scatter)
        has_readback = self.kernels.readback is not None and any(bucket.has_drafts for bucket in self.buckets)
        runner = partial(ReadbackRunner, PinnedTokens(self.mesh.devices.flat[0])) if has_readback else StepRunner
        return runner(
            programs,
            buckets=self.buckets,
            state_shapes=self.state,
            buffer_shapes=self.output_buffers,
            mesh=self.mesh,
            processors=processors,
            copies=copies,
            adapters=DeviceAdapters(self.adapters, programs) if self.adapters is not None else None,
        )


def _lower_set_page_row(page_table: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.stages.Lowered:
    page_row = jax.ShapeDtypeStruct((1 + page_table.shape[1],), jnp.int32, sharding=named_sharding(mesh, ()))
    program = jax.jit(set_page_row, donate_argnums=0, out_shardings=page_table.sharding)
    return program.lower(page_table, page_row)


def _lower_allocate(shapes: Any) -> jax.stages.Lowered:
    """Lowers a program that returns arrays of zeros for a tree of shapes with shardings."""

    def zeros() -> Any:
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes)).lower()
