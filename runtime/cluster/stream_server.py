"""Process 0's end of the step stream: sends its runner's calls to every follower and collects the acknowledgements.

    engine thread: `call` -> a queue per follower -> the thread of its gRPC handler -> gRPC stream
    one reader thread per follower: `acknowledge`, which compares the results of all processes

Nothing waits for acknowledgements: a call costs the engine thread only a few queue operations, and the rest overlaps
with the work of the device.
"""

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc

from meshserve.protos import steps_pb2 as pb
from meshserve.protos import steps_pb2_grpc as pb_grpc

from .membership import JOIN_SECONDS, PREPARE_SECONDS, ClusterError
from .steps import OPTIONS, OPTIONS_MEETING, Security, bearer, differences
from .watchdog import Watch

_MANY_STRANGERS = 8  # threads for rejecting unknown callers, beyond one thread per follower
_SAY_SECONDS = 30.0  # between two lines that say for what a start waits
_HELLO_SECONDS = 5.0  # within which a caller must send Hello, because it occupies a thread
_log = logging.getLogger(__name__)


@dataclass
class StreamStats:
    """Cost of the step streams so far."""

    num_calls: int = 0
    send_seconds: float = 0.0  # time spent in the calling thread
    num_acknowledged: int = 0  # calls acknowledged by all processes
    lag_seconds: float = 0.0  # from the local result to the last follower's acknowledgement; blocks nothing
    longest_seconds: float = 0.0  # from sending a call to its last acknowledgement


@dataclass
class _Peer:
    """A connected follower."""

    process_id: int
    address: str
    heard: float
    is_leaving: bool = False
    outbox: "SimpleQueue[pb.JoinResponse | None]" = field(default_factory=SimpleQueue)

    def __str__(self) -> str:
        return f"process {self.process_id} at {self.address}"


@dataclass
class _UnderWay:
    """A call that some process has not acknowledged. `own` is when this process acknowledged it."""

    method: str
    sent: float
    own: float = 0.0
    digests: dict[int, bytes] = field(default_factory=dict)


