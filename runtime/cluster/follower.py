"""A follower process of a cluster:

    bind, health NOT_SERVING -> join process 0, load, compile -> SERVING -> replay until process 0 stops

A follower accepts no requests. Its gRPC port serves only health, its HTTP port its own probes and metrics. SIGTERM asks
process 0 to drain, which then stops all processes; a second SIGTERM exits without waiting. Any failure ends this
process with a nonzero status within `fail_seconds`.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2_grpc

from ..options.serve_config import ServeConfig
from ..server.lifecycle import SERVER_OPTIONS, STOP_GRACE_SECONDS, Listen, bind, on_signals, run_until_done
from ..server.method_permissions import SERVICE_NAME
from ..server.tls import RELOAD_SECONDS, Certificates
from ..telemetry.health_service import HealthService
from ..telemetry.logs import complain, say
from ..telemetry.probe_server import HttpPort
from .follower_metrics import FollowerState, follower_registry
from .joining import follow
from .membership import Membership
from .stream_client import Follower
from .watchdog import FAILED, Watch

if TYPE_CHECKING:
    from ..engine.runner import Runner
    from .preflight import Cluster

# Loads and compiles the follower's runner, reporting progress.
LaunchFollower = Callable[[ServeConfig, "Cluster", Callable[[str], None]], "Runner"]

_POLL_SECONDS = 0.05
_log = logging.getLogger(__name__)


class FollowingProcess:
    """A follower from start to end. `run` runs in the replay thread, everything else on the event loop."""

    def __init__(self, config: ServeConfig, membership: Membership, watch: Watch, launch: LaunchFollower):
        self._config, self._membership, self._watch, self._launch = config, membership, watch, launch
        self._follower: Follower | None = None
        self._num_signals = 0
        self.progress = "the process has started"
        self.is_ready = False
        self._num_late_compiles: Callable[[], int] = lambda: 0
        self.registry = follower_registry(membership, self._state)

    def run(self) -> None:
        """Joins the cluster, prepares the runner and replays. Returns when the replay has ended or failed."""
        try:
            self._follower = follow(self._config, self._membership, self._watch)
            self._replay(self._follower)
        except Exception as error:  # process 0 must be told of any error
            self._watch.fail(f"process {self._membership.process_id} could not start: {error}")

    def _replay(self, follower: Follower) -> None:
        from ..program.compile_cache import CompileWatch
        from .preflight import Cluster  # not at module level: importing jax takes seconds
        from .replay import replay

        def tell(progress: str) -> None:
            self.progress = progress

        with CompileWatch(is_strict=self._config.strict) as compiles:
            cluster = Cluster(self._membership, follower)
            runner = self._launch(self._config, cluster, tell)
            cluster.ready()
            self._watch.ready()
            compiles.ready()
            self._num_late_compiles = lambda: compiles.counts.num_late_compiles
            self.progress, self.is_ready = "", True
            replay(runner, follower, self._watch)

    async def serve(self, listen: Listen) -> None:
        """Serves health, probes and metrics until the process ends."""
        health_service = HealthService((SERVICE_NAME,))
        server = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
        certificates = Certificates(listen.tls) if listen.tls is not None else None
        port = bind(server, listen, certificates)
        http = HttpPort({"/livez": self._alive, "/readyz": self._ready}, self.registry, listen.allowed_hosts)
        http_port = await http.start(listen.host, listen.http_port)
        await server.start()
        say(f"meshserve is a follower; health at {listen.host}:{port}")
        if http_port is not None:
            say(f"meshserve answers probes on http://{listen.host}:{http_port}")
        supervisor = self._watch.supervisor
        if certificates is not None:
            supervisor.every(RELOAD_SECONDS, "certificates", certificates.reload)
        task = supervisor.once("replay", self.run, on_failure=self._watch.fail)
        has_announced = False
        with on_signals(self._on_signal, self._on_hangup):
            while task.is_alive and not self._is_over():
                if self.is_ready and not has_announced:
                    has_announced = True
                    health_service.set_serving(True)
                    say(f"meshserve is ready: process {self._membership.process_id} replays the steps of process 0")
                await asyncio.sleep(_POLL_SECONDS)
            health_service.set_serving(False)
            # Process 0 waits this long for the followers to exit. Clients that watch the health keep calls open.
            await server.stop(min(STOP_GRACE_SECONDS, self._watch.limits.exit_seconds / 2))
            await http.stop()

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._follower is not None:
            self._follower.ask_to_drain()
        else:
            self._num_signals += 1  # process 0 cannot be asked: exit at once

    def _on_hangup(self) -> None:
        _log.warning("SIGHUP changes nothing here: the TP size of a cluster is fixed at startup")

    def _is_over(self) -> bool:
        """Returns whether to exit regardless of the replay thread.

        A thread that is still preparing may be inside a compiler. A thread that replays first finishes the calls that
        process 0 sent before it stopped.
        """
        is_left = self._follower is not None and self._follower.is_over and not self.is_ready
        return is_left or self._watch.failure is not None or self._num_signals > 1

    def _alive(self) -> tuple[int, str]:
        return (200, "following\n") if self._watch.failure is None else (503, f"{self._watch.failure}\n")

    def _ready(self) -> tuple[int, str]:
        failure = self._watch.failure
        return (200, "following\n") if self.is_replaying else (503, f"{failure or self.progress}\n")

    @property
    def is_replaying(self) -> bool:
        return self.is_ready and self._watch.failure is None

    def _state(self) -> FollowerState:
        stats = self._follower.stats if self._follower is not None else None
        return FollowerState(
            is_ready=self.is_replaying,
            num_late_compiles=self._num_late_compiles(),
            stats=stats,
            num_task_failures=self._watch.supervisor.num_failures(),
        )


def follow_until_stopped(
    config: ServeConfig, membership: Membership, watch: Watch, listen: Listen, launch: LaunchFollower
) -> int:
    """Runs a follower and returns its exit status.

    Raises:
      ConfigError: The address cannot be bound.
    """
    process = FollowingProcess(config, membership, watch, launch)
    run_until_done(process.serve(listen))
    if watch.failure is not None:
        complain(watch.failure)
        return FAILED
    return 0
