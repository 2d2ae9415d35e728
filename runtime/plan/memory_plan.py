"""Computes the memory that a server uses on each device: weights, scratch memory, KV cache pages.

Serves `meshserve plan`. Needs neither devices nor weights. `compiled_plan` compares the result with a compiler's,
`roofline` estimates the speed, and `tp_choice` selects a TP size.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels import experts
from meshserve.kernels.linear.formats import DATA
from meshserve.sharding.chips import GIB, Target
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import CPU_CACHE_BYTES

from ..adapters.bank import AdapterShape
from ..draft.heads.head_weights import abstract_head, head_layout, kind_of
from ..model_files.model_config import ModelConfig, read_json
from ..options.serve_config import ServeConfig
from ..program.batch import Bucket
from ..program.device_figures import DeviceFigures
from ..program.output_buffers import output_buffer_keys
from ..program.processors.processor_batch import WORD_BITS, processor_sizes
from ..program.step import cache_page_bytes
from ..resolve.auto_limits import GPU_MEMORY_FRACTION
from ..resolve.kernel_costs import KernelCosts
from ..resolve.resolved_server import ResolvedServer, resolve_for
from ..weights.locate import find_model
from ..weights.orbax_layout import model_layout, parameters_in
from ..weights.registry import abstract_model, device_bytes, model_config, weight_bytes

MIB = 1 << 20
# On CPU devices, earlier releases of XLA keep a float32 copy and another bfloat16 copy of a bfloat16 cache,
# and a copy of an 8-bit cache.
_XLA_WIDENS_CPU_CACHES = jax.__version_info__ < (0, 11, 2)
_ADJUSTED_LOGITS = 3  # arrays of the size of the logits that exist at the same time while penalties are applied
_PROCESSOR_BYTES = 8  # per slot and token of the vocabulary: an int32 of its history, a float32 of bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The planned memory use of one device, in bytes, and the number of pages that fit."""

    model: str
    target: str
    tp: int
    dtype: str
    quantization: str  # format of the weights, or "none"
    cache_dtype: str
    page_size: int
    limit_bytes: int  # maximum that a program may use; 0 if unknown
    weight_bytes: int
    scratch_bytes: int  # the largest program's, estimated, and output buffers
    processor_bytes: int
    page_bytes: int
    max_pages: int  # if programs use the whole limit
    served_pages: int  # as a server has them: within memory_fraction, with reserve_mib left free
    max_running: int
    limits: str  # chosen limits of steps
    num_programs: int
    num_params: int  # in the whole model
    num_active_params: int  # that a token passes through
    split: str  # how experts are split, in words; empty for a model without experts
    cp: int = 1  # devices that divide the pages of a KV head
    host_pages: int = 0  # that one process keeps in host memory

    @property
    def served_tokens(self) -> int:
        return self.served_pages * self.page_size

    @property
    def figures(self) -> DeviceFigures:
        names = [field.name for field in dataclasses.fields(DeviceFigures) if field.name != "num_pages"]
        return DeviceFigures(num_pages=self.served_pages, **{name: getattr(self, name) for name in names})

    def num_requests(self, num_tokens: int) -> int:
        """Returns how many requests of this many prompt and output tokens can run at the same time."""
        return min(self.served_pages // -(-num_tokens // self.page_size), self.max_running)


class DraftMemory(NamedTuple):
    """The bytes on each device of a draft model or a trained head: its weights, and its part of each page."""

    weight_bytes: int
    page_bytes: int


def draft_memory(server: ResolvedServer) -> DraftMemory:
    """Plans what `draft_model` names, if it is set. The weights need not be there.

    Raises:
      ConfigError, UnsupportedModelError: It does not exist or is not implemented, or is a head for another model.
      ValueError: It cannot be split over this number of devices.
    """
    if not (name := server.requested.draft_model):
        return DraftMemory(0, 0)
    raw, page_size = read_json(find_model(name, random_weights=True).small / "config.json"), server.limits.page_size
    if (kind := kind_of(raw)) is None:
        model = model_config(raw)
        layout = model_layout(model, server.tp)
        page = cache_page_bytes(model, layout, page_size, server.dtype)
        return DraftMemory(weight_bytes(model, layout, server.dtype), page)
    head = kind.config(raw, server.model)
    layout = head_layout(head, server.tp)
    _, abstract = abstract_head(kind, head, layout, server.dtype, server.layout.vocab_size)
    shared = {"embedding", *kind.shared(head, jnp.zeros(0))}
    weights = [weight for path, weight in nnx.to_flat_state(abstract) if path[0] not in shared]
    values = kind.num_kept(head, layout.num_groups // server.tp, head.layer.embed_dim // server.tp)
    return DraftMemory(device_bytes(weights, layout), page_size * values * server.dtype.itemsize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """A server on a target machine."""

    name: str  # the model's name
    target: Target
    server: ResolvedServer
    draft: DraftMemory
    jax_fraction: float = 0.0  # share of a GPU's memory that JAX preallocates; 0: what the server claims

    @classmethod
    def on(
        cls, target: Target, config: ServeConfig, model: ModelConfig, *, num_devices: int, jax_fraction: float = 0.0
    ) -> "Planner":
        """Plans a server on `num_devices` devices of a target.

        Raises:
          ConfigError: The options do not suit the model.
          UnsupportedModelError: The draft model or head is not implemented.
          ValueError: The model cannot be split over this number of devices.
        """
        server = resolve_for(config, model, chip=target.chip, num_devices=num_devices)
        draft = draft_memory(server)
        return cls(name=config.model, target=target, server=server, draft=draft, jax_fraction=jax_fraction)

    def replan(
        self, *, config: ServeConfig | None = None, model: ModelConfig | None = None, num_devices: int = 0
    ) -> "Planner":
        """Returns the plan with other options, another model or another TP size, resolved again. Raises as `on`."""
        return Planner.on(
            self.target,
            config or self.server.requested,
            model or self.server.model,
            num_devices=num_devices or self.server.tp,
            jax_fraction=self.jax_fraction,
        )

    @property
    def limit_bytes(self) -> int:
        """The maximum memory of one device that a program may use; 0 if unknown."""
        chip = self.target.chip
        claimed = (self.server.requested.memory_fraction or GPU_MEMORY_FRACTION) if chip.platform == "gpu" else 1.0
        return int(chip.hbm_bytes * (self.jax_fraction or claimed))

    def plan(self) -> MemoryPlan:
        """Computes the memory use.

        Raises:
          MemoryError: The model does not fit on the devices. The message says how much memory is missing.
        """
        server, limit, page = self.server, self.limit_bytes, self.server.page_bytes + self.draft.page_bytes
        weights = weight_bytes(server.model, server.layout, server.dtype) + self.draft.weight_bytes
        weights += server.adapter_bytes
        scratch = self._scratch_bytes()
        processors = self.processor_state_bytes + self._mask_bytes() if server.has_processors else 0
        if server.platform == "cpu":  # as `sharding.memory.free_bytes` computes it
            free = served = CPU_CACHE_BYTES // server.tp
            if server.cache_dtype.itemsize < 4 and _XLA_WIDENS_CPU_CACHES:
                num_copies = 3 if server.cache_dtype.itemsize == 2 else 1
                scratch += num_copies * (server.requested_pages or served // page) * page
        else:
            free = limit - weights - scratch - processors
            staging = server.host_cache.staging_bytes if server.host_cache is not None else 0
            staging += server.adapter_staging_bytes
            served = int(limit * server.memory_fraction) - (limit - free) - server.reserve_bytes - staging
        if served < page:
            raise MemoryError(
                f"{self.name} needs {weights / GIB:.1f} GiB for weights on each of {server.tp} devices of "
                f"{self.target.name}, which have {limit / GIB:.1f} GiB; {(page - served) / GIB:.1f} GiB are missing "
                "for a single KV cache page. Use a larger machine or TP size."
            )
        return MemoryPlan(
            model=self.name,
            target=self.target.name,
            tp=server.tp,
            dtype=server.dtype.name,
            quantization=server.model.quantization_name or "none",
            cache_dtype=server.cache_dtype.name,
            page_size=server.limits.page_size,
            limit_bytes=limit,
            weight_bytes=weights,
            scratch_bytes=scratch,
            processor_bytes=processors,
            page_bytes=page,
            max_pages=free // page,
            served_pages=server.requested_pages or served // page,
            max_running=server.limits.max_running,
            limits=str(server.step_limits),
            num_programs=len(server.buckets),
            num_params=server.model.num_params,
            num_active_params=server.model.num_active_params,
            split=_split(server.layout),
            cp=server.layout.cp,
            host_pages=server.host_cache.num_pages if server.host_cache is not None else 0,
        )

    @property
    def processor_state_bytes(self) -> int:
        """The bytes of history and bias of all slots on one device."""
        layout = self.server.layout
        return self.server.limits.max_running * (layout.vocab_size // layout.num_shards) * _PROCESSOR_BYTES

    def _mask_bytes(self) -> int:
        """Returns the bytes of the masks that allow every token."""
        num_requests = sum(processor_sizes(self.server.limits.max_running))
        return -(-self.server.model.vocab_size // WORD_BITS) * 4 * num_requests

    def _scratch_bytes(self) -> int:
        """Returns the scratch memory of the largest program, a step or a sampler after it, and the output buffers."""
        server, buckets = self.server, self.server.buckets
        scratch = self._step_scratch_bytes()
        if server.has_processors:
            needed = processor_scratch_estimate(server.model, server.layout, buckets[-1], server.dtype)
            scratch = max(scratch, needed)
        if server.platform == "gpu":  # the outputs of the largest step are already included
            scratch += output_bytes(server.model, server.layout, buckets, server.dtype)
            scratch -= output_bytes(server.model, server.layout, buckets[-1:], server.dtype)
        return scratch

    def _step_scratch_bytes(self) -> int:
        """Returns the scratch memory of the largest step, with what its attention needs."""
        server, dtype = self.server, self.server.dtype
        bucket = server.buckets[-1]
        scratch = scratch_estimate(server.model, server.layout, bucket, dtype)
        scratch += dequantized_bytes(server.model, server.layout, dtype)
        scratch += adapter_scratch_estimate(server.layout, server.adapters, bucket, dtype)
        costs = KernelCosts(shapes=server.kernel_shapes, names=server.kernel_names)
        scratch += costs.attention(costs.prompt_step(bucket.num_tokens, bucket.num_tokens)).scratch_bytes
        if server.platform == "cpu" and dtype.itemsize < 4:  # XLA multiplies in float32 and keeps such copies of layers
            scratch += layer_bytes(server.model, server.layout, jnp.dtype("float32"))
        return scratch


def _split(layout: ShardLayout) -> str:
    """Returns how the experts are split, in words."""
    experts = layout.experts
    if experts is None:
        return ""
    if experts.num_shards == 1:
        return f"{experts.num_experts} whole"
    if experts.is_by_expert:
        return f"by expert, {experts.block_experts} each"
    return f"by tensor, {experts.block_mlp_dim} of {experts.mlp_dim} rows"


def layer_bytes(model: ModelConfig, layout: ShardLayout, dtype: jnp.dtype) -> int:
    """Returns the bytes of the layers' weights on one device, without embedding and output head."""
    _, abstract = abstract_model(model, layout, dtype)
    return sum(device_bytes(abstract[stack].flat_state().leaves, layout) for stack in model.stacks)


def dequantized_bytes(model: ModelConfig, layout: ShardLayout, dtype: jnp.dtype) -> int:
    """Returns the bytes of the largest quantized matrix of a layer on one device once XLA has dequantized it.

    Experts are dequantized one by one, if at all.
    """
    of_experts, others = [0], [0]
    for name, array in parameters_in(model, layout).items():
        if array.granule is not None and name.endswith(DATA):
            num_bytes = math.prod(array.matrix_shape) // layout.num_shards * dtype.itemsize
            (of_experts if ".experts." in name else others).append(num_bytes)
    num_apart = 1 if layout.experts is None else layout.experts.block_experts
    return max(*others, sum(of_experts) // num_apart)


def scratch_estimate(model: ModelConfig, layout: ShardLayout, bucket: Bucket, dtype: jnp.dtype) -> int:
    """Estimates the memory that a step needs in addition to its arguments.

    Counts what exists at the same time: per token, three arrays of the model's width, and the gate and up projections
    or the rows of the experts; per request, the float32 logits and two arrays of the same size for sampling.
    """
    tokens = bucket.num_tokens * 3 * model.embed_dim * dtype.itemsize
    mlp = bucket.num_tokens * 2 * layout.mlp_dim // layout.num_shards * dtype.itemsize
    if model.experts is not None and layout.experts is not None:
        rows = experts.scratch_bytes(
            num_tokens=bucket.num_tokens,
            num_chosen=model.experts.num_chosen,
            num_experts=model.experts.num_experts,
            num_local=layout.experts.block_experts,
            embed_dim=model.embed_dim,
            itemsize=dtype.itemsize,
        )
        mlp = max(rows, mlp if len(model.stacks) > 1 else 0)
    return tokens + mlp + 3 * bucket.num_requests * (layout.vocab_size // layout.num_shards) * 4


def adapter_scratch_estimate(
    layout: ShardLayout, adapters: AdapterShape | None, bucket: Bucket, dtype: jnp.dtype
) -> int:
    """Estimates the memory that a step with adapters needs in addition to one without.

    Counts per token, in float32 and in the type of the activations, the columns of all slots, and what is added to the
    gate and up projections.
    """
    if adapters is None:
        return 0
    columns = adapters.num_slots * adapters.rank + 2 * layout.mlp_dim // layout.num_shards
    return bucket.num_tokens * columns * (4 + dtype.itemsize)


def output_bytes(model: ModelConfig, layout: ShardLayout, buckets: Iterable[Bucket], dtype: jnp.dtype) -> int:
    """Returns the bytes of the logits and hidden states of steps on one device, counting each shape once."""
    item_bytes = {
        "logits": layout.vocab_size // layout.num_shards * 4,
        "hidden": model.embed_dim * dtype.itemsize,
    }
    return sum(
        size * item_bytes[name] for name, size in {key for bucket in buckets for key in output_buffer_keys(bucket)}
    )


def processor_scratch_estimate(model: ModelConfig, layout: ShardLayout, bucket: Bucket, dtype: jnp.dtype) -> int:
    """Estimates the memory used while penalties are applied after a step.

    Counts the step's hidden states and logits, a padded copy of the logits, and the arrays of adjusting and sampling.
    """
    logits = bucket.num_requests * (layout.vocab_size // layout.num_shards) * 4
    return bucket.num_tokens * model.embed_dim * dtype.itemsize + (2 + _ADJUSTED_LOGITS) * logits
