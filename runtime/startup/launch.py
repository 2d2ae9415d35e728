"""Turns a `ServeConfig` into an engine that is ready to start: mesh, weights, programs, cache and scheduler.

files -> resolved server -> weights on the devices -> compiled programs and cache -> engine
"""

import dataclasses
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.kernels.cuda.user_folder import user_folder
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import check_weights_fit

from ..adapters.catalog import HostCatalog
from ..api.engine_api import Deliver, ModelInfo
from ..api.errors import ConfigError, WrongTaskError
from ..api.sampling_params import SamplingParams, Stage, params_at
from ..api.tasks import EMBED, GENERATE
from ..api.versions import installed_version
from ..cluster.preflight import Cluster
from ..draft.draft_build import Drafting, load_drafting
from ..draft.model.drafting_runner import RunnerBeside
from ..engine.engine import Engine
from ..engine.runner import Runner
from ..engine.step_record import Record
from ..host_cache.block_files import expanded
from ..host_cache.file_key import file_key
from ..host_cache.host_cache import HostCache
from ..host_cache.pinning import pinned_beside
from ..model_files.generation_config import read_sampling_defaults
from ..model_files.model_config import ModelConfig
from ..model_files.quantization import NOT_QUANTIZED
from ..options.serve_config import ServeConfig
from ..program.batch import BatchBuilder, Bucket
from ..program.device_figures import FIGURES_IN_LOG
from ..program.expert_balance import ExpertBalance
from ..program.processors.processor_batch import ProcessorBatchBuilder
from ..program.program_store import ProgramStore, start_name
from ..program.step_runner import StepRunner
from ..resolve.resolved_server import PlacedServer, resolve_here
from ..retrieval.embedding_defaults import EmbeddingDefaults, read_embedding_defaults
from ..scheduler.adapter_slots import AdapterSlots
from ..scheduler.limits import SchedulerLimits
from ..scheduler.page_allocator import PageAllocator
from ..scheduler.page_changes import PageChanges
from ..scheduler.scheduler import Scheduler
from ..supervision.supervisor import Supervisor
from ..telemetry.kv_events.feed import KvEventFeed
from ..telemetry.kv_events.kv_event_feed import open_feed
from ..text.constraint_limits import ConstraintLimits
from ..text.grammar import Grammars
from ..text.tokenizer import Tokenizer, open_tokenizer
from ..weight_updates.engine_control import EngineControl
from ..weight_updates.weight_updater import WeightUpdater
from ..weights.load import load_model, read_model_with_weights
from ..weights.local_adapters import with_local_adapters
from ..weights.locate import ModelFiles, find_model, model_name
from ..weights.model_task import with_task
from ..weights.random_weights import random_model
from ..weights.registry import architecture_of, weight_bytes
from .devices import start_devices
from .live_reshard import Resharder
from .persistent_host_cache import PersistentHostCache
from .runner_build import compile_runner, warm_up
from .summary import log_summary, warn_of_cache

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0  # between two checks of the processes for constraints

# Creates a model's structure and its parameters on the devices of a mesh.
MakeParams = Callable[[ModelConfig, ShardLayout, Mesh, jnp.dtype], tuple[nnx.GraphDef, nnx.State]]
# A started runner, the resolved server, and the buckets in which its draft model proposes, if it has one.
Built = tuple[StepRunner | RunnerBeside, PlacedServer, tuple[Bucket, ...]]


