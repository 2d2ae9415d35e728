"""Compiles the programs of a server for devices that are not present, and reports what the compiler made of them.

libtpu contains the whole compiler and runs on any host: layouts, memory limits, collectives and kernels are those of
the chip. jax's CUDA build does so as well, with two differences: it measures nothing, so that XLA uses its own GEMM
where it would time it against a library's; and it accepts programs of any size. Neither shows the values that a program
computes, its speed, or the startup of several hosts.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import cached_property

import jax
from flax import nnx

from meshserve.kernels.linear import FORMATS
from meshserve.sharding.chips import Target
from meshserve.sharding.memory import added_bytes, is_out_of_memory, shard_bytes

from ..backend.kernels import Kernels
from ..program.batch import Bucket, ProgramKey
from ..program.step import CacheShape
from ..resolve.resolved_server import PlacedServer, ResolvedServer, place_on
from ..resolve.server_programs import ServerPrograms
from . import hlo

KnownKey = tuple[str, str]  # the name of a target, and the text of a program before it is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What the compiler made of a program. Bytes are per device."""

    kind: str  # with `size`, the key in `ServerPrograms`
    size: int  # such as the number of tokens of a step
    cpu_seconds: float  # time of lowering and compiling, over all threads
    argument_bytes: int
    aliased_bytes: int  # arguments that are updated in place
    added_bytes: int  # in addition to the arguments: temporaries, and outputs that do not replace an argument
    temp_bytes: int
    peak_bytes: int
    code_bytes: int
    text: hlo.ProgramText
    num_weight_slices: int  # matrices of a looped layer that a separate operation copies out before they are multiplied

    @property
    def is_step(self) -> bool:
        return self.kind.startswith(("step", "decode", "pooling"))


class OutOfMemoryError(MemoryError):
    """The compiler refused a program that does not fit on the device. The message is the compiler's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryServer:
    """A server's programs for a target, without devices or weights."""

    target: Target
    server: PlacedServer

    @classmethod
    def on(cls, target: Target, server: ResolvedServer) -> "DryServer":
        """Places a server on devices of a target.

        Raises:
          ValueError: The target has too few devices, or a kernel cannot serve the model on them.
          NoCompilerError: The compiler for these devices is not installed.
        """
        return cls(target=target, server=place_on(server, target.mesh(server.tp)))

    def programs(self, shape: CacheShape) -> ServerPrograms:
        """Declares the programs that the server compiles with a cache of this shape."""
        return self.server.programs(*self._params, shape)

    def compile(self, bucket: Bucket, shape: CacheShape, kernels: Kernels | None = None) -> jax.stages.Compiled:
        """Compiles the step of a bucket, which need not be one of the server's, with its kernels or others.

        Raises:
          OutOfMemoryError: The program does not fit on the device.
        """
        programs = dataclasses.replace(self.programs(shape), kernels=kernels or self.server.kernels)
        return _compiled(programs.lower_step(bucket))

    def report(
        self,
        key: ProgramKey,
        to_lower: Callable[[], jax.stages.Lowered],
        known: dict[KnownKey, ProgramReport] | None = None,
    ) -> ProgramReport:
        """Compiles one of `programs` and reports what the compiler made of it.

        Args:
          key: The key of the program.
          to_lower: Lowers it.
          known: Earlier reports, to which this one is added. Models have some programs in common.

        Raises:
          OutOfMemoryError: The program does not fit on the device.
        """
        started = time.process_time()
        lowered = to_lower()
        source = self.target.name, lowered.as_text()
        if known is not None and source in known:
            return known[source]
        compiled = _compiled(lowered)
        cpu_seconds = time.process_time() - started
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None  # both compilers provide both
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
        layers = [part for stack in self.server.model.stacks for part in nnx.to_flat_state(self._params[1][stack])]
        grids = {name for format in FORMATS for name in format.typical}  # these are small
        stacks = [weight.get_value() for path, weight in layers if path[-1] not in grids]
        matrices = {math.prod(stack.sharding.shard_shape(stack.shape)[1:]) for stack in stacks if stack.ndim > 2}
        return hlo.num_slices(text, matrices)

    @cached_property
    def _params(self) -> tuple[nnx.GraphDef, nnx.State]:
        return self.server.abstract_params()

    def cache_bytes(self, shape: CacheShape) -> int:
        """Returns the bytes of the KV cache on one device."""
        return shard_bytes(self.programs(shape).state.cache)

    def fits(self, bucket: Bucket, shape: CacheShape) -> bool:
        """Returns whether the step of a bucket fits on the device with a cache of this shape."""
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
