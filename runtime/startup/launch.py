"""From a `ServeConfig` to a ready engine: mesh, weights, programs, cache, queues, in this order."""

import dataclasses
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import added_bytes, check_weights_fit, num_pages_that_fit, shard_bytes
from meshserve.sharding.mesh import make_mesh, use_cpu_devices, use_dispatch_threads

from ..api.config import ServeConfig, context_tokens, serving_dtype
from ..api.engine_api import Deliver, ModelInfo
from ..api.model_config import ModelConfig
from ..cluster.preflight import Cluster
from ..engine.engine import Engine
from ..engine.step_record import Record
from ..planning.kernel_selection import choose_kernels, kernels_here
from ..program.batch import BatchBuilder, server_buckets, server_limits
from ..program.compile_cache import use_cache
from ..program.device_figures import FIGURES_IN_LOG
from ..program.output_buffers import output_buffer_shapes
from ..program.processor_batch import ProcessorBatchBuilder
from ..program.processor_programs import LogitsProcessors, ProcessorPrograms
from ..program.step import CacheShape, StepRunner, cache_page_bytes, lower_step, placed_state, state_shapes
from ..scheduler.page_allocator import PageAllocator
from ..scheduler.scheduler import Scheduler
from ..text.tokenizer import Tokenizer
from ..weights.load import device_weight_bytes, load_model
from ..weights.locate import ModelFiles, find_model
from ..weights.orbax_layout import model_layout
from ..weights.random_weights import random_model
from ..weights.registry import architecture_of, read_model
from .live_reshard import Resharder

if TYPE_CHECKING:
    from ..text.grammar import Grammars

_log = logging.getLogger(__name__)

# Makes a model's structure and its parameters on the devices of a mesh.
MakeParams = Callable[[ModelConfig, ShardLayout, Mesh, jnp.dtype], tuple[nnx.GraphDef, nnx.State]]


@dataclass(frozen=True)
class Launched:
    """A ready engine, not yet started, and what the edge needs beside it."""

    engine: Engine
    tokenizer: Tokenizer
    info: ModelInfo
    resharder: Resharder
    grammars: "Grammars | None"  # None: takes no constraints

    def info_at(self, tp: int) -> ModelInfo:
        """What is served once the degree has changed."""
        return dataclasses.replace(self.info, tp_degree=tp, num_devices=tp)


def launch(
    config: ServeConfig,
    deliver: Deliver,
    record: Record | None = None,
    progress: Callable[[str], None] = _log.info,
    cluster: Cluster | None = None,
) -> Launched:
    """Loads a model and makes everything ready to serve it. Blocks for as long as that takes; tells `progress` where
    it is.

    `deliver` and `record` get what comes out of the engine; see `Engine`. With a `cluster` this is process 0 of it.

    Raises:
      MeshserveError, CheckpointError, ValueError, MemoryError: the config, the model or the devices do not allow it.
      ClusterError: the other processes do not.
    """
    files = find_model(config.model, revision=config.revision, random_weights=config.random_weights)
    model = read_model(files.small / "config.json")
    tokenizer = Tokenizer(files.small)
    grammars = None
    if config.logits_processors:
        from ..text.grammar import (
            Grammars,  # here, because benchmarks of the engine run where llguidance is not installed
        )

        eos_token_ids = filter(tokenizer.knows, _eos_token_ids(tokenizer, model))
        grammars = Grammars(files.small / "tokenizer.json", model.vocab_size, frozenset(eos_token_ids))
    if cluster is not None:
        progress("waiting for the other processes")
        cluster.begin(config, files)
    load = _loading(files, progress)
    engine, mesh = build_engine(config, model, load, tokenizer, deliver, record, cluster)
    named = kernels_here(config, model, mesh)
    # At another degree the same kernels serve, but how the devices add up is chosen anew.
    resharder = Resharder(engine, dataclasses.replace(named, all_reduce=config.all_reduce), model, make_runner)
    return Launched(engine, tokenizer, _model_info(named, model, tokenizer, mesh), resharder, grammars)


