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
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.engine_api import ModelInfo
from ..api.errors import ConfigError, InvalidRequestError
from ..cluster.leader import Alone, Place, lead_or_follow
from ..gateway.gateway_child import GatewayChild, gateway_options
from ..gateway.vllm_native_service import SERVICES as GATEWAY_SERVICES
from ..gateway.vllm_service import add_gateway
from ..options.serve_config import ServeConfig
from ..retrieval.retrieval_service import RetrievalEdge
from ..server.inference_service import Backend
from ..server.lifecycle import Listen, ServerHandle, run_server
from ..server.method_permissions import new_access
from ..server.output_queue import OutputQueues, max_dispatch_tokens
from ..server.ports import address_of
from ..server.tls import TlsFiles
from ..telemetry.logs import configure_logs, flush_logs, say
from ..telemetry.profiler import Profiler
from ..telemetry.request_log import Observer
from ..telemetry.tracing import Tracer
from .checks import check_before_listening
from .interpreter import take_turns_often
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
    return Listen(
        host=config.host,
        port=config.port,
        allow_insecure=config.allow_insecure,
        tls=tls,
        http_port=config.http_port if config.http_port >= 0 else None,
        gateway_port=max(config.gateway_port, 0) if max(config.gateway_port, config.openai_port) >= 0 else None,
        add_gateway=add_gateway,
        gateway_services=GATEWAY_SERVICES,
        drain_seconds=config.drain_seconds,
        profiler=Profiler(Path(config.profile_dir)) if config.profile_dir else None,
    )


def serve_config_until_stopped(config: ServeConfig, read: Callable[[], ServeConfig] | None = None) -> int:
    """Serves until told to stop, and returns the exit status.

    In a cluster, process 0 serves and the other processes follow it. These processes exit instead of returning, because
    JAX's shutdown waits for processes that may have exited.

    Args:
      config: The options.
      read: Rereads the options at SIGHUP, see `reload_on_hangup`; None ignores the signal.

    Raises:
      MeshserveError: The options, the model, the devices or the address do not allow it, or the engine failed.
    """
    take_turns_often()
    configure_logs(config.log_format, is_queued=True)
    _allow_descriptors()
    listen = listen_of(config)
    if config.coordinator:
        check_before_listening(config)
    serving = _Serving(config, lead_or_follow(config, listen, _launch_follower) if config.coordinator else Alone())
    if read is not None and threading.current_thread() is threading.main_thread():
        reload_on_hangup(config, read, serving.change_tp)
    try:
        if not config.coordinator:
            check_before_listening(config)
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

    def __init__(self, config: ServeConfig, place: Place):
        self.place = place
        self.launched: Launched | None = None
        self._config = config
        options = gateway_options(config)
        self._gateway = GatewayChild(options) if options is not None else None
        self._tracer = Tracer() if config.trace else None
        access = new_access(Path(config.tokens) if config.tokens else None)
        queues = OutputQueues()
        self.edge = RetrievalEdge(queues, access=access, observer=Observer(tracer=self._tracer))
        self._open_things = contextlib.ExitStack()

    def prepare(self) -> Backend:
        """Loads and compiles. Runs in a thread of its own."""
        self._tell("starting the devices")
        from ..compilation.compile_cache import CompileWatch  # not at module level: importing jax takes seconds
        from .launch import launch

        compiles = self._open_things.enter_context(CompileWatch(is_strict=self._config.strict))
        edge, metrics = self.edge, self.edge.observer.metrics
        launched = launch(self._config, edge.queues.deliver, metrics.record_step, self._tell, self.place.open())
        self.launched = launched
        edge.queues.max_dispatch_tokens = max_dispatch_tokens(launched.limits)
        edge.max_samples = launched.limits.max_waiting
        if launched.info.supports_chat:
            self._tell("reading the chat template")
            with contextlib.suppress(InvalidRequestError):  # a template may need more, but is loaded anyway
                launched.tokenizer.render_chat([{"role": "user", "content": ""}])
        _log.info("ready to serve; %s", compiles.counts)
        compiles.ready()
        launched.resharder.compiling = compiles.expected
        metrics.read_late_compiles = lambda: compiles.counts.num_late_compiles
        self.place.attach(launched.engine)
        gc.collect()
        gc.freeze()  # the objects of startup are permanent, and scanning them takes 0.1 s per full collection
        if (host_cache := launched.engine.host_cache) is not None:
            metrics.read_host_cache = lambda: host_cache.counts
        metrics.read_expert_balance = launched.expert_balance
        if launched.grammars is not None:
            launched.grammars.wait_until_ready()
            metrics.read_constraint_counts = launched.grammars.counts
        launched.engine.start()
        return Backend(launched.engine, launched.tokenizer, launched.info, launched.grammars, launched.kv_events)

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
        if self._gateway is not None and handle.gateway_port is not None:
            if info.supports_text:
                self._gateway.start(handle.gateway_port, info.name, self.launched.tokenizer.directory)
            else:
                _log.error("--openai-port serves nothing: it needs text, and the model has no tokenizer.json")

    def change_tp(self, tp: int) -> None:
        """Changes the TP size of the running server. 0, which is auto, restores the size at startup.

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
        if launched.resharder.change_tp(tp):
            self.edge.attach(dataclasses.replace(backend, info=launched.info_at(tp)))

    def close(self) -> None:
        if self._gateway is not None:
            self._gateway.stop()
        if self.launched is not None:
            self.launched.close()
        self._open_things.close()
        if self._tracer is not None:
            self._tracer.close()

    def _tell(self, progress: str) -> None:
        self.edge.progress = progress


def _example(config: ServeConfig, info: ModelInfo, address: str) -> str:
    """Returns a command that talks to the server."""
    secrets = (" --tls-ca AUTHORITY.pem" if config.tls_cert else "") + (" --token-file FILE" if config.tokens else "")
    if info.supports_chat:
        return f"meshserve chat --target {address}{secrets}"
    return f"meshserve bench serve --target {address}{secrets}"
