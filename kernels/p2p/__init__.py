"""P2P all-reduce and all-gather for small arrays, where a library's collective takes longer than the transfer itself.

A peer is a device of the same host whose memory this device can write to.

All devices must call the operations in the same order, inside a program over the mesh, and one after another: two
operations that do not depend on each other must not run at the same time.
"""

from meshserve.kernels.cuda import build, support
from meshserve.kernels.implementation import in_order

from . import sm90
from .contract import MAX_BYTES, P2PGroup, P2PImplementation, P2POperations, P2PShapes, takes_sum

__all__ = [
    "IMPLEMENTATIONS",
    "MAX_BYTES",
    "P2PGroup",
    "P2PImplementation",
    "P2POperations",
    "P2PShapes",
    "takes_sum",
]

_SM90 = P2PImplementation(
    name="p2p",
    unsupported_device=support.no_hopper,
    unsupported_shapes=sm90.unsupported_shapes,
    unavailable_reason=build.unbuildable_reason,
    automatic_on=("gpu",),
    measured_on=("h100", "h200"),
    operations=sm90,
    open_group=sm90.open_p2p_group,
    seconds=4e-6,  # on four H200 (docs/performance.md)
)
# In order of preference; without any of them, sums are those of XLA.
IMPLEMENTATIONS = in_order(_SM90)
