"""Which processes serve together, and the start of their devices.

A slice of several hosts runs one process on each. They meet at the address of process 0: jax's own processes at the
coordinator's port, ours at the port of the step stream (`leading.py`, `following.py`).
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..server.ports import is_taken

JOIN_SECONDS = 300.0  # how long processes wait for each other at the start: pods come up one by one
_LWS_COORDINATOR_PORT = 50060
_AUTO = "auto"

_log = logging.getLogger(__name__)


class ClusterError(RuntimeError):
    """The processes cannot serve together, or one of them has failed. The text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What a process knows of its cluster."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int

    @property
    def is_leader(self) -> bool:
        """It decides and takes the requests; the others are its followers."""
        return self.process_id == 0

    @property
    def host(self) -> str:
        """Of process 0."""
        return self.coordinator.rpartition(":")[0]


def find_membership(
    coordinator: str, num_processes: int, process_id: int, environment: Mapping[str, str] = os.environ
) -> Membership | None:
    """The cluster that flags or the orchestrator name; None for a process on its own.

    Args:
      coordinator: HOST:PORT, with the other two; "auto" asks LeaderWorkerSet, then whatever jax knows (Cloud TPU, GKE,
        Slurm, OpenMPI, JobSet); empty is a process on its own.

    Raises:
      ClusterError: "auto", and nothing here names a cluster.
    """
    if not coordinator:
        return None
    if coordinator != _AUTO:
        found = Membership(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
    else:
        found = _of_leader_worker_set(environment) or _known_to_jax()
    if not 0 <= found.process_id < found.num_processes:
        raise ClusterError(f"this process is number {found.process_id} of {found.num_processes}; see {coordinator!r}.")
    _log.info("process %d of %d; process 0 is %s", found.process_id, found.num_processes, found.coordinator)
    return found if found.num_processes > 1 else None


def _of_leader_worker_set(environment: Mapping[str, str]) -> Membership | None:
    """On TPUs the set also says what jax needs to lay out the slice; then jax is asked."""
    names = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    if "TPU_WORKER_HOSTNAMES" in environment or not all(name in environment for name in names):
        return None
    address, size, index = (environment[name] for name in names)
    return Membership(coordinator=f"{address}:{_LWS_COORDINATOR_PORT}", num_processes=int(size), process_id=int(index))


def _known_to_jax() -> Membership:
    # Not public, but `jax.distributed.initialize` alone would give each Slurm or OpenMPI task a single device.
    from jax._src.clusters import ClusterEnv

    coordinator, num_processes, process_id, _ = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(JOIN_SECONDS)
    )
    if coordinator is None or num_processes is None or process_id is None:
        raise ClusterError(
            "coordinator is 'auto', but nothing here says which processes serve together: neither LeaderWorkerSet nor "
            "Cloud TPU, GKE, Slurm or OpenMPI. Pass --coordinator HOST:PORT --num-processes N --process-id I."
        )
    return Membership(coordinator=coordinator, num_processes=num_processes, process_id=process_id)


def start_devices(membership: Membership) -> None:
    """Makes the devices of all processes visible to each other. Call it before anything else asks jax for devices.

    Returns when every process has come so far.

    Raises:
      ClusterError: they did not, within `JOIN_SECONDS`, or the coordinator's port is in use.
    """
    import jax  # here, because it takes seconds

    if membership.is_leader:
        _check_free(membership)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from the server
    try:
        jax.distributed.initialize(
            membership.coordinator,
            membership.num_processes,
            membership.process_id,
            cluster_detection_method="deactivate",  # or it would pick devices
            initialization_timeout=int(JOIN_SECONDS),
        )
    except RuntimeError as error:
        raise ClusterError(
            f"jax's processes did not meet at {membership.coordinator}: {error}. Is the port free there, and open?"
        ) from None


def _check_free(membership: Membership) -> None:
    """jax ends the process, without a word, where it cannot listen at the coordinator's port."""
    port = membership.coordinator.rpartition(":")[2]
    if is_taken("", int(port)):
        raise ClusterError(
            f"jax's processes cannot meet at {membership.coordinator}: the port is in use. Free it, or give all "
            "processes another in --coordinator."
        )
