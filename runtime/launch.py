"""From a `ServeConfig` to a ready engine: mesh, weights, programs, cache, queues, in this order."""

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.deploy import demo
from meshserve.sharding.layout import ShardLayout, shard_layout
from meshserve.sharding.memory import num_pages_that_fit
from meshserve.sharding.mesh import make_mesh, use_cpu_devices

from .batch import BatchBuilder, declare_buckets
from .compiles import use_cache
from .config import SUPPORTED_ARCHITECTURE, ModelConfig, ServeConfig
from .contract import Deliver, ModelInfo
from .engine import Engine
from .errors import ConfigError
from .hf_weights import load_model
from .kernel_choice import choose_kernels
from .limits import SchedulerLimits
from .pages import PageAllocator
from .record import Record
from .scheduler import Scheduler
from .step import CacheShape, StepRunner, cache_page_bytes, scratch_bytes, state_shapes
from .tokenizer import Tokenizer

_log = logging.getLogger(__name__)

DEMO_MODEL = "demo"
_DEFAULT_MAX_CONTEXT = 32_768  # tokens, where the model allows more and the config does not say

# Makes a model's structure and its parameters on the devices of a mesh.
MakeParams = Callable[[ModelConfig, ShardLayout, Mesh, jnp.dtype], tuple[nnx.GraphDef, nnx.State]]


@dataclass(frozen=True)
class Launched:
    """A ready engine, not yet started, and what the edge needs beside it."""

    engine: Engine
    tokenizer: Tokenizer
    info: ModelInfo


def model_directory(config: ServeConfig) -> Path:
    """Where the model lies; "demo" names the embedded one.

    Raises:
      ConfigError: no model is named, or there is no such directory.
    """
    if not config.model:
        raise ConfigError("no model is named. Pass --model with a Hugging Face model directory, or --model demo.")
    directory = Path(demo.__file__).with_name("model") if config.model == DEMO_MODEL else Path(config.model)
    if not directory.is_dir():
        raise ConfigError(f"--model {config.model}: no such directory. Download the model first, or use --model demo.")
    return directory


def launch(
    config: ServeConfig,
    deliver: Deliver,
    record: Record | None = None,
    progress: Callable[[str], None] = _log.info,
) -> Launched:
    """Loads a model and makes everything ready to serve it. Blocks for as long as that takes; tells `progress` where
    it is.

    `deliver` and `record` get what comes out of the engine; see `Engine`.

    Raises:
      MeshserveError, CheckpointError, ValueError, MemoryError: the config, the model or the devices do not allow it.
    """
    directory = model_directory(config)
    model = ModelConfig.from_file(directory / "config.json")
    tokenizer = Tokenizer(directory)

    def load(*target: object) -> tuple[nnx.GraphDef, nnx.State]:
        progress("loading the weights")
        loaded = load_model(directory, *target)  # type: ignore[arg-type]
        progress("compiling the programs")
        return loaded

    engine, mesh = build_engine(config, model, load, tokenizer, deliver, record)
    return Launched(engine, tokenizer, _model_info(config, model, tokenizer, mesh))


def build_engine(
    config: ServeConfig,
    model: ModelConfig,
    make_params: MakeParams,
    tokenizer: Tokenizer | None,
    deliver: Deliver,
    record: Record | None = None,
) -> tuple[Engine, Mesh]:
    """Everything but the files: places the parameters, compiles every program, then allocates the cache.

    Raises:
      As `launch`.
    """
    if config.cpu_devices:
        use_cpu_devices(config.cpu_devices)
    if config.cache_dir:
        use_cache(Path(config.cache_dir).expanduser())
    mesh = make_mesh(config.tp)
    layout = shard_layout(
        num_shards=config.tp,
        num_query_heads=model.num_query_heads,
        num_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        mlp_dim=model.mlp_dim,
    )
    limits = SchedulerLimits(
        page_size=config.page_size,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_waiting=config.max_waiting,
        max_context=_max_context(config, model),
        max_prefill_tokens=config.max_prefill_tokens,
        max_decode_steps=config.max_decode_steps,
        priority_seconds=config.priority_seconds,
        has_prefix_cache=config.prefix_cache,
    )
    dtype = _dtype(config, model)
    structure, params = make_params(model, layout, mesh, dtype)
    # A cache of one page tells what there is to know about kernels and scratch, which do not depend on its size.
    one_page = CacheShape(1, config.page_size, config.max_running, -(-limits.max_context // config.page_size))
    one_page_shapes = state_shapes(model, layout, one_page, dtype)
    kernels = choose_kernels(config, mesh, params, one_page_shapes)
    buckets = declare_buckets(
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        page_size=config.page_size,
        max_decode_steps=config.max_decode_steps,
        has_decode_kernels=kernels.decode is not None,
    )
    num_pages = config.num_pages
    if not num_pages:
        scratch = scratch_bytes(structure, params, one_page_shapes, kernels, buckets[-1], mesh)
        kept = scratch + (config.reserve_mib << 20)
        page_bytes = cache_page_bytes(model, layout, config.page_size, dtype)
        num_pages = num_pages_that_fit(mesh, config.memory_fraction, page_bytes, kept)
    shape = one_page._replace(num_pages=num_pages)
    runner = StepRunner(
        structure=structure,
        params=params,
        state_shapes=state_shapes(model, layout, shape, dtype),
        kernels=kernels,
        buckets=buckets,
        mesh=mesh,
    )
    _log.info("%d programs ready after %.1f s; %s", len(buckets), runner.compile_seconds, shape)
    pages = PageAllocator(shape.num_pages)
    engine = Engine(
        scheduler=Scheduler(limits, pages, tokenizer.eos_token_ids if tokenizer is not None else frozenset()),
        pages=pages,
        batches=BatchBuilder(
            buckets,
            max_running=config.max_running,
            page_size=config.page_size,
            max_request_pages=shape.max_request_pages,
        ),
        runner=runner,
        tokenizer=tokenizer,
        deliver=deliver,
        record=record,
    )
    return engine, mesh


def _dtype(config: ServeConfig, model: ModelConfig) -> jnp.dtype:
    """Of weights, activations and cache. A float16 checkpoint is served in bfloat16, which has float32's range."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if model.dtype == "float32" else "bfloat16")


def _max_context(config: ServeConfig, model: ModelConfig) -> int:
    if config.max_context > model.max_positions:
        raise ConfigError(
            f"max_context is {config.max_context}; the model was made for {model.max_positions} tokens "
            "(max_position_embeddings). Lower it, or configure YaRN rope scaling in the model's config.json."
        )
    return config.max_context or min(model.max_positions, _DEFAULT_MAX_CONTEXT)


def _model_info(config: ServeConfig, model: ModelConfig, tokenizer: Tokenizer, mesh: Mesh) -> ModelInfo:
    return ModelInfo(
        name=config.served_name or (config.model if config.model == DEMO_MODEL else Path(config.model).name),
        architecture=SUPPORTED_ARCHITECTURE,
        vocab_size=model.vocab_size,
        max_context_tokens=_max_context(config, model),
        eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)),
        tp_degree=config.tp,
        dtype=_dtype(config, model).name,
        page_size_tokens=config.page_size,
        num_parameters=model.num_params,
        num_devices=mesh.size,
        device_kind=mesh.devices.flat[0].device_kind,
        server_version=importlib.metadata.version("meshserve"),
        supports_chat=tokenizer.has_chat_template,
    )
