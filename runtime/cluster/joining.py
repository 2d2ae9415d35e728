"""Sets up a process's part in its cluster from a `ServeConfig`: watch, guard and step stream."""

from pathlib import Path

from meshserve.sharding.guarded_files import read_guarded

from ..api.errors import ConfigError
from ..api.loopback import is_loopback
from ..options.serve_config import ServeConfig
from ..server.tls import RELOAD_SECONDS, Certificates, TlsFiles, channel_credentials
from ..supervision.supervisor import Supervisor
from .membership import Membership
from .steps import Security
from .stream_client import Follower
from .stream_server import Leader
from .watchdog import Limits, Watch
from .watchdog_process import Guard

_MAX_TOKEN_BYTES = 4_096
_GUARD_SHARE = 0.6  # share of fail_seconds; more than the half after which the other processes notice the silence


def new_watch(config: ServeConfig, supervisor: Supervisor) -> Watch:
    """Creates a watch, not yet started, with a guard that kills this process if it is stopped or stuck."""
    watch = Watch(Limits(config.fail_seconds), supervisor)
    guard = Guard(_GUARD_SHARE * config.fail_seconds)

    def beat(now: float) -> None:
        if watch.is_ready:
            guard.beat()

    watch.look(beat)
    return watch


def lead(config: ServeConfig, membership: Membership, watch: Watch) -> Leader:
    """Opens the step stream of process 0.

    Raises:
      ConfigError: The stream would be open to everyone, or its files cannot be read.
      ClusterError: The port cannot be bound.
    """
    security = _security(config, membership, watch)
    return Leader(f"{membership.listening_host}:{config.step_port}", membership.num_processes, watch, security)


def follow(config: ServeConfig, membership: Membership, watch: Watch) -> Follower:
    """Joins the step stream of process 0.

    Raises:
      ConfigError: See `lead`.
      ClusterError: Process 0 cannot be reached.
    """
    address = f"{membership.host}:{config.step_port}"
    return Follower(address, membership.process_id, watch, _security(config, membership, watch))


def _security(config: ServeConfig, membership: Membership, watch: Watch) -> Security:
    token = ""
    if config.cluster_token:
        try:
            content = read_guarded(config.cluster_token, _MAX_TOKEN_BYTES, is_trusted=True)
            token = content.data.decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--cluster-token {config.cluster_token} cannot be read: {error}.") from None
        if not token:
            raise ConfigError(f"--cluster-token {config.cluster_token} is empty; it must contain a secret on one line.")
    if config.cluster_ca:
        files = TlsFiles(certificate=Path(config.tls_cert), key=Path(config.tls_key), client_ca=Path(config.cluster_ca))
        certificates = Certificates(files)
        watch.supervisor.every(RELOAD_SECONDS, "step-stream-certificates", certificates.reload)
        channel = channel_credentials(certificates.content)
        return Security(server=certificates.credentials(), channel=channel, token=token)
    if not token and not config.allow_insecure and not is_loopback(membership.host):
        raise ConfigError(
            f"process 0 is {membership.host!r}, which other machines can reach, and its step stream is not protected. "
            "Set --cluster-token, or --cluster-ca for mutual TLS, or --allow-insecure in a closed network."
        )
    return Security(token=token)
