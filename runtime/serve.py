"""`meshserve serve`: listens at once, loads and compiles behind the port, serves until told to stop."""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .config import ServeConfig
from .errors import EngineStoppedError, InvalidRequestError
from .journey import Observer
from .lifecycle import Listen, run_server
from .logs import configure_logs
from .mailbox import Mailroom
from .permissions import new_access
from .profiler import Profiler
from .reload import reload_on_hangup
from .server import Backend, Edge
from .tls import TlsFiles
from .tracing import Tracer

if TYPE_CHECKING:
    from .launch import Launched

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


def serve_config_until_stopped(config: ServeConfig, read: Callable[[], ServeConfig] | None = None) -> int:
    """Serves; returns the exit status. `read` makes the config anew, at SIGHUP: see `reload`.

    Raises:
      MeshserveError: the config, the model, the devices or the address do not allow it, or the engine died.
    """
    configure_logs(config.log_format)
    mailroom = Mailroom()
    tracer = Tracer() if config.trace else None
    access = new_access(Path(config.tokens) if config.tokens else None)
    edge = Edge(mailroom, access=access, observer=Observer(tracer=tracer))
    served: list[Launched] = []
    open_things = contextlib.ExitStack()

    def tell(progress: str) -> None:
        edge.progress = progress

    def prepare() -> Backend:
        tell("starting the devices")
        from .compiles import CompileWatch  # here, because importing jax takes seconds
        from .launch import launch

        compiles = open_things.enter_context(CompileWatch(is_strict=config.strict))
        launched = launch(config, mailroom.deliver, edge.observer.metrics.record_step, tell)
        served.append(launched)
        if launched.info.supports_chat:
            tell("reading the chat template")
            with contextlib.suppress(InvalidRequestError):  # a template may want more than this; it is loaded then, too
                launched.tokenizer.render_chat([{"role": "user", "content": ""}])
        _log.info("ready to serve; %s", compiles.counts)
        compiles.ready()
        launched.resharder.compiling = compiles.expected
        edge.observer.metrics.num_late_compiles = lambda: compiles.counts.num_late_compiles
        launched.engine.start()
        return Backend(launched.engine, launched.tokenizer, launched.info)

    def change_tp(tp: int) -> None:
        if edge.backend is None:
            raise EngineStoppedError("the server is starting; send SIGHUP again once it is ready.")
        (launched,) = served
        if launched.resharder.change_tp(tp):
            edge.attach(dataclasses.replace(edge.backend, info=launched.info_at(tp)))

    if read is not None and threading.current_thread() is threading.main_thread():
        reload_on_hangup(config, read, change_tp)
    try:
        run_server(edge, listen_of(config), prepare=prepare)
    finally:
        for launched in served:
            launched.engine.stop()
        open_things.close()
        if tracer is not None:
            tracer.close()
    if not served:
        # Told to stop while it started: a compiler may be at work in a thread that nobody can end.
        sys.stdout.flush()
        os._exit(0)
    return 0