def launch_follower(config: ServeConfig, cluster: Cluster, progress: Callable[[str], None] = _log.info) -> StepRunner:
    """As `launch`, for a process that follows: a started runner is all it needs.

    Raises:
      As `launch`.
    """
    files = find_model(config.model, revision=config.revision, random_weights=config.random_weights)
    model = read_model(files.small / "config.json")
    progress("waiting for the other processes")
    cluster.begin(config, files)
    runner, _, _ = build_runner(config, model, _loading(files, progress), cluster)
    return runner


def open_model(name: str, *, random_weights: bool) -> tuple[ModelConfig, MakeParams]:
    """What an engine without a tokenizer needs of `model` and `random_weights` of a `ServeConfig`.

    Raises:
      MeshserveError: there is no such model, or it is not implemented.
    """
    files = find_model(name, random_weights=random_weights)
    return read_model(files.small / "config.json"), _make_params(files)


def _make_params(files: ModelFiles) -> MakeParams:
    return random_model if files.weights is None else partial(load_model, files.weights)


def _loading(files: ModelFiles, progress: Callable[[str], None]) -> MakeParams:
    def load(*target: object) -> tuple[nnx.GraphDef, nnx.State]:
        progress("loading the weights")
        loaded = _make_params(files)(*target)  # type: ignore[arg-type]
        progress("compiling the programs")
        return loaded

    return load


def build_engine(
    config: ServeConfig,
    model: ModelConfig,
    make_params: MakeParams,
    tokenizer: Tokenizer | None,
    deliver: Deliver,
    record: Record | None = None,
    cluster: Cluster | None = None,
) -> tuple[Engine, Mesh]:
    """Everything but the files: places the parameters, compiles every program, then allocates the cache.

    Raises:
      As `launch`.
    """
    runner, num_pages, mesh = build_runner(config, model, make_params, cluster)
    config = kernels_here(config, model, mesh)
    limits = server_limits(config, context_tokens(config, model))
    pages = PageAllocator(num_pages)
    eos_token_ids = _eos_token_ids(tokenizer, model) if tokenizer is not None else frozenset()
    engine = Engine(
        scheduler=Scheduler(limits, pages, eos_token_ids),
        pages=pages,
        batches=BatchBuilder(
            server_buckets(config),
            max_running=config.max_running,
            page_size=config.page_size,
            max_request_pages=limits.num_pages_for(limits.max_context),
            processors=ProcessorBatchBuilder(
                max_running=config.max_running, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids
            ),
            has_drafts=config.draft_tokens > 0,
        ),
        runner=runner,
        tokenizer=tokenizer,
        deliver=deliver,
        record=record,
    )
    return engine, mesh


def build_runner(
    config: ServeConfig, model: ModelConfig, make_params: MakeParams, cluster: Cluster | None = None
) -> tuple[StepRunner, int, Mesh]:
    """What every process of a server has: a started runner, the number of its pages, and its mesh.

    Raises:
      As `launch`.
    """
    if config.cpu_devices:
        use_cpu_devices(config.cpu_devices)
    elif config.dispatch_threads and config.tp > 1:
        use_dispatch_threads()
    if config.cache_dir:
        use_cache(Path(config.cache_dir).expanduser())
    mesh = make_mesh(config.tp)
    layout, dtype = model_layout(model, config.tp), _dtype_on(mesh, config, model)
    page_bytes = cache_page_bytes(model, layout, config.page_size, dtype)
    check_weights_fit(mesh, config.memory_fraction, device_weight_bytes(model, mesh, dtype), page_bytes=page_bytes)
    config = kernels_here(config, model, mesh, are_devices_idle=True)
    structure, params = make_params(model, layout, mesh, dtype)
    runner, num_pages = make_runner(config, model, mesh, structure, params, cluster=cluster)
    runner.start(params)
    _log.info("%s%s", FIGURES_IN_LOG, json.dumps(dataclasses.asdict(runner.figures)))
    return runner, num_pages, mesh


