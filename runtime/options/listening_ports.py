"""The ports that a server's options bind, all in one list, so that mistakes are found before anything is loaded."""

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from ..api.errors import ConfigError

if TYPE_CHECKING:
    from .serve_config import ServeConfig

_EVERY_ADDRESS = ("", "0.0.0.0", "::", "*")


class ListeningPort(NamedTuple):
    """A port that an option names. Port 0, for which the system chooses a free one, is not among them."""

    option: str
    host: str
    port: int


def listening_ports(config: "ServeConfig") -> list[ListeningPort]:
    """Returns the ports at which the process will answer callers, in the order of their options."""
    # The other processes of a cluster only tell their health.
    names = ("port", "http_port", "gateway_port", "openai_port") if config.process_id == 0 else ("port", "http_port")
    found = [ListeningPort(name, config.host, getattr(config, name)) for name in names]
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        kind, _, address = getattr(config, name).partition("://")
        host, _, port = address.rpartition(":")
        if kind == "tcp" and port.isdigit() and config.process_id == 0:
            found.append(ListeningPort(name, host.strip("[]"), int(port)))
    return [each for each in found if each.port > 0]


def _cluster_ports(config: "ServeConfig") -> list[ListeningPort]:
    """Returns the ports of process 0 at which the other processes of its cluster meet."""
    host, _, port = config.coordinator.rpartition(":")
    if not host or not port.isdigit() or config.process_id != 0:
        return []
    host = host.strip("[]")
    return [ListeningPort("coordinator", host, int(port)), ListeningPort("step_port", host, config.step_port)]


def check_distinct(config: "ServeConfig") -> None:
    """Checks that no two options name the same port of the same address.

    Raises:
      ConfigError: Two options do.
    """
    for one, other in combinations([*listening_ports(config), *_cluster_ports(config)], 2):
        is_same_host = one.host == other.host or one.host in _EVERY_ADDRESS or other.host in _EVERY_ADDRESS
        if one.port == other.port > 0 and is_same_host:
            raise ConfigError(
                f"{one.option} and {other.option} are both port {one.port}; each must be a port of its own. Change "
                f"{other.option}."
            )
