"""From a `ServeConfig` to a process's place in its cluster: watch, guard, step stream."""

from pathlib import Path

from ..api.config import ServeConfig
from ..api.errors import ConfigError
from ..server.lifecycle import is_loopback
from ..server.tls import TlsFiles, mutual_credentials
from .membership import Membership
from .steps import Security
from .stream_client import Follower
from .stream_server import Leader
from .watchdog import Limits, Watch
from .watchdog_process import Guard

_GUARD_SHARE = 0.6  # of fail_seconds: after the others have noticed the silence, at half of it


def new_watch(config: ServeConfig) -> Watch:
    """A watch, not yet started, and a guard beside it that ends this process should it be stopped or stuck."""
    watch = Watch(Limits(config.fail_seconds))
    guard = Guard(_GUARD_SHARE * config.fail_seconds)

    def beat(now: float) -> None:
        if watch.is_ready:
            guard.beat()

    watch.look(beat)
    return watch


def lead(config: ServeConfig, membership: Membership, watch: Watch) -> Leader:
    """Opens the step stream of process 0.

    Raises:
      ConfigError: it would be open to everybody, or its files cannot be read.
      ClusterError: the port cannot be bound.
    """
    security = _security(config, membership)
    host = membership.host if is_loopback(membership.host) else "[::]"
    return Leader(f"{host}:{config.step_port}", membership.num_processes, watch, security)


def follow(config: ServeConfig, membership: Membership, watch: Watch) -> Follower:
    """Joins process 0.

    Raises:
      ConfigError: as `lead`.
      ClusterError: process 0 cannot be reached.
    """
    address = f"{membership.host}:{config.step_port}"
    return Follower(address, membership.process_id, watch, _security(config, membership))


def _security(config: ServeConfig, membership: Membership) -> Security:
    token = ""
    if config.cluster_token:
        try:
            token = Path(config.cluster_token).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--cluster-token {config.cluster_token} cannot be read: {error}.") from None
        if not token:
            raise ConfigError(f"--cluster-token {config.cluster_token} is empty; it holds a secret of one line.")
    if config.cluster_ca:
        files = TlsFiles(certificate=Path(config.tls_cert), key=Path(config.tls_key), client_ca=Path(config.cluster_ca))
        server, channel = mutual_credentials(files)
        return Security(server=server, channel=channel, token=token)
    if not token and not config.allow_insecure and not is_loopback(membership.host):
        raise ConfigError(
            f"process 0 is {membership.host!r}, which other machines can reach, and its step stream takes anybody. "
            "Give --cluster-token, or --cluster-ca for mutual TLS, or set --allow-insecure in a closed network."
        )
    return Security(token=token)
