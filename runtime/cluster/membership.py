"""Finds the processes that serve together and initializes their devices.

A slice of several hosts runs one process on each host. The processes connect to process 0: JAX's distributed runtime at
the coordinator port, the step stream (`stream_server.py`, `stream_client.py`) at a port of its own.
"""

import functools
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.loopback import is_loopback
from ..server.ports import is_taken

JOIN_SECONDS = 300.0  # how long processes wait for each other at startup; pods start one after another
PREPARE_SECONDS = 3600.0  # how long they wait for each other's downloads, weights and compilers
_LWS_COORDINATOR_PORT = 50060
_AUTO = "auto"

_log = logging.getLogger(__name__)


class ClusterError(RuntimeError):
    """The processes cannot serve together, or one of them has failed. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A process's place in its cluster."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which schedules and accepts requests. The other processes are followers."""
        return self.process_id == 0

    @property
    def host(self) -> str:
        """Host of process 0."""
        return self.coordinator.rpartition(":")[0]

    @functools.cached_property
    def listening_host(self) -> str:
        """Host on which process 0 listens for the others: `host`, or "[::]" (all addresses) if that would not do.

        It would not do if no address of this machine stands behind the name, as with network address translation, or
        only a loopback one, as where /etc/hosts maps a machine's own name to 127.0.1.1.
        """
        if is_loopback(self.host) or _is_reachable_here(self.host.strip("[]")):
            return self.host
        _log.warning(
            "process 0 listens on all addresses: %r, by which --coordinator names it, leads to none of this machine "
            "that others can reach. Name such an address, or keep strangers from the ports by a firewall.",
            self.host,
        )
        return "[::]"


def _is_reachable_here(host: str) -> bool:
    """Returns whether a name leads to an address of this machine that other machines may reach."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not is_loopback(str(address[0])) and _is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    """Returns whether an address is one of this machine's, that is, whether a socket can be bound to it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def find_membership(
    coordinator: str, num_processes: int, process_id: int, environment: Mapping[str, str] = os.environ
) -> Membership | None:
    """Determines the cluster from flags or from the orchestrator. Returns None for a single process.

    Args:
      coordinator: HOST:PORT of process 0, used with the next two arguments. "auto" uses LeaderWorkerSet's variables or
        what JAX detects (Cloud TPU, GKE, Slurm, OpenMPI, JobSet). Empty means a single process.
      num_processes: Number of processes in the cluster.
      process_id: Index of this process.
      environment: Environment variables.

    Raises:
      ClusterError: `coordinator` is "auto" but no cluster was detected, or the process index is out of range.
    """
    if not coordinator:
        return None
    if coordinator != _AUTO:
        found = Membership(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
    else:
        found = _of_leader_worker_set(environment) or _known_to_jax()
    if not 0 <= found.process_id < found.num_processes:
        raise ClusterError(
            f"process id {found.process_id} is out of range: {coordinator!r} has {found.num_processes} processes."
        )
    _log.info("process %d of %d; process 0 is %s", found.process_id, found.num_processes, found.coordinator)
    return found if found.num_processes > 1 else None


def _of_leader_worker_set(environment: Mapping[str, str]) -> Membership | None:
    """Returns the membership set by LeaderWorkerSet.

    On TPUs, JAX's detection is used instead, because the set then also describes how to lay out the slice.
    """
    names = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    if "TPU_WORKER_HOSTNAMES" in environment or not all(name in environment for name in names):
        return None
    address, size, index = (environment[name] for name in names)
    return Membership(coordinator=f"{address}:{_LWS_COORDINATOR_PORT}", num_processes=int(size), process_id=int(index))


def _known_to_jax() -> Membership:
    # This API is private, but `jax.distributed.initialize` alone would give each Slurm or OpenMPI task a single device.
    from jax._src.clusters import ClusterEnv

    coordinator, num_processes, process_id, _ = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(JOIN_SECONDS)
    )
    if coordinator is None or num_processes is None or process_id is None:
        raise ClusterError(
            "coordinator is 'auto', but no cluster was found: not LeaderWorkerSet, Cloud TPU, GKE, JobSet, Slurm "
            "or OpenMPI. Pass --coordinator HOST:PORT --num-processes N --process-id I."
        )
    return Membership(coordinator=coordinator, num_processes=num_processes, process_id=process_id)


def start_devices(membership: Membership) -> None:
    """Initializes JAX's distributed runtime, so that all processes see each other's devices.

    Must be called before any other use of JAX devices. Returns when every process has called it.

    Raises:
      ClusterError: A process did not do so within `JOIN_SECONDS`, or the coordinator port is in use.
    """
    import jax  # not at module level: importing it takes seconds

    bind_address = _free_address(membership) if membership.is_leader else None
    _reach_directly(membership.coordinator.rpartition(":")[0].strip("[]"))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would intercept SIGTERM
    try:
        jax.distributed.initialize(
            membership.coordinator,
            membership.num_processes,
            membership.process_id,
            cluster_detection_method="deactivate",  # otherwise it would select devices
            coordinator_bind_address=bind_address,
            initialization_timeout=int(JOIN_SECONDS),
        )
    except RuntimeError as error:
        raise ClusterError(
            f"JAX could not connect the processes at {membership.coordinator}: {error}. Is the port free and reachable?"
        ) from None


def _reach_directly(host: str) -> None:
    """Keeps gRPC within JAX, which takes no options, from asking the environment's proxy for process 0."""
    before = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")  # gRPC reads the second without the first
    os.environ["no_grpc_proxy"] = f"{before},{host}" if before else host


def _free_address(membership: Membership) -> str:
    """Returns the HOST:PORT to bind, after checking that it is free: JAX exits without a message if it cannot bind it.

    By default JAX would bind all addresses, and whoever reaches its coordinator can end every process.

    Raises:
      ClusterError: The port is in use.
    """
    host, port = membership.listening_host, membership.coordinator.rpartition(":")[2]
    if is_taken(host.strip("[]"), int(port)):
        raise ClusterError(
            f"the processes cannot meet at {membership.coordinator}: the port is in use. Free it, or set another "
            "port in --coordinator of all processes."
        )
    return f"{host}:{port}"
