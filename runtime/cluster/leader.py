"""Process 0 of a cluster: its tasks beyond serving. The other processes run `follower.py`."""

import asyncio
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, NoReturn, Protocol

from ..api.errors import ConfigError
from ..options.serve_config import ServeConfig
from ..server.lifecycle import Listen, ServerHandle
from ..supervision.supervisor import Supervisor
from ..telemetry.logs import complain, flush_logs
from .follower import LaunchFollower, follow_until_stopped
from .joining import lead, new_watch
from .membership import ClusterError, Membership, find_membership
from .stream_server import Leader
from .watchdog import FAILED, Watch

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .preflight import Cluster

_FLUSH_SECONDS = 0.2  # time for the failure message to reach the followers

_log = logging.getLogger(__name__)


class Place(Protocol):
    """The role of a serving process: alone, or process 0 of a cluster."""

    is_alone: bool

    def open(self) -> "Cluster | None":
        """Returns the cluster once all processes have joined, or None for a single process; see `launch`."""

    def attach(self, engine: "Engine") -> None:
        """Connects the engine. Called when all is ready except that the engine has not been started."""

    def on_ready(self, handle: ServerHandle) -> None:
        """Called on the event loop when the server accepts requests."""

    def end(self, error: Exception | None = None) -> None:
        """Called when the server has ended, normally or with an error. In a cluster, this also exits the process."""


class Alone:
    """The role of a single process."""

    is_alone = True

    def open(self) -> None:
        pass

    def attach(self, engine: "Engine") -> None:
        pass

    def on_ready(self, handle: ServerHandle) -> None:
        pass

    def end(self, error: Exception | None = None) -> None:
        pass


def lead_or_follow(config: ServeConfig, listen: Listen, launch: LaunchFollower, supervisor: Supervisor) -> Place:
    """Returns this process's role in the configured cluster. Does not return in a follower.

    Raises:
      ConfigError: The cluster cannot be determined.
    """
    try:
        membership = find_membership(config.coordinator, config.num_processes, config.process_id)
    except ClusterError as error:
        raise ConfigError(str(error)) from None
    if membership is None:
        return Alone()
    watch = new_watch(config, supervisor)
    watch.start()
    if membership.is_leader:
        return LeadingProcess(config, membership, watch)
    _exit(follow_until_stopped(config, membership, watch, listen, launch))


class LeadingProcess:
    """Process 0 of a cluster, with the step stream beside the server."""

    is_alone = False

    def __init__(self, config: ServeConfig, membership: Membership, watch: Watch):
        self._config, self._membership, self._watch = config, membership, watch
        self._leader: Leader | None = None
        self._cluster: Cluster | None = None

    def open(self) -> "Cluster":
        """Waits until every follower has joined.

        Raises:
          ConfigError: See `joining.lead`.
          ClusterError: See `joining.lead`; or a follower did not join in time.
        """
        from .preflight import Cluster  # not at module level: importing jax takes seconds

        self._leader = lead(self._config, self._membership, self._watch)
        self._leader.wait_for_followers()
        self._cluster = Cluster(self._membership, self._leader)
        return self._cluster

    def attach(self, engine: "Engine") -> None:
        """Makes the followers replay the engine's runner, and fails the engine when the cluster fails."""
        from .replay import LeadingRunner

        assert self._leader is not None and self._cluster is not None
        self._cluster.ready()
        self._watch.ready()
        engine.runner = LeadingRunner(engine.runner, self._leader, self._watch)
        self._watch.listen(engine.fail)
        self._watch.look(lambda now: engine.failure)

    def on_ready(self, handle: ServerHandle) -> None:
        """Lets a follower that is told to stop drain this server."""
        assert self._leader is not None
        loop = asyncio.get_running_loop()

        def drain() -> None:
            loop.call_soon_threadsafe(handle.drain, None)

        self._leader.on_drain = drain

    def end(self, error: Exception | None = None) -> NoReturn:
        if error is not None:
            self._watch.fail(str(error))
            complain(str(error))
            time.sleep(_FLUSH_SECONDS)
            _exit(FAILED)
        if self._leader is not None:
            stats = self._leader.stats
            if stats.num_acknowledged:
                _log.info(
                    "%d calls; %.0f us each to send, acknowledged %.0f us after our own result; the "
                    "longest took %.2f s",
                    stats.num_calls,
                    stats.send_seconds / stats.num_calls * 1e6,
                    stats.lag_seconds / stats.num_acknowledged * 1e6,
                    stats.longest_seconds,
                )
            self._leader.stop()
        _exit(0)


def _exit(status: int) -> NoReturn:
    """Exits immediately, because JAX's shutdown waits for processes that may have exited."""
    flush_logs()
    sys.stdout.flush()
    os._exit(status)
