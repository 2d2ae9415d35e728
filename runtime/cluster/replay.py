"""What one process's runner is told, the runners of all processes do: the leader's end, and the replay of the others.

    engine -> LeadingRunner -> its StepRunner
                 |  step stream (runtime/cluster/stream_server.py, following.py)
                 +-> replay -> a follower's StepRunner

Both ends hand what a call returned to `Returns`, which waits for the device beside them and acknowledges a digest.
"""

import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from meshserve.protos import steps_pb2 as pb

from ..engine.engine import Runner
from ..program.batch import Bucket
from ..program.processor_batch import Logprobs, Sampled
from .membership import ClusterError
from .stream_client import Follower
from .stream_server import Leader
from .watchdog import Watch

_DIGEST_BYTES = 16
_log = logging.getLogger(__name__)


class LeadingRunner:
    """A `Runner` that tells every follower what it is told, and does it itself. Each public method is replayed."""

    def __init__(self, runner: Runner, leader: Leader, watch: Watch):
        self._runner, self._leader = runner, leader
        self._returns = Returns(leader.acknowledge, watch.fail)

    def set_page_row(self, page_slot: np.ndarray) -> None:
        self._lead("set_page_row", page_slot)

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array | np.ndarray:
        return self._lead("run", bucket, packed)

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        self._lead("set_slot_adjustments", slot, history, bias)

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[Any]:
        return self._lead("sample", packed) if masks is None else self._lead("sample", packed, masks)

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[Any]:
        return self._lead("prompt_logprobs", targets)

    def _lead(self, method: str, *arguments: Any) -> Any:
        sequence = self._leader.call(method, [to_message(argument) for argument in arguments])
        result = getattr(self._runner, method)(*arguments)
        self._returns.put(sequence, result)
        return result


_REPLAYED = frozenset(name for name in vars(LeadingRunner) if not name.startswith("_"))


def replay(runner: Runner, follower: Follower, watch: Watch) -> None:
    """Does what process 0's runner does, until process 0 ends it or something fails."""
    returns = Returns(follower.acknowledge, watch.fail)
    try:
        for plan in follower.calls():
            if plan.method not in _REPLAYED:
                raise ClusterError(f"process 0 calls {plan.method!r}, which this release does not know")
            returns.put(plan.sequence, getattr(runner, plan.method)(*map(from_message, plan.arguments)))
    except Exception as error:  # whatever it was, process 0 must hear of it
        _log.exception("the replay died")
        watch.fail(f"{type(error).__name__}: {error}")


class Returns:
    """Acknowledges calls in order as the device finishes them, in a thread of its own.

    Args:
      acknowledge: gets a call's number and the digest of what it returned.
      fail: gets the reason if a call failed on the device.
    """

    def __init__(self, acknowledge: Callable[[int, bytes], None], fail: Callable[[str], None]):
        self._acknowledge, self._fail = acknowledge, fail
        self._results: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        threading.Thread(target=self._run, name="returns", daemon=True).start()

    def put(self, sequence: int, result: Any) -> None:
        self._results.put((sequence, result))

    def _run(self) -> None:
        while True:
            sequence, result = self._results.get()
            try:
                self._acknowledge(sequence, result_digest(result))
            except Exception as error:  # the device's own, or a collective's whose peer is gone
                self._fail(f"call {sequence}: {type(error).__name__}: {error}")
                return
            del result  # and not only when the next one comes


def result_digest(result: Any) -> bytes:
    """Of a tree of arrays, waiting for them; empty for None."""
    if result is None:
        return b""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for leaf in jax.tree.leaves(result):
        digest.update(np.asarray(leaf).tobytes())
    return digest.digest()


def to_message(argument: Any) -> pb.Argument:
    """An argument of a runner's method on its way to the followers."""
    if isinstance(argument, np.ndarray):
        data = np.ascontiguousarray(argument).tobytes()
        return pb.Argument(array=pb.Array(dtype=argument.dtype.str, shape=argument.shape, data=data))
    if isinstance(argument, Bucket):
        return pb.Argument(bucket=pb.Bucket(fields=map(int, dataclasses.astuple(argument))))
    if isinstance(argument, int):
        return pb.Argument(integer=argument)
    raise TypeError(
        f"{argument!r} is of type {type(argument).__name__}; runners take arrays, buckets and whole numbers"
    )


def from_message(argument: pb.Argument) -> Any:
    """The inverse of `to_message`. Arrays cannot be written to."""
    kind = argument.WhichOneof("kind")
    if kind == "array":
        array = argument.array
        return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
    if kind == "bucket":
        values: list[Any] = list(argument.bucket.fields)  # a bool comes as 0 or 1, which is equal to it
        return Bucket(*values)
    return argument.integer
