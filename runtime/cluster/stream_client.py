"""Follower's end of the step stream: joins process 0, reports facts, receives calls in order and acknowledges them.

reader thread: gRPC stream -> `calls`, a queue that the replay thread consumes
any thread: `acknowledge` -> a queue -> gRPC's own thread -> gRPC stream
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

import grpc

from meshserve.protos import steps_pb2 as pb
from meshserve.protos import steps_pb2_grpc as pb_grpc

from .membership import JOIN_SECONDS, ClusterError
from .steps import OPTIONS, Security, bearer
from .watchdog import Watch

_log = logging.getLogger(__name__)


@dataclass
class FollowingStats:
    """Statistics of this end of the stream. Times are on the follower's clock."""

    heard: float  # when the last message of process 0 arrived
    num_calls: Counter[str] = field(default_factory=Counter)  # received calls, by method
    num_acknowledged: int = 0
    acknowledged: float | None = None  # when the last call was acknowledged


class Follower:
    """Client of process 0's step stream.

    Args:
      address: HOST:PORT of the step stream.
      process_id: Index of this process.
      watch: Receives every failure. Process 0 is told of failures detected here.
      security: TLS credentials and token.
      clock: Monotonic clock in seconds.

    Raises:
      ClusterError: Process 0 cannot be reached within `JOIN_SECONDS`.
    """

    def __init__(
        self,
        address: str,
        process_id: int,
        watch: Watch,
        security: Security,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._address, self._watch, self._clock = address, watch, clock
        self._channel = (
            grpc.insecure_channel(address, OPTIONS)
            if security.channel is None
            else grpc.secure_channel(address, security.channel, OPTIONS)
        )
        try:
            grpc.channel_ready_future(self._channel).result(timeout=JOIN_SECONDS)
        except grpc.FutureTimeoutError:
            raise ClusterError(
                f"process 0 could not be reached at {address} within {JOIN_SECONDS:g} s. Check that both use the "
                "same --step-port, that the port is open, and that both or neither use TLS."
            ) from None
        self._outbox: SimpleQueue[pb.JoinRequest | None] = SimpleQueue()
        self._calls: SimpleQueue[pb.Plan | None] = SimpleQueue()
        self._changed = threading.Condition()  # guards the next five attributes
        self._agreements: dict[str, pb.Agreement] = {}
        self._under_way: dict[int, float] = {}
        self._num_calls = 0
        self.is_over = False  # process 0 has stopped the cluster normally
        self.stats = FollowingStats(heard=clock())
        self._outbox.put(pb.JoinRequest(hello=pb.Hello(process_id=process_id)))
        metadata = (("authorization", bearer(security.token)),) if security.token else None
        self._stream = pb_grpc.StepServiceStub(self._channel).Join(iter(self._outbox.get, None), metadata=metadata)
        watch.supervisor.once("reader", self._read, on_failure=watch.fail)
        watch.listen(self._tell)
        watch.look(self._look)

    def meet(self, name: str, facts: Mapping[str, str], value: int = 0) -> int:
        """Waits until every process has reported under this name and returns the minimum of their values.

        Raises:
          ClusterError: The facts differ, process 0 has stopped, or something has failed.
        """
        self._outbox.put(pb.JoinRequest(report=pb.Report(name=name, facts=facts, value=value)))
        with self._changed:
            self._changed.wait_for(lambda: name in self._agreements or self.is_over or self._watch.failure is not None)
            agreement = self._agreements.get(name)
        if agreement is None:
            raise ClusterError(self._watch.failure or "process 0 has ended")
        if agreement.refusal:
            raise ClusterError(agreement.refusal)
        return agreement.value

    def calls(self) -> Iterator[pb.Plan]:
        """Yields the calls in order until process 0 stops or something fails."""
        return iter(self._calls.get, None)

    def acknowledge(self, sequence: int, digest: bytes) -> None:
        """Reports to process 0 that a call is done, with the digest of its result."""
        with self._changed:
            self._under_way.pop(sequence, None)
            self.stats.num_acknowledged += 1
            self.stats.acknowledged = self._clock()
        acknowledgement = pb.Acknowledgement(sequence=sequence, digest=digest)
        self._outbox.put(pb.JoinRequest(acknowledgement=acknowledgement))

    def ask_to_drain(self) -> None:
        """Asks process 0 to drain: it accepts no more requests and stops all processes when the last one is done."""
        self._outbox.put(pb.JoinRequest(stop=pb.Stop()))

    def close(self) -> None:
        self._watch.stop()
        self._outbox.put(None)
        self._channel.close()

    def _read(self) -> None:
        try:
            for response in self._stream:
                self.stats.heard = self._clock()
                if not self._take(response):
                    return
            self._watch.fail(f"process 0 at {self._address} has closed the step stream")
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE:
                self._watch.fail(f"process 0 at {self._address} is gone")
            else:
                self._watch.fail(f"process 0 at {self._address} refused: {code.name}: {error.details()}")
        except Exception as error:  # an invalid message
            self._watch.fail(f"process 0 sent an invalid message: {type(error).__name__}: {error}")

    def _take(self, response: pb.JoinResponse) -> bool:
        """Processes a message and returns whether more will follow."""
        kind = response.WhichOneof("message")
        if kind == "call":
            self._calls.put(self._checked(response.call))
        elif kind == "agreement":
            with self._changed:
                self._agreements[response.agreement.name] = response.agreement
                self._changed.notify_all()
        elif kind == "stop" and response.stop.failure:
            self._watch.fail(response.stop.failure)
        elif kind == "stop":
            _log.info("process 0 has ended the lockstep")
            self._watch.stop()
            self._calls.put(None)
            with self._changed:
                self.is_over = True
                self._changed.notify_all()
        return kind != "stop"

    def _checked(self, call: pb.Call) -> pb.Plan:
        """Checks that a call is the next one in sequence and returns its plan.

        The content needs no checksum: HTTP/2 and TCP, or TLS, protect it.

        Raises:
          ClusterError: Another call was due.
        """
        plan = pb.Plan.FromString(call.plan)
        if plan.sequence != self._num_calls:
            raise ClusterError(f"call {plan.sequence} came when {self._num_calls} was due")
        with self._changed:
            self._num_calls += 1
            self._under_way[plan.sequence] = self._clock()
            self.stats.num_calls[plan.method] += 1
        return plan

    def _look(self, now: float) -> str | None:
        """Sends a heartbeat and returns a reason if process 0 or a call of this process is overdue."""
        self._outbox.put(pb.JoinRequest(beat=pb.Beat()))
        limit = self._watch.overdue_seconds
        if (silence := now - self.stats.heard) > limit:
            return f"process 0 at {self._address} was not heard for {silence:.1f} s"
        with self._changed:
            for sequence, began in self._under_way.items():  # the first is the oldest
                return f"call {sequence} is not done after {limit:g} s" if now - began > limit else None
        return None

    def _tell(self, failure: str) -> None:
        self._outbox.put(pb.JoinRequest(stop=pb.Stop(failure=failure)))
        self._calls.put(None)
        with self._changed:
            self._changed.notify_all()
