"""Tests the step stream with both ends in one process, over loopback, with a proxy that can corrupt messages."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from meshserve.benchmarks.lib.step_proxy import Spoil, StepProxy
from meshserve.protos import steps_pb2 as pb
from meshserve.protos import steps_pb2_grpc as pb_grpc
from meshserve.runtime.cluster import stream_server
from meshserve.runtime.cluster.membership import ClusterError
from meshserve.runtime.cluster.steps import Security
from meshserve.runtime.cluster.stream_client import Follower
from meshserve.runtime.cluster.stream_server import Leader
from meshserve.runtime.cluster.watchdog import FAILED, Limits, Watch
from tests.waiting import WAIT_SECONDS, wait_for

PATIENT = Limits(100 * WAIT_SECONDS)  # for tests in which nothing may time out


@dataclass
class Ends:
    """A leader, its followers, and the failures that each watch reported; nothing beats unless a test calls it."""

    leader: Leader
    followers: list[Follower]
    watches: list[Watch]
    proxy: StepProxy
    failures: list[list[str]] = field(default_factory=list)

    def failed(self, index: int) -> str:
        """Waits for process `index` to fail and returns the reason."""
        wait_for(lambda: self.failures[index])
        return self.failures[index][0]


@contextlib.contextmanager
def cluster(
    num_processes: int = 2, limits: Limits = PATIENT, clock: Callable[[], float] = time.monotonic
) -> Iterator[Ends]:
    watches = [Watch(limits, exit=lambda status: None) for _ in range(num_processes)]
    failures: list[list[str]] = [[] for _ in watches]
    for watch, said in zip(watches, failures, strict=True):
        watch.listen(said.append)
    leader = Leader("127.0.0.1:0", num_processes, watches[0], Security(), clock=clock)
    proxy = StepProxy(f"127.0.0.1:{leader.port}")
    followers = [
        Follower(f"127.0.0.1:{proxy.port}", index, watches[index], Security(), clock=clock)
        for index in range(1, num_processes)
    ]
    leader.wait_for_followers(WAIT_SECONDS)
    try:
        yield Ends(leader, followers, watches, proxy, failures)
    finally:
        for watch in watches:
            watch.stop()
        for follower in followers:
            follower.close()
        proxy.close()
        leader.stop()


def number(value: int) -> list[pb.Argument]:
    return [pb.Argument(integer=value)]


def acknowledge_all(follower: Follower, seen: list[pb.Plan]) -> None:
    for plan in follower.calls():
        seen.append(plan)
        follower.acknowledge(plan.sequence, b"same")


def test_calls_arrive_in_order_and_are_acknowledged_beside_the_caller():
    with cluster(3) as ends:
        seen: list[list[pb.Plan]] = [[], []]
        for follower, plans in zip(ends.followers, seen, strict=True):
            threading.Thread(target=acknowledge_all, args=(follower, plans), daemon=True).start()
        for value in range(200):
            ends.leader.acknowledge(ends.leader.call("run", number(value)), b"same")
        wait_for(lambda: ends.leader.stats.num_acknowledged == 200)
        assert [[plan.arguments[0].integer for plan in plans] for plans in seen] == [list(range(200))] * 2
        assert ends.failures == [[], [], []]


def test_the_least_value_is_agreed_on():
    with cluster(3) as ends:
        agreed: list[int] = []
        for follower, value in zip(ends.followers, (30, 20), strict=True):
            threading.Thread(target=lambda f=follower, v=value: agreed.append(f.meet("pages", {"a": "1"}, v))).start()
        assert ends.leader.meet("pages", {"a": "1"}, 25) == 20
        wait_for(lambda: agreed == [20, 20])


def test_differences_are_named_on_both_sides():
    with cluster() as ends:
        refusals: list[str] = []

        def follow() -> None:
            with pytest.raises(ClusterError) as caught:
                ends.followers[0].meet("options", {"page_size": "16", "tp": "2"})
            refusals.append(str(caught.value))

        thread = threading.Thread(target=follow)
        thread.start()
        with pytest.raises(ClusterError, match="page_size is 16 on process 1 and 32 on process 0") as caught:
            ends.leader.meet("options", {"page_size": "32", "tp": "2"})
        thread.join()
        assert refusals == [str(caught.value)] and "tp" not in refusals[0]


def swapped() -> Spoil:
    held: list[pb.JoinResponse] = []

    def spoil(response: pb.JoinResponse) -> list[pb.JoinResponse]:
        if response.HasField("call") and pb.Plan.FromString(response.call.plan).sequence == 1:
            held.append(response)
            return []
        return [response, *held] if response.HasField("call") else [response]

    return spoil


def twice(response: pb.JoinResponse) -> list[pb.JoinResponse]:
    return [response, response] if response.HasField("call") else [response]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (swapped(), "call 2 came when 1 was due"),
        (twice, "call 0 came when 1 was due"),
    ],
    ids=["reordered", "duplicated"],
)
def test_a_spoiled_stream_ends_everybody(spoil, reason):
    with cluster() as ends:
        ends.proxy.spoil = spoil
        threading.Thread(target=acknowledge_all, args=(ends.followers[0], []), daemon=True).start()
        for value in range(4):
            ends.leader.call("run", number(value))
        assert reason in ends.failed(1)
        assert reason in ends.failed(0) and "process 1" in ends.failed(0)


def test_different_tokens_end_everybody():
    with cluster() as ends:
        sequence = ends.leader.call("run", number(1))
        plan = next(ends.followers[0].calls())
        ends.leader.acknowledge(sequence, b"ab")
        ends.followers[0].acknowledge(plan.sequence, b"cd")
        assert ends.failed(0) == "call 0 (run) made different tokens: 6162 on process 0, 6364 on process 1"
        assert ends.failed(1) == ends.failed(0)


def test_an_acknowledgement_of_nothing_is_a_failure():
    with cluster() as ends:
        ends.followers[0].acknowledge(5, b"")
        assert "call 5, which it was not given" in ends.failed(0)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_goes_away_ends_the_others(lost):
    with cluster(3) as ends:
        if lost == 0:
            ends.leader._server.stop(None)
            assert "is gone" in ends.failed(1) and "is gone" in ends.failed(2)
        else:
            ends.watches[1].stop()
            ends.followers[0].close()
            assert "process 1" in ends.failed(0) and "is gone" in ends.failed(0)
            assert ends.failed(2) == ends.failed(0)


def test_silence_and_steps_under_way_are_overdue_after_half_the_limit():
    """Uses a clock that only the test advances."""
    now = 0.0
    with cluster(limits=Limits(10.0), clock=lambda: now) as ends:
        leader, [follower] = ends.leader, ends.followers

        def called() -> int:
            """Makes a call that this end has completed; all beats before it have arrived."""
            sequence = leader.call("run", number(1))
            assert next(follower.calls()).sequence == sequence
            leader.acknowledge(sequence, b"")
            return sequence

        def answered(sequence: int) -> None:
            follower.acknowledge(sequence, b"")
            wait_for(lambda: leader.stats.num_acknowledged == sequence + 1)

        assert leader._look(29.0) is None  # processes that are starting have more time
        for watch in ends.watches:
            watch.ready()
        for end in (leader, follower):
            assert end._look(5.0) is None
            assert "was not heard for 5.1 s" in str(end._look(5.1))
        answered(called())
        sequence = called()
        now = leader._followers[1].heard = follower.stats.heard = 5.1
        assert "call 1 (run) is not done after 5 s on process 1" in str(leader._look(now))
        assert "call 1 is not done after 5 s" in str(follower._look(now))
        answered(sequence)
        assert leader._look(now) is None and follower._look(now) is None


def test_beats_are_signs_of_life():
    with cluster() as ends:
        [follower] = ends.followers
        before = ends.leader._followers[1].heard, follower.stats.heard
        assert ends.leader._look(0.0) is None and follower._look(0.0) is None
        wait_for(lambda: ends.leader._followers[1].heard > before[0] and follower.stats.heard > before[1])


def test_the_watch_looks_again_and_again():
    watch, times, is_enough = Watch(Limits(0.1), exit=lambda status: None), [], threading.Event()

    def look(now: float) -> str | None:
        times.append(now)
        if len(times) == 5:
            is_enough.set()
            return "overdue"
        return None

    watch.look(look)
    watch.start()
    assert is_enough.wait(WAIT_SECONDS)
    wait_for(lambda: watch.failure == "overdue")
    watch.stop()
    assert times == sorted(times)


def test_the_watch_goes_on_after_an_error_of_its_own(monkeypatch, caplog):
    """Without the watch, lost processes would not be noticed."""
    monkeypatch.setattr("meshserve.runtime.supervision.supervisor._FIRST_PAUSE_SECONDS", 0.001)
    watch, errors, has_looked = Watch(Limits(0.1), exit=lambda status: None), [KeyError("odd")] * 2, threading.Event()

    def look(now: float) -> None:
        if errors:
            raise errors.pop()
        has_looked.set()

    watch.look(look)
    watch.start()
    assert has_looked.wait(WAIT_SECONDS)
    watch.stop()
    assert watch.failure is None and watch.supervisor.num_failures() == {"watch": 2}


def test_whoever_looks_is_called_as_soon_as_the_processes_serve():
    """It does not wait for the next beat, because the watchdog process begins then."""
    watch, has_looked = Watch(PATIENT, exit=lambda status: None), threading.Event()
    watch.look(lambda now: has_looked.set())
    watch.start()
    watch.ready()
    assert has_looked.wait(WAIT_SECONDS)  # five beat intervals are longer than this
    watch.stop()


def test_the_watch_ends_the_process_after_the_first_failure_only():
    statuses: list[int] = []
    has_ended = threading.Event()
    watch = Watch(Limits(0.2), exit=lambda status: (statuses.append(status), has_ended.set()))
    reasons: list[str] = []
    watch.listen(reasons.append)
    watch.fail("first")
    watch.fail("second")
    watch.listen(reasons.append)  # registered late
    assert has_ended.wait(WAIT_SECONDS)
    assert (reasons, statuses) == (["first", "first"], [FAILED])


def test_an_ordered_end_is_no_failure():
    with cluster() as ends:
        seen: list[pb.Plan] = []
        replay = threading.Thread(target=acknowledge_all, args=(ends.followers[0], seen))
        replay.start()
        ends.leader.call("run", number(1))
        stopping = threading.Thread(target=ends.leader.stop)
        stopping.start()
        replay.join(WAIT_SECONDS)
        assert not replay.is_alive() and len(seen) == 1
        ends.followers[0].close()
        stopping.join(WAIT_SECONDS)
        assert ends.failures == [[], []]


def test_an_ordered_end_while_the_processes_start_is_heard_by_who_waits():
    with cluster() as ends:
        heard: list[str] = []

        def follow() -> None:
            with pytest.raises(ClusterError) as caught:
                ends.followers[0].meet("options", {})
            heard.append(str(caught.value))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        ends.watches[0].stop()
        ends.leader._end("")
        thread.join(WAIT_SECONDS)
        assert heard == ["process 0 has ended"] and ends.followers[0].is_over
        assert ends.failures == [[], []]


def test_a_follower_that_is_told_to_stop_drains_the_leader():
    with cluster() as ends:
        asked = threading.Event()
        ends.leader.on_drain = asked.set
        ends.followers[0].ask_to_drain()
        assert asked.wait(WAIT_SECONDS)
        assert ends.failures == [[], []]


@pytest.mark.parametrize(
    ("token", "process_id", "reason"),
    [
        ("wrong", 1, "UNAUTHENTICATED.*not the token"),
        ("", 1, "UNAUTHENTICATED.*not the token"),
        ("right", 5, "OUT_OF_RANGE.*no process 5 belongs here"),
        ("right", 1, "ALREADY_EXISTS.*process 1 has joined already"),
    ],
)
def test_strangers_are_refused_and_disturb_nobody(token, process_id, reason):
    watch = Watch(PATIENT, exit=lambda status: None)
    leader = Leader("127.0.0.1:0", 2, watch, Security(token="right"))
    address = f"127.0.0.1:{leader.port}"
    quiet = Watch(PATIENT, exit=lambda status: None)
    follower = Follower(address, 1, quiet, Security(token="right"))
    leader.wait_for_followers(WAIT_SECONDS)
    theirs = Watch(PATIENT, exit=lambda status: None)
    stranger = Follower(address, process_id, theirs, Security(token=token))
    with pytest.raises(ClusterError, match=reason):
        stranger.meet("options", {})
    assert watch.failure is None and quiet.failure is None
    follower.close()
    leader.stop()


@contextlib.contextmanager
def stranger(leader: Leader) -> Iterator[None]:
    """Joins as process 1 and sends nothing but signs of life, until the block ends."""
    is_over = threading.Event()

    def requests() -> Iterator[pb.JoinRequest]:
        yield pb.JoinRequest(hello=pb.Hello(process_id=1))
        while not is_over.wait(0.01):
            yield pb.JoinRequest(beat=pb.Beat())

    with grpc.insecure_channel(f"127.0.0.1:{leader.port}") as channel:
        call = pb_grpc.StepServiceStub(channel).Join(requests())
        leader.wait_for_followers(WAIT_SECONDS)
        yield
        is_over.set()
        call.cancel()


@pytest.mark.parametrize("meeting", ["options", "models"])
def test_a_stranger_that_only_shows_signs_of_life_is_waited_for_a_limited_time(meeting, monkeypatch, caplog):
    """Without a token, it may join before the follower does."""
    caplog.set_level("INFO")
    monkeypatch.setattr(stream_server, "_SAY_SECONDS", 0.05)
    monkeypatch.setattr(stream_server, "JOIN_SECONDS" if meeting == "options" else "PREPARE_SECONDS", 0.3)
    leader = Leader("127.0.0.1:0", 2, Watch(PATIENT, exit=lambda status: None), Security())
    with stranger(leader):
        quiet = Watch(PATIENT, exit=lambda status: None)
        follower = Follower(f"127.0.0.1:{leader.port}", 1, quiet, Security())
        with pytest.raises(ClusterError, match=r"process 1 at ipv4\S+ did not report its \w+ within 0.3 s"):
            leader.meet(meeting, {"a": "1"})
        assert re.search(
            rf"waiting for process 1 at ipv4\S+ to report its {meeting}, for \d+ of at most 0.3 s", caplog.text
        )
        wait_for(lambda: "process 1 has joined already, from ipv4" in str(quiet.failure))
        follower.close()
    leader.stop()


def test_a_start_says_for_whom_it_waits(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(stream_server, "_SAY_SECONDS", 0.05)
    leader = Leader("127.0.0.1:0", 3, Watch(PATIENT, exit=lambda status: None), Security())
    with pytest.raises(ClusterError, match=r"process 1, process 2 did not join within 0.2 s"):
        leader.wait_for_followers(0.2)
    assert "waiting for process 1, process 2 to join, for 0 of at most 0.2 s" in caplog.text
    leader.stop()


@pytest.mark.parametrize("says", ["nothing", "goes away"])
def test_callers_that_do_not_say_who_they_are_keep_nobody_out(monkeypatch, caplog, says):
    monkeypatch.setattr(stream_server, "_HELLO_SECONDS", 0.1)
    watch = Watch(PATIENT, exit=lambda status: None)
    leader = Leader("127.0.0.1:0", 2, watch, Security())
    address = f"127.0.0.1:{leader.port}"
    never = threading.Event()

    def hello() -> Iterator[pb.JoinRequest]:
        if says == "nothing":
            never.wait()
        yield from ()

    with grpc.insecure_channel(address) as channel:
        calls = [pb_grpc.StepServiceStub(channel).Join(hello()) for _ in range(20)]  # more than there are threads
        quiet = Watch(PATIENT, exit=lambda status: None)
        follower = Follower(address, 1, quiet, Security())
        leader.wait_for_followers(WAIT_SECONDS)
        expected = grpc.StatusCode.CANCELLED if says == "nothing" else grpc.StatusCode.INVALID_ARGUMENT
        assert {call.code() for call in calls} == {expected}
        never.set()
    assert (
        watch.failure is None and quiet.failure is None and not caplog.records[1:]
    )  # the first record: "process 1 joined"
    follower.close()
    leader.stop()
