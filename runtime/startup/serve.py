"""`meshserve serve`: opens its ports, loads and compiles in the background, and serves until it is told to stop."""

import contextlib
import dataclasses
import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.engine_api import ModelInfo
from ..api.errors import ConfigError, InvalidRequestError
from ..cluster.leader import Alone, Place, lead_or_follow
from ..gateway.vllm_native_service import SERVICES as GATEWAY_SERVICES
from ..gateway.vllm_service import add_gateway
from ..openai.batches.file_routes import BatchLimits
from ..openai.openai_port import OpenAIPort
from ..options.serve_config import ServeConfig
from ..server.edge import Backend, Edge
from ..server.lifecycle import Listen, ServerHandle, run_server
from ..server.method_permissions import new_access
from ..server.output_queue import OutputQueues, max_dispatch_tokens
from ..server.ports import address_of
from ..server.tls import TlsFiles
from ..supervision.supervisor import Supervisor
from ..telemetry.logs import configure_logs, flush_logs, say
from ..telemetry.profiler import Profiler
from ..telemetry.request_log import Observer
from ..telemetry.start_timeline import StartClock, listening, process_began
from ..telemetry.tracing import Tracer
from .checks import adapter_roots, check_before_listening
from .interpreter import collect_as_usual, take_turns_often
from .reload import reload_on_hangup

if TYPE_CHECKING:
    from ..cluster.preflight import Cluster
    from ..engine.runner import Runner
    from .launch import Launched

_log = logging.getLogger(__name__)

_MAX_DESCRIPTORS = 65_536  # each connection and each process for constraints takes some


def listen_of(config: ServeConfig) -> Listen:
    """Returns the addresses and protocols that the options ask for."""
    tls = None
    if config.tls_cert:
        client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
        tls = TlsFiles(certificate=Path(config.tls_cert), key=Path(config.tls_key), client_ca=client_ca)
    allowed_hosts = tuple(name.strip() for name in config.allowed_hosts.split(",") if name.strip())
    return Listen(
        host=config.host,
        port=config.port,
        allow_insecure=config.allow_insecure,
        tls=tls,
        http_port=config.http_port if config.http_port >= 0 else None,
        openai_port=config.openai_port if config.openai_port >= 0 else None,
        allowed_hosts=allowed_hosts,
        open_api=partial(OpenAIPort, allowed_hosts=allowed_hosts, has_page=config.page, batches=_batches(config)),
        gateway_port=config.gateway_port if config.gateway_port >= 0 else None,
        add_gateway=add_gateway,
        gateway_services=GATEWAY_SERVICES,
        # One connection may carry all that runs and waits. Twice that, as calls that have ended count for a moment.
        max_connection_calls=max(Listen.max_connection_calls, 2 * (config.max_running + config.max_waiting)),
        drain_seconds=config.drain_seconds,
        profiler=Profiler(Path(config.profile_dir)) if config.profile_dir else None,
    )


def _batches(config: ServeConfig) -> BatchLimits | None:
    """Returns where files and batches are kept, if they are served."""
    if not config.batch_dir:
        return None
    return BatchLimits(
        directory=Path(config.batch_dir).expanduser(),
        max_bytes=int(config.batch_gib * (1 << 30)),
        seconds=config.batch_days * 86_400,
    )


def serve_config_until_stopped(config: ServeConfig, read: Callable[[], ServeConfig] | None = None) -> int:
    """Serves until told to stop, and returns the exit status.

    In a cluster, process 0 serves and the other processes follow it. These processes exit instead of returning, because
    JAX's shutdown waits for processes that may have exited.

    Args:
      config: The options.
      read: Rereads the options at SIGHUP, see `reload_on_hangup`; None if they do not come from a file.

    Raises:
      MeshserveError: The options, the model, the devices or the address do not allow it, or the engine failed.
    """
    clock = StartClock(process_began())
    clock.begin("checking the options")
    take_turns_often()
    supervisor = Supervisor()
    configure_logs(config.log_format, supervisor)
    _allow_descriptors()
    listen = listen_of(config)
    if config.coordinator:
        check_before_listening(config)
    place = lead_or_follow(config, listen, _launch_follower, supervisor) if config.coordinator else Alone()
    serving = _Serving(config, place, supervisor, clock)
    if threading.current_thread() is threading.main_thread():
        reload_on_hangup(config, read, serving.change_tp, supervisor)
    try:
        if not config.coordinator:
            check_before_listening(config)
        clock.begin("opening the ports")
        run_server(serving.edge, listen, prepare=serving.prepare, on_ready=serving.on_ready)
    except Exception as error:
        serving.place.end(error)
        raise
    finally:
        serving.close()
    serving.place.end()
    if serving.launched is None:
        # Stopped during startup: a thread that cannot be interrupted may still be compiling.
        flush_logs()
        sys.stdout.flush()
        os._exit(0)
    return 0


