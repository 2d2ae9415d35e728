"""Finds the processes that serve together and initializes their devices.

A slice of several hosts runs one process on each host. The processes connect to process 0: JAX's distributed runtime at
the coordinator port, the step stream (`stream_server.py`, `stream_client.py`) at a port of its own.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..server.ports import is_taken

JOIN_SECONDS = 300.0  # how long processes wait for each other at startup; pods start one after another
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

    if membership.is_leader:
        _check_free(membership)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would intercept SIGTERM
    try:
        jax.distributed.initialize(
            membership.coordinator,
            membership.num_processes,
            membership.process_id,
            cluster_detection_method="deactivate",  # otherwise it would select devices
            initialization_timeout=int(JOIN_SECONDS),
        )
    except RuntimeError as error:
        raise ClusterError(
            f"JAX could not connect the processes at {membership.coordinator}: {error}. Is the port free and reachable?"
        ) from None


def _check_free(membership: Membership) -> None:
    """Checks that the coordinator port is free, because JAX exits without a message if it cannot bind the port."""
    port = membership.coordinator.rpartition(":")[2]
    if is_taken("", int(port)):
        raise ClusterError(
            f"the processes cannot meet at {membership.coordinator}: the port is in use. Free it, or set another "
            "port in --coordinator of all processes."
        )
