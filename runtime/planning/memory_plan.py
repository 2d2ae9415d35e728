"""What a model takes on each device of a machine, by arithmetic: weights, scratch, pages, and who fits into them.

Serves `meshserve plan`. Needs neither devices nor weights. `capacity_compiled` asks the TPU compiler the same,
`roofline` how fast it could be, `tp_sizes` which tensor-parallel degree is best.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshserve.sharding.chips import GIB, Target
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import CPU_CACHE_BYTES

from ..api.config import ServeConfig, context_tokens, serving_dtype
from ..api.model_config import ModelConfig
from ..program.batch import Bucket, server_buckets
from ..program.device_figures import DeviceFigures
from ..program.output_buffers import output_buffer_keys
from ..program.processor_batch import WORD_BITS, processor_sizes
from ..program.step import CacheShape, cache_page_bytes
from ..weights.orbax_layout import model_layout
from ..weights.registry import abstract_model

MIB = 1 << 20
# On CPU devices XLA kept a bfloat16 cache in float32, too, and once more as it is.
_XLA_WIDENS_CPU_CACHES = jax.__version_info__ < (0, 11, 2)
_ADJUSTED_LOGITS = 3  # arrays as large as the logits that live at once while penalties are applied
_PROCESSOR_BYTES = 8  # a row and a token of the vocabulary: an int32 of its history, a float32 of bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device, and the pages that they leave room for."""

    model: str
    target: str
    tp: int
    dtype: str
    page_size: int
    limit_bytes: int  # that a program may take; 0 if it is not known
    weight_bytes: int
    scratch_bytes: int  # of the largest program, estimated
    processor_bytes: int
    page_bytes: int
    max_pages: int  # if a program may use all of the limit
    served_pages: int  # within memory_fraction, with reserve_mib kept free, as the server takes them
    max_running: int
    num_programs: int

    @property
    def served_tokens(self) -> int:
        return self.served_pages * self.page_size

    @property
    def figures(self) -> DeviceFigures:
        names = [field.name for field in dataclasses.fields(DeviceFigures) if field.name != "num_pages"]
        return DeviceFigures(num_pages=self.served_pages, **{name: getattr(self, name) for name in names})

    def num_requests(self, num_tokens: int) -> int:
        """Requests of so many tokens, prompt and output together, that run at a time."""
        return min(self.served_pages // -(-num_tokens // self.page_size), self.max_running)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """The shapes of a server on a target; its programs are `buckets`, its cache `cache_shape(num_pages)`."""

    name: str
    config: ServeConfig
    model: ModelConfig
    target: Target
    num_devices: int
    tokens: tuple[int, ...] = ()  # of the programs to look at; all if empty
    jax_fraction: float = 0.0  # of the device's memory, what jax takes; 0: what it does by itself
    asked_all_reduce: str = "auto"  # as in `ServeConfig`; `config` has what comes of it at this degree

    @property
    def layout(self) -> ShardLayout:
        """Raises ValueError if the model cannot be split over so many devices."""
        return model_layout(self.model, self.num_devices)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(serving_dtype(self.config, self.model, self.target.chip.platform))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        buckets = server_buckets(self.config)
        return tuple(bucket for bucket in buckets if not self.tokens or bucket.num_tokens in self.tokens)

    @property
    def limit_bytes(self) -> int:
        """Of one device, what a program may take; 0 if that is not known."""
        chip = self.target.chip
        return int(chip.hbm_bytes * (self.jax_fraction or chip.jax_fraction))

    def cache_shape(self, num_pages: int) -> CacheShape:
        request_pages = min(-(-context_tokens(self.config, self.model) // self.config.page_size), num_pages)
        return CacheShape(num_pages, self.config.page_size, self.config.max_running, request_pages)

    def plan(self) -> MemoryPlan:
        """The arithmetic.

        Raises:
          ValueError: the degree does not fit the model.
          MemoryError: the model does not fit the devices; says what is short.
        """
        config, layout, limit = self.config, self.layout, self.limit_bytes
        weights = weight_bytes(self.model, layout, self.dtype)
        page = cache_page_bytes(self.model, layout, config.page_size, self.dtype)
        scratch = self._scratch_bytes()
        processors = self.processor_state_bytes + self._mask_bytes() if config.logits_processors else 0
        if self.target.chip.platform == "cpu":  # as `memory.free_bytes` has it
            free = served = CPU_CACHE_BYTES // self.num_devices
            if self.dtype.itemsize < 4 and _XLA_WIDENS_CPU_CACHES:
                scratch += 3 * (config.num_pages or served // page) * page
        else:
            free = limit - weights - scratch - processors
            served = int(limit * config.memory_fraction) - (limit - free) - config.reserve_mib * MIB
        if served < page:
            raise MemoryError(
                f"{self.name} takes {weights / GIB:.1f} GiB of weights on each of {self.num_devices} devices of "
                f"{self.target.name}, which have {limit / GIB:.1f} GiB; {(page - served) / GIB:.1f} GiB are short of a "
                "single KV page. Take a larger machine or degree."
            )
        return MemoryPlan(
            model=self.name,
            target=self.target.name,
            tp=self.num_devices,
            dtype=self.dtype.name,
            page_size=config.page_size,
            limit_bytes=limit,
            weight_bytes=weights,
            scratch_bytes=scratch,
            processor_bytes=processors,
            page_bytes=page,
            max_pages=free // page,
            served_pages=config.num_pages or served // page,
            max_running=config.max_running,
            num_programs=len(self.buckets),
        )

    @property
    def processor_state_bytes(self) -> int:
        """Of the history and bias of every row."""
        return self.config.max_running * (self.layout.vocab_size // self.layout.num_shards) * _PROCESSOR_BYTES

    def _mask_bytes(self) -> int:
        """Of the masks that allow everything."""
        return -(-self.model.vocab_size // WORD_BITS) * 4 * sum(processor_sizes(self.config.max_running))

    def _scratch_bytes(self) -> int:
        """Of the largest program, a step or what samples after it, and what steps keep beside it (see `kept`)."""
        scratch = self._step_scratch_bytes()
        if self.config.logits_processors:
            scratch = max(scratch, processor_scratch_estimate(self.model, self.layout, self.buckets[-1], self.dtype))
        if self.target.chip.platform == "gpu":  # the outputs of the largest are counted already
            kept = partial(output_bytes, self.model, self.layout, dtype=self.dtype)
            scratch += kept(self.buckets) - kept(self.buckets[-1:])
        return scratch

    def _step_scratch_bytes(self) -> int:
        """Where XLA's path attends, it gathers a page of every token's request at a time."""
        bucket, chip = self.buckets[-1], self.target.chip
        scratch = scratch_estimate(self.model, self.layout, bucket, self.dtype)
        if chip.platform == "tpu" or self.config.attention == "cuda":
            return scratch
        page_values = cache_page_bytes(self.model, self.layout, self.config.page_size, jnp.dtype("int8"))
        gathered = bucket.num_tokens * page_values // self.model.num_layers
        scratch += gathered * (self.dtype.itemsize + 4)  # as it is kept, and in float32
        if chip.platform == "cpu" and self.dtype.itemsize < 4:  # XLA multiplies in float32, and keeps the layers so
            scratch += layer_bytes(self.model, self.layout, jnp.dtype("float32"))
        return scratch


def weight_bytes(model: ModelConfig, layout: ShardLayout, dtype: jnp.dtype) -> int:
    """Of one device: every sharded axis is a whole multiple of the shards."""
    _, abstract = abstract_model(model, layout, dtype)
    return _shard_bytes(abstract.flat_state().leaves, layout, dtype)


def layer_bytes(model: ModelConfig, layout: ShardLayout, dtype: jnp.dtype) -> int:
    """As `weight_bytes`, without embedding and output head."""
    _, abstract = abstract_model(model, layout, dtype)
    return _shard_bytes(abstract["layers"].flat_state().leaves, layout, dtype)


def _shard_bytes(weights: Iterable[Any], layout: ShardLayout, dtype: jnp.dtype) -> int:
    total = 0
    for weight in weights:
        is_sharded = any(axis is not None for axis in weight.axes)
        total += weight.get_value().size * dtype.itemsize // (layout.num_shards if is_sharded else 1)
    return total


def scratch_estimate(model: ModelConfig, layout: ShardLayout, bucket: Bucket, dtype: jnp.dtype) -> int:
    """What a program holds beside its arguments: activations of its tokens and logits of its requests.

    Counted is what lives at once: three arrays as wide as the model and the gate and up projections; of the logits the
    float32 values, and what sampling makes of them.
    """
    tokens = bucket.num_tokens * (3 * model.embed_dim + 2 * layout.mlp_dim // layout.num_shards) * dtype.itemsize
    return tokens + 3 * bucket.num_requests * (layout.vocab_size // layout.num_shards) * 4


def output_bytes(model: ModelConfig, layout: ShardLayout, buckets: Iterable[Bucket], dtype: jnp.dtype) -> int:
    """Of the logits and hidden states of steps on one device, each shape once."""
    item_bytes = {
        "logits": layout.vocab_size // layout.num_shards * 4,
        "hidden": model.embed_dim * dtype.itemsize,
    }
    return sum(
        size * item_bytes[name] for name, size in {key for bucket in buckets for key in output_buffer_keys(bucket)}
    )


def processor_scratch_estimate(model: ModelConfig, layout: ShardLayout, bucket: Bucket, dtype: jnp.dtype) -> int:
    """What is held when penalties are applied after a step: its hidden states and logits, these again if they must be
    padded, and of the logits what adjusting and sampling make of them."""
    logits = bucket.num_requests * (layout.vocab_size // layout.num_shards) * 4
    return bucket.num_tokens * model.embed_dim * dtype.itemsize + (2 + _ADJUSTED_LOGITS) * logits