class Leader(pb_grpc.StepServiceServicer):
    """Server of the step streams that keep the followers in lockstep.

    Args:
      address: HOST:PORT to listen on. Port 0 selects a free port.
      num_processes: Number of processes in the cluster, including this one.
      watch: Receives every failure. The followers are told of failures detected elsewhere.
      security: TLS credentials and token.
      clock: Monotonic clock in seconds.

    Raises:
      ClusterError: The address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        num_processes: int,
        watch: Watch,
        security: Security,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stats = StreamStats()
        self.on_drain: Callable[[], None] | None = None  # called when a follower is told to stop
        self._others = frozenset(range(1, num_processes))
        self._num_processes, self._watch, self._token, self._clock = num_processes, watch, security.token, clock
        self._changed = threading.Condition()  # guards everything below
        self._followers: dict[int, _Peer] = {}
        self._reports: dict[str, dict[int, pb.Report]] = {}
        self._under_way: dict[int, _UnderWay] = {}
        workers = ThreadPoolExecutor(num_processes + _MANY_STRANGERS, thread_name_prefix="steps")
        self._server = grpc.server(workers, options=OPTIONS)
        pb_grpc.add_StepServiceServicer_to_server(self, self._server)
        try:
            if security.server is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, security.server)
        except RuntimeError as error:
            raise ClusterError(
                f"cannot bind {address} for the step stream: {error}. Free the port or change --step-port."
            ) from error
        watch.listen(self._tell)
        watch.look(self._look)
        self._server.start()

    def wait_for_followers(self, timeout_seconds: float = JOIN_SECONDS) -> None:
        """Waits until all followers have joined.

        Raises:
          ClusterError: Some followers did not join in time, or something has failed.
        """
        with self._changed:
            self._wait(lambda: self._others - self._followers.keys(), "join", timeout_seconds)

    def meet(self, name: str, facts: Mapping[str, str], value: int = 0) -> int:
        """Waits until every process has reported under this name and returns the minimum of their values.

        Who has joined may be no process of the cluster, and send signs of life only; so this does not wait for ever.

        Raises:
          ClusterError: The facts differ, a process did not report in time, or something has failed.
        """
        seconds = JOIN_SECONDS if name == OPTIONS_MEETING else PREPARE_SECONDS
        with self._changed:
            reports = self._reports.setdefault(name, {})
            reports[0] = pb.Report(name=name, facts=facts, value=value)
            self._wait(lambda: self._others - reports.keys(), f"report its {name}", seconds)
        refusal = differences(name, {index: report.facts for index, report in reports.items()})
        least = min(report.value for report in reports.values())
        self._send(pb.JoinResponse(agreement=pb.Agreement(name=name, value=least, refusal=refusal)))
        if refusal:
            raise ClusterError(refusal)
        return least

    def call(self, method: str, arguments: Sequence[pb.Argument]) -> int:
        """Sends a call to every follower and returns its sequence number.

        This process must `acknowledge` the call when it is done.
        """
        began = self._clock()
        with self._changed:
            sequence = self.stats.num_calls
            self.stats.num_calls += 1
            self._under_way[sequence] = _UnderWay(method, began)
        plan = pb.Plan(sequence=sequence, method=method, arguments=arguments).SerializeToString()
        self._send(pb.JoinResponse(call=pb.Call(plan=plan)))
        self.stats.send_seconds += self._clock() - began
        return sequence

    def acknowledge(self, sequence: int, digest: bytes, process_id: int = 0) -> None:
        """Records that a process has finished a call, with the digest of its result."""
        now = self._clock()
        with self._changed:
            call = self._under_way.get(sequence)
            if call is None or process_id in call.digests:
                reason = f"process {process_id} acknowledged call {sequence}, which it was not given"
            else:
                call.digests[process_id] = digest
                if process_id == 0:
                    call.own = now
                if len(call.digests) < self._num_processes:
                    return
                del self._under_way[sequence]
                self.stats.num_acknowledged += 1
                self.stats.lag_seconds += now - call.own
                self.stats.longest_seconds = max(self.stats.longest_seconds, now - call.sent)
                if len(set(call.digests.values())) == 1:
                    return
                made = ", ".join(f"{found.hex()[:8]} on process {index}" for index, found in call.digests.items())
                reason = f"call {sequence} ({call.method}) made different tokens: {made}"
        self._watch.fail(reason)

    def stop(self) -> None:
        """Stops the followers, then the stream.

        Waits a limited time for the followers to exit first, because JAX terminates a process that loses process 0.
        """
        self._watch.stop()
        self._end("")
        with self._changed:
            self._changed.wait_for(lambda: not self._followers, self._watch.limits.exit_seconds)
        self._server.stop(None)

    def Join(self, requests: Iterator[pb.JoinRequest], context: Any) -> Iterator[pb.JoinResponse]:
        metadata = dict(context.invocation_metadata())
        if not hmac.compare_digest(str(metadata.get("authorization", "")), bearer(self._token)):
            _log.warning("rejected %s, which tried to join without this cluster's token", context.peer())
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is not the token of the cluster (--cluster-token)")
        hello = self._first(requests, context).hello
        peer = _Peer(hello.process_id, context.peer(), self._clock())
        with self._changed:
            if not 0 < peer.process_id < self._num_processes:
                message = f"no process {peer.process_id} belongs here: --num-processes is {self._num_processes}"
                context.abort(grpc.StatusCode.OUT_OF_RANGE, message)
            if peer.process_id in self._followers:
                message = (
                    f"process {peer.process_id} has joined already, from {self._followers[peer.process_id].address}"
                )
                context.abort(grpc.StatusCode.ALREADY_EXISTS, message)
            self._followers[peer.process_id] = peer
            self._changed.notify_all()
        _log.info("%s joined", peer)
        context.add_callback(lambda: peer.outbox.put(None))
        self._watch.supervisor.once("reader", lambda: self._read(peer, requests), on_failure=self._watch.fail)
        while (response := peer.outbox.get()) is not None:
            yield response

    def _first(self, requests: Iterator[pb.JoinRequest], context: Any) -> pb.JoinRequest:
        """Returns a caller's first message. Ends the call if none arrives in time."""
        has_come = threading.Event()
        self._watch.supervisor.once("hello", lambda: has_come.wait(_HELLO_SECONDS) or context.cancel())
        try:
            return next(requests)
        except StopIteration:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
            raise  # not reached: `abort` raises
        finally:
            has_come.set()

    def _read(self, peer: _Peer, requests: Iterator[pb.JoinRequest]) -> None:
        """Processes a follower's messages until it leaves or is lost."""
        try:
            for request in requests:
                peer.heard = self._clock()
                self._take(peer, request)
        except grpc.RpcError:
            pass  # the connection was lost
        except Exception as error:  # an invalid message
            self._watch.fail(f"{peer} sent an invalid message: {type(error).__name__}: {error}")
        with self._changed:
            is_expected = peer.is_leaving
            del self._followers[peer.process_id]
            self._changed.notify_all()
        if not is_expected:
            self._watch.fail(f"{peer} is gone")

    def _take(self, peer: _Peer, request: pb.JoinRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "acknowledgement":
            self.acknowledge(request.acknowledgement.sequence, request.acknowledgement.digest, peer.process_id)
        elif kind == "report":
            with self._changed:
                self._reports.setdefault(request.report.name, {})[peer.process_id] = request.report
                self._changed.notify_all()
        elif kind == "stop" and request.stop.failure:
            self._watch.fail(f"{peer}: {request.stop.failure}")
        elif kind == "stop" and self.on_drain is None:
            self._watch.fail(f"{peer} was told to stop while the cluster was starting")
        elif kind == "stop" and self.on_drain is not None:
            _log.info("%s was told to stop: draining", peer)
            self.on_drain()

    def _look(self, now: float) -> str | None:
        """Sends heartbeats and returns a reason if a follower or a call is overdue."""
        self._send(pb.JoinResponse(beat=pb.Beat()))
        limit = self._watch.overdue_seconds
        with self._changed:
            for peer in self._followers.values():
                if now - peer.heard > limit:
                    return f"{peer} was not heard for {now - peer.heard:.1f} s"
            for sequence, call in self._under_way.items():  # the first is the oldest
                if now - call.sent > limit:
                    late = ", ".join(str(index) for index in range(self._num_processes) if index not in call.digests)
                    return f"call {sequence} ({call.method}) is not done after {limit:g} s on process {late}"
                break
        return None

    def _tell(self, failure: str) -> None:
        self._end(failure)
        with self._changed:
            self._changed.notify_all()

    def _end(self, failure: str) -> None:
        with self._changed:
            for peer in self._followers.values():
                peer.is_leaving = True
                peer.outbox.put(pb.JoinResponse(stop=pb.Stop(failure=failure)))

    def _send(self, response: pb.JoinResponse) -> None:
        for peer in tuple(self._followers.values()):
            peer.outbox.put(response)

    def _wait(self, find_late: Callable[[], Set[int]], what: str, seconds: float) -> None:
        """Waits until no process is late to do `what`, and says every half a minute which are. The lock must be held.

        Raises:
          ClusterError: Some were late for too long, or something has failed.
        """
        began = time.monotonic()
        while (late := find_late()) and self._watch.failure is None:
            waited = time.monotonic() - began
            names = ", ".join(str(self._followers.get(index, f"process {index}")) for index in sorted(late))
            if waited >= seconds:
                raise ClusterError(f"{names} did not {what} within {seconds:g} s.")
            if waited >= _SAY_SECONDS:
                _log.info("waiting for %s to %s, for %.0f of at most %g s", names, what, waited, seconds)
            self._changed.wait_for(
                lambda: not find_late() or self._watch.failure is not None, min(_SAY_SECONDS, seconds - waited)
            )
        if self._watch.failure is not None:
            raise ClusterError(self._watch.failure)