def make_runner(
    config: ServeConfig,
    model: ModelConfig,
    mesh: Mesh,
    structure: nnx.GraphDef,
    params: nnx.State,
    *,
    measured: Mesh | None = None,
    reserved_bytes: int = 0,
    cluster: Cluster | None = None,
) -> tuple[StepRunner, int]:
    """Compiles every program: the runner, not yet started, and the number of pages of its cache.

    Args:
      params: arrays, or shapes with shardings.
      measured: the devices whose free memory decides about the cache, if not all of the mesh.
      reserved_bytes: of that memory, what will be taken on each device; negative if some will become free.
      cluster: the other processes of the mesh, who must make the same programs.

    Raises:
      ValueError, MemoryError: the devices do not allow it.
      ClusterError: the other processes do not.
    """
    config = kernels_here(config, model, mesh)
    layout, dtype = model_layout(model, mesh.size), _dtype_on(mesh, config, model)
    buckets = server_buckets(config)
    # A cache of one page tells what there is to know about kernels and scratch, which do not depend on its size.
    max_request_pages = -(-context_tokens(config, model) // config.page_size)
    one_page = CacheShape(1, config.page_size, config.max_running, max_request_pages)
    one_page_shapes = state_shapes(model, layout, one_page, dtype)
    kernels = choose_kernels(config, model, mesh)
    processors = None
    if config.logits_processors:
        declared = ProcessorPrograms(
            structure=structure,
            params=params,
            mesh=mesh,
            buckets=buckets,
            max_running=config.max_running,
            real_vocab_size=model.vocab_size,
            is_unrolled=kernels.is_unrolled,
            find_threshold=kernels.find_threshold,
            has_output_buffers=kernels.has_output_buffers,
            has_library_gemms=kernels.has_library_gemms,
        )
        processors = LogitsProcessors(declared, num_threads=config.compile_threads)
    num_pages = config.num_pages
    if not num_pages:
        placed = placed_state(one_page_shapes, mesh)
        scratch = added_bytes(lower_step(structure, params, kernels, buckets[-1], placed, mesh).compile())
        if processors is not None:
            scratch = max(scratch, processors.scratch_bytes) + processors.device_bytes
        scratch += shard_bytes(output_buffer_shapes(kernels, params, buckets, mesh))
        kept = scratch + (config.reserve_mib << 20) + reserved_bytes
        page_bytes = cache_page_bytes(model, layout, config.page_size, dtype)
        num_pages = num_pages_that_fit(measured or mesh, config.memory_fraction, page_bytes, kept)
    if cluster is not None:
        chosen = [getattr(kernel, "__qualname__", type(kernel).__name__) for kernel in vars(kernels).values()]
        num_pages = cluster.num_pages(
            num_pages, mesh=mesh.devices.tolist(), buckets=buckets, cache=one_page_shapes, kernels=chosen
        )
    shape = one_page._replace(num_pages=num_pages)
    runner = StepRunner(
        structure=structure,
        params=params,
        state_shapes=state_shapes(model, layout, shape, dtype),
        kernels=kernels,
        buckets=buckets,
        mesh=mesh,
        num_threads=config.compile_threads,
        processors=processors,
    )
    _log.info("%d programs ready after %.1f s; %s", len(buckets), runner.compile_seconds, shape)
    return runner, num_pages


def _eos_token_ids(tokenizer: Tokenizer, model: ModelConfig) -> frozenset[int]:
    """Those that the model can choose: the files beside one whose vocabulary was cut may still name others."""
    return frozenset(token_id for token_id in tokenizer.eos_token_ids if token_id < model.vocab_size)


def _dtype_on(mesh: Mesh, config: ServeConfig, model: ModelConfig) -> jnp.dtype:
    return jnp.dtype(serving_dtype(config, model, mesh.devices.flat[0].platform))


def _model_info(config: ServeConfig, model: ModelConfig, tokenizer: Tokenizer, mesh: Mesh) -> ModelInfo:
    return ModelInfo(
        name=config.served_name or Path(os.path.abspath(config.model)).name,
        architecture=architecture_of(model).name,
        vocab_size=model.vocab_size,
        max_context_tokens=context_tokens(config, model),
        eos_token_ids=tuple(sorted(_eos_token_ids(tokenizer, model))),
        tp_degree=config.tp,
        dtype=_dtype_on(mesh, config, model).name,
        page_size_tokens=config.page_size,
        num_parameters=model.num_params,
        num_devices=mesh.size,
        device_kind=mesh.devices.flat[0].device_kind,
        server_version=importlib.metadata.version("meshserve"),
        supports_chat=tokenizer.has_chat_template,
        supports_structured_output=config.logits_processors,
        supports_logprobs=config.logits_processors,
        supports_penalties=config.logits_processors,
    )
