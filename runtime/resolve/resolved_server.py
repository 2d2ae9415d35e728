"""Resolves the options of a server, once, into a frozen value that everything after it reads.

    options, model, devices -> ResolvedServer: layout, dtype, names of kernels, limits, buckets
                            -> PlacedServer:   the same with a mesh and its kernels, so that programs can be compiled

`resolve_for` needs no devices and serves `meshserve plan`. `resolve_here` resolves for devices of this process and
serves the server and the benchmarks. `place_on` adds a mesh of devices that need not be present, to compile programs
ahead of time. No resolved value is "auto".
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.chips import Chip, chip_of
from meshserve.sharding.layout import ShardLayout, round_up
from meshserve.sharding.mesh import named_sharding

from ..adapters.bank import LOADS_AT_ONCE, AdapterBank, AdapterShape, bank_bytes
from ..adapters.peft_files import largest_rank
from ..api.errors import ConfigError
from ..backend.kernels import Kernels
from ..host_cache.sizes import HostCacheSize, host_cache_size
from ..model_files.model_config import ModelConfig
from ..options.serve_config import ServeConfig
from ..program.batch import Bucket
from ..program.head_contract import HeadContract
from ..program.processors.processor_programs import ProcessorPrograms
from ..program.step import CacheShape, cache_page_bytes, placed_state, state_shapes
from ..scheduler.limits import SchedulerLimits
from ..weights.orbax_layout import model_layout
from ..weights.registry import abstract_model
from .auto_limits import StepLimits, choose_limits, usable_share
from .buckets import adapter_buckets, declare_buckets
from .kernel_costs import KernelCosts
from .kernel_names import KernelNames, OptionRefusal
from .kernel_selection import (
    KernelSelection,
    NamedKernels,
    device_like,
    make_kernels,
    max_fused_tokens,
    name_kernels,
    select_kernels,
)
from .kernel_shapes import KernelShapes, served_model
from .model_defaults import cache_dtype, context_tokens, serving_dtype
from .p2p_selection import P2PFindings
from .server_programs import ServerPrograms

_KERNEL_PAGE_TOKENS = 16  # a multiple of which the attention kernels for GPUs and TPUs need
_LEAST_RANK, _RANK_UNIT = 16, 8  # of the room for adapters if it is chosen by those in the options
_FREE_TOKENS = 256  # up to about this many tokens, a step takes as long as with one: it reads all weights
_FREE_EXPERT_TOKENS = 128  # the same for each expert of a layer with experts (docs/log/scheduler.md)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedServer:
    """A server on a kind and number of devices, as far as its options, model and devices determine it."""

    requested: ServeConfig  # the options as given, to resolve them again for another TP size; may contain "auto"
    model: ModelConfig
    platform: str  # JAX's name
    layout: ShardLayout
    dtype: jnp.dtype  # for activations and weights that are not quantized
    cache_dtype: jnp.dtype  # for the KV cache
    kernel_names: KernelNames
    kernel_refusals: tuple[OptionRefusal, ...]  # why better kernels cannot serve
    max_fused_tokens: int  # largest decode step on fused layers; 0 without them
    limits: SchedulerLimits
    step_limits: StepLimits  # those of `limits` that may have been chosen automatically
    buckets: tuple[Bucket, ...]  # the shapes of steps
    has_processors: bool  # whether logits processors are served
    memory_fraction: float  # share of the reported device memory for weights and KV cache
    reserve_bytes: int  # device memory to leave free
    requested_pages: int  # 0: as many as fit
    compile_threads: int  # see `compile_cache.compile_all`
    adapters: AdapterShape | None  # the room for adapters on the devices, if any are served

    @property
    def adapter_bytes(self) -> int:
        """Bytes on each device that are set aside for adapters."""
        return bank_bytes(self.model, self.layout, self.adapters, self.dtype, self.limits.max_running)

    @property
    def adapter_staging_bytes(self) -> int:
        """Bytes on each device that must be free to load adapters."""
        if self.adapters is None:
            return 0
        one = self.adapters._replace(num_slots=1)
        return LOADS_AT_ONCE * bank_bytes(self.model, self.layout, one, self.dtype, 0)

    @property
    def tp(self) -> int:
        return self.layout.num_shards

    @property
    def kernel_shapes(self) -> KernelShapes:
        """The shapes that decide which kernels run which steps."""
        return KernelShapes(
            model=self.model,
            layout=self.layout,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            page_size=self.limits.page_size,
            has_drafts=self.limits.draft_tokens > 0,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV cache page on each device."""
        return cache_page_bytes(self.model, self.layout, self.limits.page_size, self.cache_dtype)

    @property
    def host_cache(self) -> HostCacheSize | None:
        """The sizes of the host tier, of which each process has one; None without one.

        Raises:
          ConfigError: It has no room for anything.
        """
        try:
            return host_cache_size(
                int(self.requested.host_cache_gib * (1 << 30)),
                page_bytes=self.page_bytes,
                num_local_devices=self.num_local_devices,
                max_request_pages=self.limits.num_pages_for(self.limits.max_context),
                max_step_pages=self.limits.num_pages_for(self.limits.max_step_tokens),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def num_local_devices(self) -> int:
        """The devices of one process, as far as it is known before the server is placed."""
        return self.tp

    def cache_shape(self, num_pages: int) -> CacheShape:
        limits = self.limits
        return CacheShape(
            num_pages, limits.page_size, limits.max_running, max_request_pages=limits.num_pages_for(limits.max_context)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedServer(ResolvedServer):
    """A resolved server with a mesh and its kernels, for which programs can be compiled."""

    mesh: Mesh
    kernels: Kernels
    findings: P2PFindings

    @property
    def num_local_devices(self) -> int:
        return len(self.mesh.local_devices)

    def abstract_params(self) -> tuple[nnx.GraphDef, nnx.State]:
        """Returns the model's structure and its parameters as shapes with shardings."""
        structure, abstract = abstract_model(self.model, self.layout, self.dtype)

        def place(weight: nnx.Variable) -> nnx.Variable:
            sharding = named_sharding(self.mesh, weight.axes)
            return weight.replace(jax.ShapeDtypeStruct(weight.shape, weight.get_value().dtype, sharding=sharding))

        return structure, jax.tree.map(place, abstract, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def programs(
        self, structure: nnx.GraphDef, params: nnx.State, shape: CacheShape, head: HeadContract | None = None
    ) -> ServerPrograms:
        """Declares the programs of this server, perhaps with a trained head. `params` may be shapes with shardings."""
        state = placed_state(state_shapes(self.model, self.layout, shape, self.cache_dtype), self.mesh)
        if head is not None:
            state = state._replace(followed=head.state_shapes(shape))
        adapters = None
        if self.adapters is not None:
            adapters = AdapterBank(
                model=self.model,
                layout=self.layout,
                shape=self.adapters,
                dtype=self.dtype,
                mesh=self.mesh,
                max_running=self.limits.max_running,
            )
        processors = ProcessorPrograms(
            structure=structure,
            params=params,
            mesh=self.mesh,
            buckets=self.buckets,
            max_running=self.limits.max_running,
            real_vocab_size=self.model.vocab_size,
            kernels=self.kernels,
            num_drafts=self.limits.draft_tokens,
            adapters=adapters,
        )
        return ServerPrograms(
            structure=structure,
            params=params,
            mesh=self.mesh,
            buckets=self.buckets,
            kernels=self.kernels,
            state=state,
            processors=processors if self.has_processors else None,
            host_cache=self.host_cache,
            head=head,
            adapters=adapters,
        )

    def on_mesh(self, mesh: Mesh) -> "PlacedServer":
        """Resolves the requested options for another mesh of this process, to which the running server moves.

        The limits and the shapes of steps stay, which `auto` would choose otherwise for another number of devices: the
        engine plans by them. So do the kernels of the layers, because the tokens depend on them. The all-reduce is
        selected again from the requested option and what was learned about P2P at startup.

        Raises:
          ConfigError: The options do not allow this TP size.
          ValueError: The model cannot be split over the mesh, or a kernel cannot serve its shards.
        """
        requested = dataclasses.replace(self.requested, tp=mesh.size)
        names = self.kernel_names
        config = dataclasses.replace(
            requested,
            attention=names.attention,
            decode_layers=names.decode_layers,
            moe_backend=names.moe_backend,
        )
        if self.adapters is not None:  # what has been loaded since may not be in the options
            num_slots, rank = self.adapters
            config = dataclasses.replace(config, adapter=(), max_adapters=num_slots, max_adapter_rank=rank)
        found = resolve_here(config, self.model, mesh, self.findings)
        return dataclasses.replace(
            found, requested=requested, limits=self.limits, step_limits=self.step_limits, buckets=self.buckets
        )


def resolve_for(config: ServeConfig, model: ModelConfig, *, chip: Chip, num_devices: int) -> ResolvedServer:
    """Resolves a server for a kind and number of devices that need not exist.

    A GPU reports the memory that the server claims of it; see `memory_plan.Planner.limit_bytes`.

    Raises:
      ConfigError: The options do not suit the model.
      ValueError: The model cannot be split over this number of devices.
    """
    shapes = _shapes(config, model, chip.platform, num_devices)
    found = name_kernels(config, device_like(chip), shapes)
    costs = KernelCosts(shapes=shapes, names=found.names)
    limits = choose_limits(config, costs, platform=chip.platform, chip=chip)
    return _resolved(config, shapes, chip.platform, found, limits)


def place_on(server: ResolvedServer, mesh: Mesh) -> PlacedServer:
    """Returns a server on a mesh of its kind and number of devices, which need not be present: no program can run.

    Raises:
      ValueError: A kernel cannot serve the model on such devices, or its compiler is not installed.
    """
    kernels = make_kernels(server.kernel_names, server.kernel_shapes, mesh)
    return _placed(server, mesh, kernels, P2PFindings())


def resolve_here(
    config: ServeConfig, model: ModelConfig, mesh: Mesh, findings: P2PFindings | None = None
) -> PlacedServer:
    """Resolves a server for devices of this process; see `select_kernels`.

    Raises:
      ConfigError: The options do not suit the model, or the devices failed during a test.
      ValueError: The model cannot be split over the mesh, or a kernel cannot serve its shards.
    """
    platform = mesh.devices.flat[0].platform
    shapes = _shapes(config, model, platform, mesh.size)
    selection = select_kernels(config, shapes, mesh, findings)
    costs = KernelCosts(shapes=shapes, names=selection.names)
    limits = choose_limits(config, costs, platform=platform, chip=chip_of(mesh.devices.flat[0]))
    server = _resolved(config, shapes, platform, selection, limits)
    return _placed(server, mesh, selection.kernels, selection.findings)


def _shapes(config: ServeConfig, model: ModelConfig, platform: str, num_devices: int) -> KernelShapes:
    model = served_model(config, model, platform)
    layout = model_layout(model, num_devices, expert_parallel=config.expert_parallel)
    return KernelShapes(
        model=model,
        layout=layout.with_cp(config.cp or _automatic_cp(layout, config.page_size)),
        dtype=jnp.dtype(serving_dtype(config, model, platform)),
        cache_dtype=jnp.dtype(cache_dtype(config, model, platform)),
        page_size=config.page_size,
        has_drafts=config.draft_tokens > 0,
    )


def _adapter_shape(config: ServeConfig) -> AdapterShape | None:
    """Returns the room for adapters. Raises InvalidAdapterError if one of the options' cannot be read."""
    if not config.num_adapter_slots:
        return None
    rank = config.max_adapter_rank or max(_LEAST_RANK, round_up(largest_rank(config.adapter_paths), _RANK_UNIT))
    return AdapterShape(config.num_adapter_slots, rank)


def _automatic_cp(layout: ShardLayout, page_size: int) -> int:
    """Returns the largest context-parallel size that leaves each device pages that every kernel supports."""
    sizes = (cp for cp in range(layout.max_cp, 1, -1) if layout.max_cp % cp == 0)
    return next((cp for cp in sizes if page_size % (_KERNEL_PAGE_TOKENS * cp) == 0), 1)


def _resolved(
    requested: ServeConfig,
    shapes: KernelShapes,
    platform: str,
    kernels: NamedKernels | KernelSelection,
    chosen: StepLimits,
) -> ResolvedServer:
    config, is_pooling, names = requested, shapes.model.pooling is not None, kernels.names
    num_fused_tokens = max_fused_tokens(names, shapes)
    if config.draft_model:
        chosen = dataclasses.replace(chosen, max_decode_steps=1, multi_step_requests=0)
    if is_pooling:  # decodes nothing
        config = dataclasses.replace(config, draft_tokens=0)
        chosen = dataclasses.replace(chosen, max_decode_steps=1, multi_step_requests=0)
        num_fused_tokens = 0
    buckets = declare_buckets(
        max_step_tokens=chosen.max_step_tokens,
        max_running=chosen.max_running,
        page_size=config.page_size,
        max_decode_steps=chosen.max_decode_steps,
        max_fused_tokens=num_fused_tokens,
        has_drafts=config.draft_tokens > 0,
        has_mode_programs=names.has_p2p and shapes.layout.num_shards > 1 and not config.draft_tokens,
        is_pooling=is_pooling,
    )
    if most := chosen.multi_step_requests:
        buckets = tuple(bucket for bucket in buckets if bucket.num_steps == 1 or bucket.num_requests <= most)
    limits = _limits(config, chosen, shapes.model, buckets)
    if (adapters := _adapter_shape(config)) is not None:
        buckets += adapter_buckets(buckets, adapters)
    return ResolvedServer(
        requested=requested,
        model=shapes.model,
        platform=platform,
        layout=shapes.layout,
        dtype=shapes.dtype,
        cache_dtype=shapes.cache_dtype,
        kernel_names=names,
        kernel_refusals=kernels.refusals,
        max_fused_tokens=num_fused_tokens,
        limits=limits,
        step_limits=chosen,
        buckets=buckets,
        has_processors=config.logits_processors and not is_pooling,
        memory_fraction=usable_share(config, platform),
        reserve_bytes=config.reserve_mib << 20,
        requested_pages=config.num_pages,
        compile_threads=config.compile_threads,
        adapters=adapters,
    )


def _free_tokens(chosen: StepLimits, model: ModelConfig) -> int:
    """Returns the number of tokens up to which padding a step takes less time than another step.

    It is no larger than the bound of prompts beside decodes, which the decodes would otherwise pad to twice as many.
    """
    if model.experts is None:
        return _FREE_TOKENS
    num_tokens = _FREE_EXPERT_TOKENS * model.experts.num_experts // model.experts.num_chosen
    return min(num_tokens, chosen.low_load_prefill_tokens or chosen.max_prefill_tokens or num_tokens)


def _limits(
    config: ServeConfig, chosen: StepLimits, model: ModelConfig, buckets: tuple[Bucket, ...]
) -> SchedulerLimits:
    free_tokens = _free_tokens(chosen, model)
    sizes = sorted({bucket.num_tokens for bucket in buckets if not bucket.is_decode})
    fused_sizes = {bucket.num_tokens for bucket in buckets if bucket.has_drafts}
    return SchedulerLimits(
        page_size=config.page_size,
        max_running=chosen.max_running,
        max_step_tokens=chosen.max_step_tokens,
        max_waiting=config.max_waiting,
        max_context=context_tokens(config, model),
        max_prefill_tokens=chosen.max_prefill_tokens,
        low_load_prefill_tokens=chosen.low_load_prefill_tokens,
        max_decode_steps=chosen.max_decode_steps,
        multi_step_requests=chosen.multi_step_requests,
        priority_seconds=config.priority_seconds,
        has_prefix_cache=config.prefix_cache,
        draft_tokens=config.draft_tokens,
        has_draft_model=bool(config.draft_model),
        draft_min_match=config.draft_min_match,
        step_sizes=tuple(size for size in sizes if size >= free_tokens),
        draft_sizes=tuple(sorted({*sizes, *fused_sizes})),
    )


def _placed(server: ResolvedServer, mesh: Mesh, kernels: Kernels, findings: P2PFindings) -> PlacedServer:
    fields = {field.name: getattr(server, field.name) for field in dataclasses.fields(ResolvedServer)}
    return PlacedServer(**fields, mesh=mesh, kernels=kernels, findings=findings)
