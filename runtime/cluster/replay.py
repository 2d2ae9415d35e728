"""Replay of runner calls: the leader sends each call of its runner to the followers, which repeat it.

    engine -> LeadingRunner -> its StepRunner
                 |  step stream (stream_server.py, stream_client.py)
                 +-> replay -> a follower's StepRunner

Both ends pass the result of a call to `Returns`, which waits for the device in a separate thread and acknowledges the
call with a digest.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from meshserve.protos import steps_pb2 as pb

from ..adapters.changes import AdapterChanges
from ..engine.runner import AdapterCalls, Runner
from ..program.batch import BatchBuilder, Bucket
from ..program.processors.processor_batch import Logprobs, Sampled
from ..scheduler.step_plan import StepPlan
from .membership import ClusterError
from .steps import REPLAYED_METHODS
from .stream_client import Follower
from .stream_server import Leader
from .watchdog import Watch

_DIGEST_BYTES = 16
_log = logging.getLogger(__name__)


class LeadingRunner:
    """A runner that sends every call of `REPLAYED_METHODS` to the followers and then executes it."""

    def __init__(self, runner: Runner, leader: Leader, watch: Watch):
        self._runner, self._leader = runner, leader
        self._returns = Returns(leader.acknowledge, watch)

    def set_page_row(self, page_slot: np.ndarray) -> None:
        self._lead("set_page_row", page_slot)

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array | np.ndarray:
        return self._lead("run", bucket, packed)

    def prepare(self, plan: StepPlan, chain: StepPlan | None, batches: BatchBuilder, *, is_drafting: bool) -> bool:
        """See `ProposingRunner`. Over processes a draft model runs every step, so that nothing is missed."""
        return False

    def propose(self, bucket: Bucket, packed: np.ndarray) -> jax.Array | np.ndarray:
        return self._lead("propose", bucket, packed)

    def run_drafted(self, bucket: Bucket, packed: np.ndarray, places: np.ndarray) -> jax.Array | np.ndarray:
        return self._lead("run_drafted", bucket, packed, places)

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        self._lead("set_slot_adjustments", slot, history, bias)

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[Any]:
        return self._lead("sample", packed) if masks is None else self._lead("sample", packed, masks)

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[Any]:
        return self._lead("prompt_logprobs", targets)

    def change_adapters(self, changes: AdapterChanges) -> None:
        """See `Runner`. Followers get the matrices themselves."""
        assert isinstance(self._runner, AdapterCalls), self._runner
        for method, argument in self._runner.adapter_calls(changes):
            self._lead(method, argument)

    def copy_pages(self, command: np.ndarray) -> None:
        self._lead("copy_pages", command)

    def _lead(self, method: str, *arguments: Any) -> Any:
        sequence = self._leader.call(method, [to_message(argument) for argument in arguments])
        result = getattr(self._runner, method)(*arguments)
        self._returns.put(sequence, result)
        return result


def replay(runner: Runner, follower: Follower, watch: Watch) -> None:
    """Replays the calls of process 0's runner until process 0 stops or something fails."""
    returns = Returns(follower.acknowledge, watch)
    try:
        for plan in follower.calls():
            if plan.method not in REPLAYED_METHODS:
                raise ClusterError(f"process 0 called {plan.method!r}, which this release does not know")
            returns.put(plan.sequence, getattr(runner, plan.method)(*map(from_message, plan.arguments)))
    except Exception as error:  # process 0 must be told of any error
        _log.exception("the replay failed")
        watch.fail(f"{type(error).__name__}: {error}")


class Returns:
    """Acknowledges calls in order as the device finishes them, in a thread of its own.

    Args:
      acknowledge: Called with the sequence number of a call and the digest of its result.
      watch: Told if a call failed on the device.
    """

    def __init__(self, acknowledge: Callable[[int, bytes], None], watch: Watch):
        self._acknowledge, self._watch = acknowledge, watch
        self._results: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        watch.supervisor.once("returns", self._run, on_failure=watch.fail)

    def put(self, sequence: int, result: Any) -> None:
        self._results.put((sequence, result))

    def _run(self) -> None:
        while True:
            sequence, result = self._results.get()
            try:
                self._acknowledge(sequence, result_digest(result))
            except Exception as error:  # from the device, or from a collective whose peer has exited
                self._watch.fail(f"call {sequence}: {type(error).__name__}: {error}")
                return
            del result  # free it now instead of when the next result arrives


def result_digest(result: Any) -> bytes:
    """Waits for a tree of arrays and returns its digest; empty for None."""
    if result is None:
        return b""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for leaf in jax.tree.leaves(result):
        digest.update(np.asarray(leaf).tobytes())
    return digest.digest()


def to_message(argument: Any) -> pb.Argument:
    """Encodes an argument of a runner method for the followers.

    Raises:
      TypeError: The type of the argument is not supported.
    """
    if isinstance(argument, np.ndarray):
        data = np.ascontiguousarray(argument).tobytes()
        return pb.Argument(array=pb.Array(dtype=argument.dtype.str, shape=argument.shape, data=data))
    if isinstance(argument, Bucket):
        return pb.Argument(bucket=pb.Bucket(fields=map(int, dataclasses.astuple(argument))))
    if isinstance(argument, int):
        return pb.Argument(integer=argument)
    raise TypeError(f"{argument!r} is of type {type(argument).__name__}; runners take arrays, buckets and integers")


def from_message(argument: pb.Argument) -> Any:
    """Decodes an argument; inverse of `to_message`. Arrays are read-only."""
    kind = argument.WhichOneof("kind")
    if kind == "array":
        array = argument.array
        return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
    if kind == "bucket":
        values: list[Any] = list(argument.bucket.fields)  # bools arrive as 0 or 1, which compare equal
        return Bucket(*values)
    return argument.integer
