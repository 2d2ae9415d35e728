"""Opens and tests the P2P all-reduce of a mesh's GPUs before it is used."""

import dataclasses
import logging

import jax
from jax.sharding import Mesh

from meshserve.kernels import p2p as p2p_kernels
from meshserve.kernels.cuda.build import KernelBuildError
from meshserve.kernels.p2p import P2PGroup, check
from meshserve.kernels.p2p.sm90 import P2PError, timeouts
from meshserve.sharding.collectives import p2p_max_bytes
from meshserve.sharding.mesh import TENSOR_AXIS

from ..api.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class P2PFindings:
    """What was learned about P2P at startup. A running server keeps it, because testing needs idle devices."""

    wrong_sums: str | None = None  # how P2P sums were wrong; None if they were right or have not been tested


def open_named(mesh: Mesh, name: str) -> P2PGroup:
    """Opens P2P memory because the options ask for it.

    Raises:
      ValueError: The devices cannot access each other's memory.
    """
    try:
        return _opened(mesh, name)
    except (P2PError, KernelBuildError) as error:
        raise ValueError(f"--all-reduce {name} cannot serve here: {error}. Use --all-reduce xla.") from None


def open_tested(mesh: Mesh, name: str, findings: P2PFindings | None) -> tuple[P2PGroup | None, P2PFindings]:
    """Opens P2P memory if it works; else logs why it does not and returns no group.

    Args:
      mesh: The devices.
      name: The implementation.
      findings: What an earlier test learned. None at startup, when the devices are idle: the sums are then tested.

    Raises:
      ConfigError: The devices stopped during the test, so no program can run on them any more.
    """
    known = findings or P2PFindings()
    if known.wrong_sums is not None:
        return None, known
    try:
        group = _opened(mesh, name)
    except (P2PError, KernelBuildError) as error:
        _log.warning("the GPUs have no P2P access; using XLA's all-reduce, which is slower: %s", error)
        return None, known
    if findings is None:
        known = P2PFindings(wrong_sums=_wrong_sums(mesh, group, name))
    return (group if known.wrong_sums is None else None), known


def absent_group(num_devices: int) -> P2PGroup:
    """Returns the group of devices that are not present, for compiling programs."""
    return P2PGroup(axis=TENSOR_AXIS, ordinals=tuple(range(num_devices)))


def _opened(mesh: Mesh, name: str) -> P2PGroup:
    return p2p_kernels.IMPLEMENTATIONS[name].open_group(TENSOR_AXIS, list(mesh.devices.flat))


def _wrong_sums(mesh: Mesh, group: P2PGroup, name: str) -> str | None:
    """Tests P2P sums; returns and logs how they are wrong, or None if they are right. Raises as `open_tested`."""
    operations = p2p_kernels.IMPLEMENTATIONS[name].operations
    try:
        num_wrong = check.num_wrong_elements(mesh, group, operations, p2p_max_bytes(mesh.size))
    except jax.errors.JaxRuntimeError as error:
        reason = timeouts() or str(error)
        raise ConfigError(f"the P2P all-reduce of the GPUs failed: {reason}. Start with --all-reduce xla.") from error
    if num_wrong == 0:
        return None
    reason = f"{num_wrong} elements of sums were wrong"
    _log.warning("the P2P all-reduce of the GPUs failed; using XLA's, which is slower: %s", reason)
    return reason
