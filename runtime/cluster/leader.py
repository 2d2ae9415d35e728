"""Process 0 of several: what it does beside serving. The others live in `follower.py`."""

import asyncio
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, NoReturn, Protocol

from ..api.config import ServeConfig
from ..api.errors import ConfigError
from ..server.lifecycle import Listen, ServerHandle
from .follower import LaunchFollower, follow_until_stopped
from .joining import lead, new_watch
from .membership import ClusterError, Membership, find_membership
from .stream_server import Leader
from .watchdog import FAILED, Watch

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .preflight import Cluster

_FLUSH_SECONDS = 0.2  # for the last words to reach the followers

_log = logging.getLogger(__name__)


class Place(Protocol):
    """A serving process's place among others."""

    is_alone: bool

    def open(self) -> "Cluster | None":
        """The others, once all have come; see `launch`."""

    def attach(self, engine: "Engine") -> None:
        """Everything is ready, but for the engine to be started."""

    def on_ready(self, handle: ServerHandle) -> None:
        """On the event loop, when requests are taken."""

    def end(self, error: Exception | None = None) -> None:
        """The server has ended, in order or with an error. With others, so does the process, here."""


class Alone:
    """The place of a process on its own."""

    is_alone = True

    def open(self) -> None:
        pass

    def attach(self, engine: "Engine") -> None:
        pass

    def on_ready(self, handle: ServerHandle) -> None:
        pass

    def end(self, error: Exception | None = None) -> None:
        pass


def lead_or_follow(config: ServeConfig, listen: Listen, launch: LaunchFollower) -> Place:
    """This process's place in the cluster that the config names. A follower does not return.

    Raises:
      ConfigError: nothing says which cluster this is.
    """
    try:
        membership = find_membership(config.coordinator, config.num_processes, config.process_id)
    except ClusterError as error:
        raise ConfigError(str(error)) from None
    if membership is None:
        return Alone()
    watch = new_watch(config)
    watch.start()
    if membership.is_leader:
        return LeadingProcess(config, membership, watch)
    _exit(follow_until_stopped(config, membership, watch, listen, launch))


class LeadingProcess:
    """Process 0 of several: the step stream beside the server."""

    is_alone = False

    def __init__(self, config: ServeConfig, membership: Membership, watch: Watch):
        self._config, self._membership, self._watch = config, membership, watch
        self._leader: Leader | None = None
        self._cluster: Cluster | None = None

    def open(self) -> "Cluster":
        """Waits until every follower has joined.

        Raises:
          ConfigError, ClusterError: as `joining.lead`; a follower did not come.
        """
        from .preflight import Cluster  # here, because importing jax takes seconds

        self._leader = lead(self._config, self._membership, self._watch)
        self._leader.wait_for_followers()
        self._cluster = Cluster(self._membership, self._leader)
        return self._cluster

    def attach(self, engine: "Engine") -> None:
        """From now on the followers do what its runner does, and its requests end when something fails."""
        from .replay import LeadingRunner

        assert self._leader is not None and self._cluster is not None
        self._cluster.ready()
        self._watch.ready()
        engine.runner = LeadingRunner(engine.runner, self._leader, self._watch)
        self._watch.listen(engine.fail)
        self._watch.look(lambda now: engine.failure)

    def on_ready(self, handle: ServerHandle) -> None:
        """A follower that is told to stop drains this server."""
        assert self._leader is not None
        loop = asyncio.get_running_loop()

        def drain() -> None:
            loop.call_soon_threadsafe(handle.drain, None)

        self._leader.on_drain = drain

    def end(self, error: Exception | None = None) -> NoReturn:
        if error is not None:
            self._watch.fail(str(error))
            print(f"meshserve: {error}", file=sys.stderr)
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
    """At once: jax's own way out waits for peers that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