@dataclass(frozen=True)
class Launched:
    """An engine that is ready to start, and what the server needs besides it."""

    engine: Engine
    tokenizer: Tokenizer
    info: ModelInfo
    resharder: Resharder
    weights: WeightUpdater
    control: EngineControl
    limits: SchedulerLimits
    grammars: Grammars | None  # None if constraints are not supported
    kv_events: KvEventFeed | None = None  # started; None unless the options ask for it
    persistent_host_cache: PersistentHostCache | None = None  # None unless the options ask for it
    embedding: EmbeddingDefaults = EmbeddingDefaults()
    supervisor: Supervisor = field(default_factory=Supervisor)

    def close(self) -> None:
        """Stops the engine, the feed of KV cache events and the processes for constraints, and keeps the host tier."""
        self.engine.stop()
        if self.persistent_host_cache is not None:
            self.persistent_host_cache.close()
        if self.kv_events is not None:
            self.kv_events.stop()
        self.supervisor.stop()
        if self.grammars is not None:
            self.grammars.close()

    def expert_balance(self) -> ExpertBalance | None:
        """Returns how the tokens fell on experts and devices; None for a model without experts."""
        runner = self.engine.runner
        served = runner.served if isinstance(runner, RunnerBeside) else runner
        counts = served.expert_tokens if isinstance(served, StepRunner) else None
        return counts.balance() if counts is not None else None

    def info_at(self, tp: int) -> ModelInfo:
        """Returns the model information after a change of the TP size."""
        return dataclasses.replace(self.info, tp_size=tp, num_devices=tp)


def launch(
    config: ServeConfig,
    deliver: Deliver,
    record: Record | None = None,
    progress: Callable[[str], None] = _log.info,
    cluster: Cluster | None = None,
    task: str = "",
    *,
    supervisor: Supervisor | None = None,
) -> Launched:
    """Loads a model and prepares everything to serve it. Blocks until the engine is ready to start.

    Args:
      config: The options.
      deliver: Receives the outputs; see `Engine`.
      record: Receives a record of each step; see `Engine`.
      progress: Receives a description of each phase when it begins.
      cluster: The cluster of which this is process 0; None if this process serves alone.
      task: What the model must be for, such as `EMBED`; "" if any will do.
      supervisor: Of the background tasks; None for one of their own.

    Raises:
      WrongTaskError: The model is for another task.
      MeshserveError, CheckpointError, ValueError, MemoryError: The options, the model or the devices do not allow it.
      ClusterError: Another process does not allow it, or has failed.
    """
    if cluster is not None:
        progress("waiting for the other processes")
        cluster.compare_options(config)
    progress("finding the model")
    files = find_model(config.model, revision=config.revision, random_weights=config.random_weights)
    model, config = read_model_of(config, files), with_local_adapters(config)
    if task not in ("", model.task):
        raise WrongTaskError(
            f"{config.model} is a model to {model.task}, and this command needs a model that can {task}. Choose "
            f"another one, or add --task {task} if this one can."
        )
    tokenizer = open_tokenizer(files.small)
    default_sampling = _default_sampling(config, files)
    if model.pooling is None:
        _log_eos_tokens(tokenizer, model)
    embedding = read_embedding_defaults(files.small) if model.task == EMBED else EmbeddingDefaults()
    grammars = None
    if config.logits_processors and tokenizer.has_text and model.pooling is None:
        grammars = _grammars(config, tokenizer, model, files.small / "tokenizer.json")
    if cluster is not None:
        progress("waiting for the other processes")
        cluster.begin(config, files)
    feed = open_feed(config, _served_name(config))
    built = build_runner(config, model, params_of(files), cluster, _text_file(tokenizer), progress=progress)
    progress("building the engine")
    changes = feed.changes if feed is not None else None
    engine, server = _engine_on(built, config, tokenizer, deliver, record, changes), built[1]
    info = dataclasses.replace(_model_info(server, tokenizer), default_sampling=default_sampling)
    supervisor = supervisor if supervisor is not None else Supervisor()
    if grammars is not None:
        supervisor.every(_CHECK_SECONDS, "constraints", grammars.check)
    if feed is not None:
        feed.start(supervisor)
    resharder, persistent_host_cache = Resharder(engine, server), None
    if config.host_cache_dir:
        directory = expanded(config.host_cache_dir)
        key = file_key(user_folder(config.cache_dir) if config.cache_dir else directory)
        persistent_host_cache = PersistentHostCache(directory, key, engine, resharder)
        persistent_host_cache.begin(supervisor)
    weights = WeightUpdater(engine, lambda: resharder.server, resharder.one_at_a_time)
    return Launched(
        engine=engine,
        tokenizer=tokenizer,
        info=info,
        resharder=resharder,
        weights=weights,
        control=EngineControl(engine, weights, resharder.one_at_a_time),
        limits=server.limits,
        grammars=grammars,
        kv_events=feed,
        persistent_host_cache=persistent_host_cache,
        embedding=embedding,
        supervisor=supervisor,
    )


