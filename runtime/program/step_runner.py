"""Holds the compiled programs of a server with their parameters and device state, and dispatches steps.

Step 6 of 10. In: buckets and packed vectors. Out: sampled tokens, still on the device. Each call returns as soon as the
work is dispatched; the device runs the calls in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.memory import added_bytes, is_out_of_memory, memory_use, shard_bytes

from ..adapters.bank import DeviceAdapters
from ..adapters.changes import AdapterChanges
from ..adapters.peft_files import HostAdapter
from ..host_cache.page_copies import PageCopies
from .batch import Bucket, ProgramKey
from .device_figures import DeviceFigures
from .expert_tokens import ExpertTokens
from .output_buffers import OutputBufferKey, output_buffer_keys
from .processors.processor_batch import Logprobs, Sampled
from .processors.processor_programs import LogitsProcessors
from .step import DeviceState, StepOutput, weights_of

# Keys of the programs that allocate the device state with the output buffers, and that set a row of the page table.
ALLOCATE: ProgramKey = ("allocate cache", 0)
SET_PAGE_ROW: ProgramKey = ("set page row", 0)


class StepRunner:
    """Runs the steps of one server.

    Args:
      programs: The compiled steps, `ALLOCATE` and `SET_PAGE_ROW`; see `planning.server_programs`.
      buckets: The buckets of the steps.
      state_shapes: The device state, with shardings.
      buffer_shapes: The output buffers, with shardings; empty if steps have none.
      mesh: The devices.
      processors: The compiled logits processors, if the server has any.
      copies: The blocks of pages in host memory, if the server has a host cache.
      adapters: The adapters on the devices, if the server has any.
    """

    def __init__(
        self,
        programs: Mapping[ProgramKey, jax.stages.Compiled],
        *,
        buckets: Sequence[Bucket],
        state_shapes: DeviceState[jax.ShapeDtypeStruct],
        buffer_shapes: Mapping[OutputBufferKey, jax.ShapeDtypeStruct],
        mesh: Mesh,
        processors: LogitsProcessors | None = None,
        copies: PageCopies | None = None,
        adapters: DeviceAdapters | None = None,
    ):
        self.copies = copies
        self.expert_tokens: ExpertTokens | None = None  # set if the model has experts
        self._programs = {bucket: programs[bucket.key] for bucket in buckets}
        self._set_page_row, self._allocate = programs[SET_PAGE_ROW], programs[ALLOCATE]
        self._shapes, self._output_buffer_shapes = state_shapes, buffer_shapes
        self._processors, self._mesh, self._adapters = processors, mesh, adapters
        self._last: tuple[Bucket, np.ndarray | jax.Array] | None = None  # what the last step was of, if it had adapters
        self._output: StepOutput[jax.Array] | None = None  # the last step's
        self.has_state = False  # whether the device state is allocated
        self._output_buffers: dict[OutputBufferKey, jax.Array]
        self._output_buffer_keys = {bucket: output_buffer_keys(bucket) if buffer_shapes else () for bucket in buckets}

    def start(self, params: nnx.State, head_weights: tuple[jax.Array, ...] = ()) -> None:
        """Takes the parameters, those of a trained head last, and allocates the cache, so that steps can run.

        Raises:
          MemoryError: The devices cannot allocate the cache in one block. The message says what to do.
        """
        self._params, self._head_weights = params, head_weights
        self.allocate_state()
        self.replace_params(params)

    def replace_params(self, params: nnx.State) -> None:
        """Takes other parameters, of the same shapes and shardings, for the following steps."""
        self._params = params
        self._weights: tuple[jax.Array, ...] = weights_of(params) + self._head_weights

    def free_state(self) -> None:
        """Frees the cache and all other device state at once. No step may run until `allocate_state`."""
        for array in jax.tree.leaves((self._state, self._output_buffers)):
            array.delete()
        self._output, self.has_state = None, False
        if self._processors is not None:
            self._processors.release()

    def allocate_state(self) -> None:
        """Allocates the device state, with an empty cache.

        Raises:
          MemoryError: See `start`.
        """
        allocated = ()
        try:
            allocated = self._allocate()
            self._state, self._output_buffers = jax.block_until_ready(allocated)
            if self._adapters is not None and not self._adapters.leaves:
                self._adapters.allocate()
            if self._processors is not None:
                self._processors.allocate()
            self.has_state = True
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            for array in jax.tree.leaves(allocated):  # the traceback would keep those of devices that have room
                array.delete()
            size = shard_bytes(self._shapes.cache) / (1 << 30)
            raise MemoryError(
                f"could not allocate {size:.2f} GiB on each device in one block, for a cache of "
                f"{self.num_pages} pages, {memory_use(self._mesh)}: lower --memory-fraction or --num-pages, and leave "
                "XLA_PYTHON_CLIENT_PREALLOCATE unset, because memory that is not preallocated becomes fragmented "
                f"({error})."
            ) from None

    @property
    def num_pages(self) -> int:
        """The pages of the KV cache on each device."""
        return self._shapes.cache.shape[1]

    @property
    def last_tokens(self) -> jax.Array:
        """The table of each slot's last token, [max_running] int32; the next step consumes it."""
        return self._state.last_tokens

    @last_tokens.setter
    def last_tokens(self, last_tokens: jax.Array) -> None:
        self._state = self._state._replace(last_tokens=last_tokens)

    @property
    def params(self) -> nnx.State:
        """The parameters."""
        return self._params

    @property
    def state(self) -> DeviceState[jax.Array]:
        """The state on the devices; the next step consumes it."""
        return self._state

    def set_followed(self, followed: Any) -> None:
        """Replaces what a trained head keeps."""
        self._state = self._state._replace(followed=followed)

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the parameters."""
        return self._weights[0].dtype

    @property
    def device_bytes(self) -> int:
        """The bytes of parameters, state and output buffers on each device."""
        processors = self._processors.device_bytes if self._processors is not None else 0
        return shard_bytes((self._params, self._state, self._output_buffers)) + processors + self.adapter_bytes

    @property
    def adapter_bytes(self) -> int:
        """The bytes of adapters on each device."""
        return self._adapters.bank.device_bytes if self._adapters is not None else 0

    @property
    def figures(self) -> DeviceFigures:
        """The memory used on each device, measured from the arrays and compiled programs."""
        device, processors = self._mesh.local_devices[0], self._processors
        scratch = [added_bytes(program) for program in self._programs.values()]
        return DeviceFigures(
            limit_bytes=device.memory_stats()["bytes_limit"] if device.platform != "cpu" else 0,
            weight_bytes=shard_bytes(self._params) + self.adapter_bytes,
            scratch_bytes=max(*scratch, processors.scratch_bytes if processors is not None else 0)
            + shard_bytes(self._output_buffer_shapes),
            processor_bytes=processors.device_bytes if processors is not None else 0,
            page_bytes=shard_bytes((self._shapes.cache, self._shapes.followed)) // self.num_pages,
            num_pages=self.num_pages,
            num_programs=len(self._programs),
        )

    def release(self) -> nnx.State:
        """Frees the device state at once and returns the parameters. The runner cannot be used afterwards."""
        self.free_state()
        if self._adapters is not None:
            self._adapters.release()
        if self.copies is not None:
            self.copies.release()
        params, self._params = self._params, nnx.State({})
        self._weights = ()
        return params

    def copy_pages(self, command: np.ndarray) -> None:
        """Dispatches a command of the host tier; see `host_cache.commands`."""
        assert self.copies is not None, "a server without a host cache copies no pages"
        self._state = self._state._replace(cache=self.copies.run(command, self._state.cache))

    def change_adapters(self, changes: AdapterChanges) -> None:
        """Dispatches loads of adapters, and sets which of them requests have, for the steps from now on."""
        assert self._adapters is not None, "a server without adapters refuses requests that name one"
        self._adapters.apply(changes)

    def adapter_calls(self, changes: AdapterChanges) -> Iterator[tuple[str, Any]]:
        """Yields methods with an argument each, which together do what `change_adapters` does.

        The arguments have all that another process needs, which thus has the same matrices, and reads no files.
        """
        assert self._adapters is not None, "a server without adapters refuses requests that name one"
        for slot, adapter in changes.loads:
            assert isinstance(adapter, HostAdapter), adapter
            yield from (("stage_adapter", part) for part in self._adapters.bank.parts(adapter.matrices))
            yield "load_staged_adapter", slot
        if changes.request_slots:
            yield "set_adapter_slots", np.array(list(changes.request_slots.items()), np.int32)

    def stage_adapter(self, part: np.ndarray) -> None:
        """Takes the next part of an adapter from process 0."""
        assert self._adapters is not None
        self._adapters.stage(part)

    def load_staged_adapter(self, slot: int) -> None:
        """Dispatches the load of the adapter whose parts have been staged."""
        assert self._adapters is not None
        self._adapters.load_staged(slot)

    def set_adapter_slots(self, pairs: np.ndarray) -> None:
        """Sets the adapter slots of requests: [N, 2] int32, the slot of a request and that of its adapter."""
        assert self._adapters is not None
        self._adapters.set_slots(dict(pairs.tolist()))

    def set_page_row(self, page_row: np.ndarray) -> None:
        """Dispatches the replacement of a row of the page table; see `Batch.page_table_rows`."""
        self._state = self._state._replace(page_table=self._set_page_row(self._state.page_table, page_row))

    def run(self, bucket: Bucket, packed: np.ndarray | jax.Array) -> jax.Array:
        """Dispatches one step and returns its sampled tokens, which the device may still be computing."""
        self._output = None  # frees its memory for this step, unless it is an output buffer
        keys = self._output_buffer_keys[bucket]
        buffers = tuple(self._output_buffers[key] for key in keys)
        weights = self._weights
        self._last = None
        if self._adapters is not None and bucket.num_adapters:
            weights, self._last = weights + self._adapters.leaves, (bucket, packed)
        packed = self.copies.send_behind(packed) if self.copies is not None else packed
        self._state, self._output = self._programs[bucket](weights, self._state, buffers, packed)
        if keys:
            self._output_buffers.update(zip(keys, self._output.buffers, strict=True))
        self._output.sampled.copy_to_host_async()
        if self.expert_tokens is not None and self._state.expert_tokens is not None:
            self.expert_tokens.observe(self._state.expert_tokens)
        return self._output.sampled

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        """Dispatches the state that `sample` uses for a slot from now on; see `processor_batch.SlotAdjustments`."""
        self._known_processors.set_row(slot, history, bias)

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[jax.Array]:
        """Dispatches sampling from the logits of the last `run` again, with logits processors. Call before the next.

        Its tokens replace those that `run` returned and are the input of the next step.

        Args:
          packed: See `processor_batch.ProcessorShape`.
          masks: [samples of the plan, ceil(V / 32)] uint32, the tokens that each may take; None allows all.
        """
        assert self._output is not None and self._output.logits is not None, "multi-step decode has no logits"
        last_tokens, sampled = self._known_processors.sample(
            packed, self._output.logits, self._state.last_tokens, masks
        )
        self._state = self._state._replace(last_tokens=last_tokens)
        return sampled

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[jax.Array]:
        """Dispatches the log-probabilities of the tokens [T] after those of the last `run`. Call before the next."""
        assert self._output is not None and self._output.hidden is not None, "steps of decodes have no prompt"
        adapters: tuple[Any, ...] = ()
        if self._adapters is not None and self._last is not None:
            bucket, packed = self._last
            fields = {name: np.asarray(packed)[bucket.fields[name]] for name in ("slots", "token_request")}
            adapters = (self._adapters.leaves, fields["slots"][fields["token_request"]])
        return self._known_processors.prompt_logprobs(self._params, self._output.hidden, targets, *adapters)

    @property
    def _known_processors(self) -> LogitsProcessors:
        assert self._processors is not None, "a server without logits processors refuses requests that need them"
        return self._processors