def _allow_descriptors() -> None:
    """Raises this process's limit on open descriptors, often 1,024, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _launch_follower(config: ServeConfig, cluster: "Cluster", progress: Callable[[str], None]) -> "Runner":
    from .launch import launch_follower  # not at module level: importing jax takes seconds

    return launch_follower(config, cluster, progress)


class _Serving:
    """A serving process: the edge, and the engine once it is ready."""

    def __init__(self, config: ServeConfig, place: Place, supervisor: Supervisor, clock: StartClock):
        self.place = place
        self._clock = clock
        self.launched: Launched | None = None
        self._config = config
        self._tracer = Tracer() if config.trace else None
        access = new_access(Path(config.tokens) if config.tokens else None)
        queues = OutputQueues()
        self.edge = Edge(queues, access=access, observer=Observer(tracer=self._tracer), supervisor=supervisor)
        self.edge.adapter_roots = adapter_roots(config)
        below = (name.strip() for name in config.weights_below.split(","))
        self.edge.weights_below = tuple(str(Path(name).expanduser()) for name in below if name)
        self._open_things = contextlib.ExitStack()

    def prepare(self) -> Backend:
        """Loads and compiles. Runs in a thread of its own."""
        self._tell("importing jax")
        from ..program.compile_cache import CompileWatch  # not at module level: importing jax takes seconds
        from .launch import launch

        compiles = self._open_things.enter_context(CompileWatch(is_strict=self._config.strict))
        while_starting = self._open_things.enter_context(contextlib.ExitStack())
        while_starting.enter_context(listening(self._clock))
        edge, metrics = self.edge, self.edge.observer.metrics
        launched = launch(
            self._config,
            edge.queues.deliver,
            metrics.record_step,
            self._tell,
            self.place.open(),
            supervisor=edge.supervisor,
        )
        self.launched = launched
        edge.queues.max_dispatch_tokens = max_dispatch_tokens(launched.limits)
        edge.max_samples = launched.limits.max_waiting
        if launched.info.supports_chat:
            self._tell("reading the chat template")
            with contextlib.suppress(InvalidRequestError):  # a template may need more, but is loaded anyway
                launched.tokenizer.render_chat([{"role": "user", "content": ""}])
        _log.info("ready to serve; %s", compiles.counts)
        compiles.ready()
        launched.resharder.compiling = launched.weights.compiling = compiles.expected
        metrics.read_late_compiles = lambda: compiles.counts.num_late_compiles
        self.place.attach(launched.engine)
        self._tell("preparing to serve")
        while_starting.close()
        collect_as_usual()
        gc.collect()
        gc.freeze()  # the objects of startup are permanent, and scanning them takes 0.1 s per full collection
        if (host_cache := launched.engine.host_cache) is not None:
            metrics.read_host_cache = lambda: host_cache.counts
        metrics.read_expert_balance = launched.expert_balance
        metrics.adapters.read_adapters = launched.engine.adapters.list
        metrics.adapters.max_on_device = self._config.num_adapter_slots
        if launched.grammars is not None:
            self._tell("waiting for the processes for constraints")
            launched.grammars.wait_until_ready()
            metrics.read_constraint_counts = launched.grammars.counts
        launched.engine.start(edge.supervisor)
        return Backend(
            launched.engine,
            launched.tokenizer,
            launched.info,
            launched.grammars,
            launched.kv_events,
            launched.embedding,
            launched.weights,
            launched.control,
        )

    def on_ready(self, handle: ServerHandle) -> None:
        """Says that the server accepts requests, and what to do with it. Called on the event loop."""
        self.place.on_ready(handle)
        assert self.launched is not None
        info, load = self.launched.info, self.launched.engine.load()
        address = address_of(self._config.host, handle.port)
        say(
            f"meshserve is ready: {info.name} on {info.num_devices} x {info.device_kind}, tp {info.tp_size}, "
            f"{load.num_pages * info.page_size_tokens:,} tokens of KV cache, at {address}"
        )
        say(f"Try: {_example(self._config, info, address)}")
        _log.info("%s", self._clock.end())

    def change_tp(self, tp: int) -> bool:
        """Changes the TP size of the running server. 0, which is auto, restores the size at startup.

        Returns:
          Whether the server had another size.

        Raises:
          EngineStoppedError: The server is starting, draining or has stopped.
          ConfigError: The process belongs to a cluster, or see `Resharder.change_tp`.
        """
        backend, _ = self.edge.serving()  # raises while it starts, drains or has stopped: nothing is compiled then
        launched = self.launched
        assert launched is not None
        if not self.place.is_alone and tp != self._config.tp:
            raise ConfigError("the TP size of a cluster is fixed at startup; restart all its processes.")
        tp = tp or launched.info.tp_size
        if not launched.resharder.change_tp(tp):
            return False
        self.edge.attach(dataclasses.replace(backend, info=launched.info_at(tp)))
        return True

    def close(self) -> None:
        if self.launched is not None:
            self.launched.close()
        self._open_things.close()
        if self._tracer is not None:
            self._tracer.close()

    def _tell(self, progress: str) -> None:
        """Begins a phase of the start, for whoever asks, for the log and for the timeline."""
        self._clock.begin(progress)
        _log.info("%s", progress)
        self.edge.progress = progress


def _example(config: ServeConfig, info: ModelInfo, address: str) -> str:
    """Returns a command that talks to the server."""
    secrets = (" --tls-ca AUTHORITY.pem" if config.tls_cert else "") + (" --token-file FILE" if config.tokens else "")
    if info.supports_chat:
        return f"meshserve chat --target {address}{secrets}"
    return f"meshserve bench serve --target {address}{secrets}"