def launch_follower(config: ServeConfig, cluster: Cluster, progress: Callable[[str], None] = _log.info) -> Runner:
    """Prepares a follower process, like `launch`, and returns its started runner.

    Raises:
      As `launch`.
    """
    progress("waiting for the other processes")
    cluster.compare_options(config)
    progress("finding the model")
    files = find_model(config.model, revision=config.revision, random_weights=config.random_weights)
    model, config = read_model_of(config, files), with_local_adapters(config, has_weights=False)
    progress("waiting for the other processes")
    cluster.begin(config, files)
    runner, *_ = build_runner(config, model, params_of(files), cluster, progress=progress)
    return runner


def open_model(
    name: str,
    *,
    random_weights: bool,
    quantize: str = NOT_QUANTIZED,
    fp8_head: bool = False,
    task: str = GENERATE,
) -> tuple[ModelConfig, MakeParams]:
    """Finds a model for an engine without a tokenizer. The arguments are the options of the same names.

    Raises:
      MeshserveError: The model does not exist, or its architecture is not implemented.
    """
    files = find_model(name, random_weights=random_weights)
    model = read_model_with_weights(files.small / "config.json", files.weights, quantize, fp8_head=fp8_head)
    return with_task(model, task, files.small), params_of(files)


def read_model_of(config: ServeConfig, files: ModelFiles) -> ModelConfig:
    """Returns the config of the model in these files, as the options ask for it. Raises as `launch`."""
    config_file = files.small / "config.json"
    model = read_model_with_weights(config_file, files.weights, config.quantize, fp8_head=config.fp8_head)
    if config.strict_config:
        model.notes.check_empty()
    return with_task(model, config.task, files.small)


def params_of(files: ModelFiles) -> MakeParams:
    """Returns what loads the model in these files."""
    return random_model if files.weights is None else partial(load_model, files.weights)


def build_engine(
    config: ServeConfig,
    model: ModelConfig,
    make_params: MakeParams,
    tokenizer: Tokenizer | None,
    deliver: Deliver,
    record: Record | None = None,
) -> tuple[Engine, PlacedServer]:
    """Builds a runner as `build_runner` does, and an engine that is ready to start. Returns it and the resolved server.

    Raises:
      As `launch`.
    """
    built = build_runner(config, model, make_params, tokenizer_file=_text_file(tokenizer))
    return _engine_on(built, config, tokenizer, deliver, record), built[1]


def _text_file(tokenizer: Tokenizer | None) -> Path | None:
    return tokenizer.directory / "tokenizer.json" if tokenizer is not None and tokenizer.has_text else None


def _engine_on(
    built: Built,
    config: ServeConfig,
    tokenizer: Tokenizer | None,
    deliver: Deliver,
    record: Record | None = None,
    changes: PageChanges | None = None,
) -> Engine:
    """Builds an engine that is ready to start. `changes`, if given, is told which pages the prefix cache holds."""
    runner, server, chain_buckets = built
    limits, pages, model = server.limits, PageAllocator(runner.num_pages), server.model
    pages.changes = changes
    if isinstance(runner, StepRunner) and runner.copies is not None:
        HostCache(pages, limits, runner.copies)
    eos_token_ids = _eos_token_ids(tokenizer, model) if tokenizer is not None else frozenset()
    slots = AdapterSlots(server.adapters.num_slots) if server.adapters is not None else None
    engine = Engine(
        scheduler=Scheduler(limits, pages, eos_token_ids, slots),
        pages=pages,
        batches=BatchBuilder(
            (*server.buckets, *chain_buckets),
            max_running=limits.max_running,
            page_size=limits.page_size,
            max_request_pages=limits.num_pages_for(limits.max_context),
            processors=ProcessorBatchBuilder(
                max_running=limits.max_running,
                vocab_size=model.vocab_size,
                eos_token_ids=eos_token_ids,
                num_drafts=limits.draft_tokens,
            ),
            has_drafts=limits.draft_tokens > 0,
        ),
        runner=runner,
        tokenizer=tokenizer,
        deliver=deliver,
        record=record,
    )
    if slots is not None:
        engine.adapters = _catalog(config, server, slots)
    if config.seed >= 0:
        engine.draw_seed = random.Random(config.seed).getrandbits
    return engine


