"""`meshserve serve`: listens at once, loads and compiles behind the port, serves until told to stop."""

import contextlib
import logging
import os
import sys
from pathlib import Path

from .config import ServeConfig
from .errors import InvalidRequestError
from .journey import Observer
from .lifecycle import Listen, run_server
from .logs import configure_logs
from .mailbox import Mailroom
from .permissions import new_access
from .profiler import Profiler
from .server import Backend, Edge
from .tls import TlsFiles
from .tracing import Tracer

_log = logging.getLogger(__name__)


def listen_of(config: ServeConfig) -> Listen:
    """Where and how the config wants to listen."""
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
        gateway_port=config.gateway_port if config.gateway_port >= 0 else None,
        drain_seconds=config.drain_seconds,
        profiler=Profiler(Path(config.profile_dir)) if config.profile_dir else None,
    )


def serve_config_until_stopped(config: ServeConfig) -> int:
    """Serves; returns the exit status.

    Raises:
      MeshserveError: the config, the model, the devices or the address do not allow it, or the engine died.
    """
    configure_logs(config.log_format)
    mailroom = Mailroom()
    tracer = Tracer() if config.trace else None
    access = new_access(Path(config.tokens) if config.tokens else None)
    edge = Edge(mailroom, access=access, observer=Observer(tracer=tracer))
    engines = []
    open_things = contextlib.ExitStack()

    def tell(progress: str) -> None:
        edge.progress = progress

    def prepare() -> Backend:
        tell("starting the devices")
        from .compiles import CompileWatch  # here, because importing jax takes seconds
        from .launch import launch

        compiles = open_things.enter_context(CompileWatch(is_strict=config.strict))
        launched = launch(config, mailroom.deliver, edge.observer.metrics.record_step, tell)
        engines.append(launched.engine)
        if launched.info.supports_chat:
            tell("reading the chat template")
            with contextlib.suppress(InvalidRequestError):  # a template may want more than this; it is loaded then, too
                launched.tokenizer.render_chat([{"role": "user", "content": ""}])
        _log.info("ready to serve; %s", compiles.counts)
        compiles.ready()
        edge.observer.metrics.num_late_compiles = lambda: compiles.counts.num_late_compiles
        launched.engine.start()
        return Backend(launched.engine, launched.tokenizer, launched.info)

    try:
        run_server(edge, listen_of(config), prepare=prepare)
    finally:
        for engine in engines:
            engine.stop()
        open_things.close()
        if tracer is not None:
            tracer.close()
    if not engines:
        # Told to stop while it started: a compiler may be at work in a thread that nobody can end.
        sys.stdout.flush()
        os._exit(0)
    return 0
