"""A follower's end of the step stream: joins process 0, reports, takes calls in order, acknowledges them.

a reader's thread: the wire -> `calls`, a queue that whoever runs them takes from
anyone: `acknowledge` -> a queue -> gRPC's own thread -> the wire
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
    """What this end of the stream has seen so far. Times are of the follower's clock."""

    heard: float  # process 0, at last
    num_calls: Counter[str] = field(default_factory=Counter)  # taken, by method
    num_acknowledged: int = 0
    acknowledged: float | None = None  # when the last call was


class Follower:
    """Follows process 0.

    Args:
      address: HOST:PORT of its step stream.
      watch: hears of every failure; process 0 is told of those found here.

    Raises:
      ClusterError: process 0 is not there within `JOIN_SECONDS`.
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
                f"process 0 could not be reached at {address} within {JOIN_SECONDS:g} s. Is its --step-port the same, "
                "is the port open, and do both sides use TLS or neither?"
            ) from None
        self._outbox: SimpleQueue[pb.JoinRequest | None] = SimpleQueue()
        self._calls: SimpleQueue[pb.Plan | None] = SimpleQueue()
        self._changed = threading.Condition()  # guards the next five
        self._agreements: dict[str, pb.Agreement] = {}
        self._under_way: dict[int, float] = {}
        self._num_calls = 0
        self.is_over = False  # process 0 has ended the lockstep, in order
        self.stats = FollowingStats(heard=clock())
        self._outbox.put(pb.JoinRequest(hello=pb.Hello(process_id=process_id)))
        metadata = (("authorization", bearer(security.token)),) if security.token else None
        self._stream = pb_grpc.StepServiceStub(self._channel).Join(iter(self._outbox.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        watch.listen(self._tell)
        watch.look(self._look)

    def meet(self, name: str, facts: Mapping[str, str], value: int = 0) -> int:
        """Waits until every process has reported under this name; returns the least value.

        Raises:
          ClusterError: facts differ, process 0 has ended, or something has failed.
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
        """What to do, in order, until process 0 ends it or something fails."""
        return iter(self._calls.get, None)

    def acknowledge(self, sequence: int, digest: bytes) -> None:
        """The call is done, and this is the digest of what it returned."""
        with self._changed:
            self._under_way.pop(sequence, None)
            self.stats.num_acknowledged += 1
            self.stats.acknowledged = self._clock()
        acknowledgement = pb.Acknowledgement(sequence=sequence, digest=digest)
        self._outbox.put(pb.JoinRequest(acknowledgement=acknowledgement))

    def ask_to_drain(self) -> None:
        """This process was told to stop: process 0 takes no more requests, and ends everybody when the last is done."""
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
        except Exception as error:  # a message that makes no sense
            self._watch.fail(f"process 0 sent what cannot be taken: {type(error).__name__}: {error}")

    def _take(self, response: pb.JoinResponse) -> bool:
        """Whether more is to come."""
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
        """Returns the plan of a call that comes in turn. What its bytes are is protected by HTTP/2 and TCP, or by TLS.

        Raises:
          ClusterError: another call was due.
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
        """A sign of life; what is overdue from process 0 or from this one."""
        self._outbox.put(pb.JoinRequest(beat=pb.Beat()))
        limit = self._watch.overdue_seconds
        if (silence := now - self.stats.heard) > limit:
            return f"process 0 at {self._address} was not heard for {silence:.1f} s"
        with self._changed:
            for sequence, began in self._under_way.items():  # the oldest is the first
                return f"call {sequence} is not done after {limit:g} s" if now - began > limit else None
        return None

    def _tell(self, failure: str) -> None:
        self._outbox.put(pb.JoinRequest(stop=pb.Stop(failure=failure)))
        self._calls.put(None)
        with self._changed:
            self._changed.notify_all()