def _catalog(config: ServeConfig, server: PlacedServer, slots: AdapterSlots) -> HostCatalog:
    """Loads the adapters of the options.

    Raises:
      AdapterError: One of them cannot be served.
    """
    assert server.adapters is not None
    catalog = HostCatalog(
        server.model,
        rank=server.adapters.rank,
        dtype=server.dtype,
        max_bytes=int(config.adapter_host_gib * (1 << 30)),
        is_on_device=slots.holds,
    )
    catalog.load_all(config.adapter_paths)
    return catalog


def build_runner(
    config: ServeConfig,
    model: ModelConfig,
    make_params: MakeParams,
    cluster: Cluster | None = None,
    tokenizer_file: Path | None = None,
    *,
    progress: Callable[[str], None] = _log.info,
) -> Built:
    """Resolves the server, loads its parameters, compiles its programs, allocates its cache and warms it up.

    Every process of a server does this, and tells `progress` each phase when it begins.

    Raises:
      As `launch`.
    """
    is_tp_chosen = not config.tp
    progress("starting the devices")
    config, mesh = start_devices(config, model)
    progress("choosing kernels")  # and compiling those in CUDA
    server = resolve_here(config, model, mesh)
    log_summary(server, is_tp_chosen=is_tp_chosen)
    needed_bytes = weight_bytes(server.model, server.layout, server.dtype) + server.adapter_bytes
    check_weights_fit(server.mesh, server.memory_fraction, needed_bytes, page_bytes=server.page_bytes)
    store = ProgramStore.of(user_folder(config.cache_dir) if config.cache_dir else None, mesh, config.stored_programs)
    name = _start_name(server) if store is not None else ""
    if store is not None and name:
        store.fetch(name, config.compile_threads)
    progress("loading the weights")
    with pinned_beside(server.host_cache, server.mesh.local_devices):
        structure, params = make_params(server.model, server.layout, server.mesh, server.dtype)
    draft = load_drafting(config, server, params, tokenizer_file) if config.draft_model else None
    progress("compiling the programs")
    served = compile_runner(server, structure, params, draft=draft, cluster=cluster, store=store)
    if store is not None and name:
        store.remember(name)
    progress("allocating the KV cache")
    _allocate(served, params, draft)
    runner = served if draft is None else draft.beside(served)
    chains = draft.chain_buckets() if draft is not None else ()
    if server.platform != "cpu":  # where a first run takes no longer than others
        if cluster is not None:
            cluster.compiled()
        progress("running every program")
        warm_up(runner, server.buckets, chains, max_running=server.limits.max_running)
    warn_of_cache(server, runner.num_pages)
    _log.info("%s%s", FIGURES_IN_LOG, json.dumps(dataclasses.asdict(runner.figures)))
    return runner, server, chains


def _start_name(server: PlacedServer) -> str:
    """Returns a name for starts of servers that have the same programs, as far as is known before the weights are."""
    apart = {"requested", "limits", "step_limits"}  # what they say of ports, queues and policies makes no program
    resolved = {field.name: getattr(server, field.name) for field in dataclasses.fields(server)}
    limits = server.limits
    return start_name(
        {name: value for name, value in resolved.items() if name not in apart},
        (limits.page_size, limits.max_running, limits.max_context, limits.draft_tokens),
    )


