"""The server's programs compiled for devices that are not there, and what the compiler says about them.

libtpu holds the whole compiler and runs it on any host: layouts, memory limits, collectives and kernels are those of
the chip. So does jax's CUDA build, with two differences: it measures nothing, so that where it would choose between its
own product and a library's by time it takes its own; and it refuses no program for its size. What neither can show is
the values a program computes, its speed, and the start of several hosts.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.chips import Target
from meshserve.sharding.layout import ShardLayout, shard_layout
from meshserve.sharding.memory import added_bytes, is_out_of_memory, shard_bytes
from meshserve.sharding.mesh import named_sharding

from ..api.config import ServeConfig
from ..api.model_config import ModelConfig
from ..model.qwen3 import Kernels
from ..program.batch import Bucket
from ..program.compile_cache import ProgramKey
from ..program.output_buffers import output_buffer_shapes
from ..program.processor_programs import ProcessorPrograms
from ..program.step import (
    CacheShape,
    DeviceState,
    lower_allocate,
    lower_set_page_row,
    lower_step,
    placed_state,
    state_shapes,
)
from ..weights.registry import abstract_model
from . import hlo
from .kernel_selection import choose_kernels

KnownKey = tuple[str, str]  # a target and a program's text before it is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """A compiled program. Bytes are of one device."""

    kind: str  # what it does, see `DryServer.programs`
    size: int  # tokens of a step, requests of a sampler
    cpu_seconds: float  # lowering and compiling, all threads
    argument_bytes: int
    aliased_bytes: int  # of the arguments: updated in place
    added_bytes: int  # to the arguments: temporaries and what is not updated in place
    temp_bytes: int
    peak_bytes: int
    code_bytes: int
    text: hlo.ProgramText
    num_weight_slices: int  # of a looped layer: matrices that are cut out, a step of its own, before the product

    @property
    def is_step(self) -> bool:
        return self.kind.startswith(("step", "decode"))


class OutOfMemoryError(MemoryError):
    """The compiler refused a program that does not fit the device. The text is the compiler's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryServer:
    """A server's programs for a target, without devices or weights."""

    model: ModelConfig
    config: ServeConfig
    target: Target
    mesh: Mesh
    layout: ShardLayout
    dtype: jnp.dtype

    @classmethod
    def on(
        cls, target: Target, model: ModelConfig, *, config: ServeConfig | None = None, tensor_parallelism: int = 0
    ) -> "DryServer":
        """On the target's first `tensor_parallelism` devices; 0 takes them all. The config chooses the kernels.

        Raises:
          ValueError: the degree does not fit the target or the model.
          NoCompilerError: the compiler for these devices is not installed.
        """
        mesh = target.mesh(tensor_parallelism)
        layout = shard_layout(
            num_shards=mesh.size,
            num_query_heads=model.num_query_heads,
            num_kv_heads=model.num_kv_heads,
            vocab_size=model.vocab_size,
            mlp_dim=model.mlp_dim,
        )
        return cls(
            model=model,
            config=config or ServeConfig(),
            target=target,
            mesh=mesh,
            layout=layout,
            dtype=jnp.dtype("bfloat16"),
        )

    def programs(
        self, buckets: Sequence[Bucket], shape: CacheShape, *, has_processors: bool
    ) -> dict[ProgramKey, Callable[[], jax.stages.Lowered]]:
        """Everything that a server with these steps compiles, by what it does and its size."""
        state = self._state(shape)
        programs: dict[ProgramKey, Callable[[], jax.stages.Lowered]] = {
            (bucket.kind, bucket.num_tokens): partial(self._lower, bucket, shape) for bucket in buckets
        }
        programs["allocate cache", 0] = partial(lower_allocate, state)
        programs["set page row", 0] = partial(lower_set_page_row, state.page_table, self.mesh)
        if has_processors:
            programs |= self.processors(buckets, shape).to_lower()
        return programs

    def processors(self, buckets: Sequence[Bucket], shape: CacheShape) -> ProcessorPrograms:
        """The control programs of a server with these steps."""
        structure, params = self._placed_model
        return ProcessorPrograms(
            structure=structure,
            params=params,
            mesh=self.mesh,
            buckets=buckets,
            max_running=shape.max_running,
            real_vocab_size=self.model.vocab_size,
            is_unrolled=self._kernels.is_unrolled,
            find_threshold=self._kernels.find_threshold,
            has_output_buffers=self._kernels.has_output_buffers,
            has_library_gemms=self._kernels.has_library_gemms,
        )

    def output_buffer_bytes(self, buckets: Sequence[Bucket]) -> int:
        """What the steps of these keep on each device beside their programs."""
        return shard_bytes(output_buffer_shapes(self._kernels, self._placed_model[1], buckets, self.mesh))

    def compile(self, bucket: Bucket, shape: CacheShape, kernels: Kernels | None = None) -> jax.stages.Compiled:
        """The program of a bucket.

        Raises:
          OutOfMemoryError: it does not fit the device.
        """
        return _compiled(self._lower(bucket, shape, kernels))

    def report(
        self,
        key: ProgramKey,
        to_lower: Callable[[], jax.stages.Lowered],
        known: dict[KnownKey, ProgramReport] | None = None,
    ) -> ProgramReport:
        """Compiles one of `programs` and reads what the compiler made of it.

        Args:
          known: earlier reports: models have programs in common. Gets the new one.

        Raises:
          OutOfMemoryError: it does not fit the device.
        """
        started = time.process_time()
        lowered = to_lower()
        source = self.target.name, lowered.as_text()
        if known is not None and source in known:
            return known[source]
        compiled = _compiled(lowered)
        cpu_seconds = time.process_time() - started
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None  # both compilers give both
        added = added_bytes(compiled)
        kind, size = key
        report = ProgramReport(
            kind=kind,
            size=size,
            cpu_seconds=cpu_seconds,
            argument_bytes=memory.argument_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            added_bytes=added,
            temp_bytes=memory.temp_size_in_bytes,
            peak_bytes=memory.peak_memory_in_bytes or memory.argument_size_in_bytes + added,
            code_bytes=memory.generated_code_size_in_bytes,
            text=hlo.read(text),
            num_weight_slices=self._num_weight_slices(text),
        )
        if known is not None:
            known[source] = report
        return report

    def _num_weight_slices(self, text: str) -> int:
        layers = jax.tree.leaves(self._placed_model[1]["layers"])
        matrices = {math.prod(stack.sharding.shard_shape(stack.shape)[1:]) for stack in layers if stack.ndim > 2}
        return hlo.num_slices(text, matrices)

    def _lower(self, bucket: Bucket, shape: CacheShape, kernels: Kernels | None = None) -> jax.stages.Lowered:
        structure, params = self._placed_model
        return lower_step(structure, params, kernels or self._kernels, bucket, self._state(shape), self.mesh)

    @cached_property
    def _kernels(self) -> Kernels:
        """Those that the config chooses."""
        return choose_kernels(self.config, self.model, self.mesh, are_devices_here=False)

    @cached_property
    def _placed_model(self) -> tuple[nnx.GraphDef, nnx.State]:
        structure, abstract = abstract_model(self.model, self.layout, self.dtype)
        return structure, _placed_params(abstract, self.mesh)

    def _state(self, shape: CacheShape) -> DeviceState[jax.ShapeDtypeStruct]:
        return placed_state(state_shapes(self.model, self.layout, shape, self.dtype), self.mesh)

    def cache_bytes(self, shape: CacheShape) -> int:
        """The KV cache on one device."""
        return shard_bytes(self._state(shape).cache)

    def fits(self, bucket: Bucket, shape: CacheShape) -> bool:
        try:
            self.compile(bucket, shape)
        except OutOfMemoryError:
            return False
        return True


def _compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(str(error)) from None
        raise


def _placed_params(abstract: nnx.State, mesh: Mesh) -> nnx.State:
    def place(weight: nnx.Variable) -> nnx.Variable:
        shape = weight.get_value()
        sharding = named_sharding(mesh, weight.axes)
        return weight.replace(jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding))

    return jax.tree.map(place, abstract, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