def _allocate(served: StepRunner, params: nnx.State, draft: Drafting | None) -> None:
    """Gives a runner its parameters and its cache. Raises as `StepRunner.start`."""
    started = time.monotonic()
    served.start(params, draft.head.weights if draft is not None and draft.head is not None else ())
    seconds = time.monotonic() - started
    jax.monitoring.record_event_duration_secs("/meshserve/start/allocation_duration", seconds)
    _log.info("allocated the KV cache in %.1f s", seconds)


def _grammars(config: ServeConfig, tokenizer: Tokenizer, model: ModelConfig, tokenizer_file: Path) -> Grammars:
    eos_token_ids = filter(tokenizer.knows, _eos_token_ids(tokenizer, model))
    limits = ConstraintLimits(seconds=config.constraint_seconds, memory_bytes=config.constraint_memory_mib << 20)
    return Grammars(tokenizer_file, model.vocab_size, frozenset(eos_token_ids), limits, num_ahead=config.draft_tokens)


def _eos_token_ids(tokenizer: Tokenizer, model: ModelConfig) -> frozenset[int]:
    """Returns the end tokens of the tokenizer that are in the model's vocabulary.

    The files of a model with a reduced vocabulary may name others.
    """
    return frozenset(token_id for token_id in tokenizer.eos_token_ids if token_id < model.vocab_size)


def _log_eos_tokens(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Logs where each end token comes from."""
    ends = []
    for token_id, files in sorted(tokenizer.eos_files.items()):
        if token_id < model.vocab_size:
            text = tokenizer.all_token_bytes(token_id).decode(errors="replace")
            ends.append(" ".join(filter(None, [str(token_id), text, f"({', '.join(files)})"])))
    _log.info("end tokens: %s", "; ".join(ends) or "none; outputs end at max_tokens, stop strings and stop_token_ids")


def _default_sampling(config: ServeConfig, files: ModelFiles) -> dict[str, Any]:
    """Returns the sampling defaults of the model's generation_config.json.

    Raises:
      UnsupportedModelError: See `read_sampling_defaults`.
      ConfigError: They need the logits processors, and the server has none.
    """
    defaults = read_sampling_defaults(files.small) if config.generation_config == "auto" else {}
    needed = SamplingParams(**defaults).changed_fields(params_at(Stage.PENALTY, Stage.PROCESSOR))
    if needed and not config.logits_processors:
        raise ConfigError(
            f"the model's generation_config.json sets {', '.join(needed)}, which needs --logits-processors. Set it, or "
            "--generation-config=off."
        )
    if defaults:
        _log.info("sampling defaults of the model's generation_config.json: %s", defaults)
    return defaults


def _served_name(config: ServeConfig) -> str:
    return config.served_name or model_name(config.model)


def _model_info(server: PlacedServer, tokenizer: Tokenizer) -> ModelInfo:
    model, requested = server.model, server.requested
    return ModelInfo(
        name=_served_name(requested),
        architecture=architecture_of(model).name,
        vocab_size=model.vocab_size,
        max_context_tokens=server.limits.max_context,
        eos_token_ids=tuple(sorted(_eos_token_ids(tokenizer, model))),
        tp_size=server.tp,
        dtype=server.dtype.name,
        quantization=model.quantization_name,
        kv_cache_dtype=server.cache_dtype.name,
        page_size_tokens=server.limits.page_size,
        num_parameters=model.num_params,
        num_devices=server.mesh.size,
        device_kind=server.mesh.devices.flat[0].device_kind,
        server_version=installed_version(),
        supports_chat=tokenizer.has_chat_template and model.pooling is None,
        supports_resume=model.pooling is None,
        supports_structured_output=server.has_processors and tokenizer.has_text,
        supports_logprobs=server.has_processors,
        supports_penalties=server.has_processors,
        supports_text=tokenizer.has_text,
        task=model.task,
        embedding_dimensions=model.embed_dim if model.task == EMBED else 0,
        draft_tokens=server.limits.draft_tokens,
        draft_model=model_name(requested.draft_model) if requested.draft_model else "",
    )
