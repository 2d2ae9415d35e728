"""Tests that a follower's runner replays every call of process 0's runner, and that the results are compared."""

import threading

import numpy as np
import pytest

from meshserve.protos import steps_pb2 as pb
from meshserve.runtime.adapters.changes import AdapterChanges
from meshserve.runtime.cluster.follower_metrics import FollowerState, follower_registry
from meshserve.runtime.cluster.membership import Membership
from meshserve.runtime.cluster.replay import LeadingRunner, from_message, replay, result_digest, to_message
from meshserve.runtime.cluster.steps import REPLAYED_METHODS, Security
from meshserve.runtime.cluster.stream_client import Follower
from meshserve.runtime.cluster.stream_server import Leader
from meshserve.runtime.cluster.watchdog import Limits, Watch
from meshserve.runtime.draft.model.proposing_runner import ProposingRunner
from meshserve.runtime.engine.runner import Runner
from meshserve.runtime.program.batch import Bucket
from meshserve.runtime.program.processors.processor_batch import Sampled
from tests.waiting import WAIT_SECONDS, wait_for

BUCKET = Bucket(4, 2, 1, is_decode=True)


class FakeRunner:
    """Records its calls; `offset` is added to its tokens."""

    def __init__(self, offset: int = 0):
        self.told: list[tuple] = []
        self._offset = offset

    def set_page_row(self, page_row):
        self.told.append(("set_page_row", page_row.tolist()))

    def run(self, bucket, packed):
        self.told.append(("run", bucket, packed.tolist(), packed.dtype))
        return packed[:2] + self._offset

    def set_slot_adjustments(self, row, history, bias):
        self.told.append(("set_slot_adjustments", row, history.tolist(), bias.tolist(), bias.dtype))

    def sample(self, packed, masks=None):
        self.told.append(("sample", packed.tolist(), None if masks is None else (masks.tolist(), masks.shape)))
        return Sampled(packed[:1], (packed[1:].astype(np.float32),))

    def adapter_calls(self, changes):
        for slot, part in changes.loads:
            yield "stage_adapter", part
            yield "load_staged_adapter", slot
        yield "set_adapter_slots", np.array(list(changes.request_slots.items()), np.int32)

    def stage_adapter(self, part):
        self.told.append(("stage_adapter", part.tolist(), part.dtype))

    def load_staged_adapter(self, slot):
        self.told.append(("load_staged_adapter", slot))

    def set_adapter_slots(self, pairs):
        self.told.append(("set_adapter_slots", pairs.tolist()))

    def prompt_logprobs(self, targets):
        raise FloatingPointError("a device that fails")


class Pair:
    """A leading runner and a follower that replays its calls."""

    def __init__(self, offset: int = 0):
        self.watches = [Watch(Limits(600.0), exit=lambda status: None) for _ in range(2)]
        self.leader = Leader("127.0.0.1:0", 2, self.watches[0], Security())
        self.follower = Follower(f"127.0.0.1:{self.leader.port}", 1, self.watches[1], Security())
        self.leader.wait_for_followers(WAIT_SECONDS)
        self.ours, self.theirs = FakeRunner(), FakeRunner(offset)
        self.runner = LeadingRunner(self.ours, self.leader, self.watches[0])
        self.thread = threading.Thread(target=replay, args=(self.theirs, self.follower, self.watches[1]), daemon=True)
        self.thread.start()

    def wait(self, num_acknowledged: int) -> None:
        wait_for(lambda: self.leader.stats.num_acknowledged >= num_acknowledged or self.watches[0].failure)

    def close(self) -> None:
        stopping = threading.Thread(target=self.leader.stop)
        stopping.start()
        self.thread.join(WAIT_SECONDS)
        self.follower.close()
        stopping.join(WAIT_SECONDS)


def test_every_method_of_a_runner_is_replayed():
    methods = {name for name in (*vars(Runner), *vars(ProposingRunner)) if not name.startswith("_")}
    assert methods == {name for name in vars(LeadingRunner) if not name.startswith("_")}
    # `prepare` decides for process 0 alone, and `change_adapters` is replayed as several calls.
    of_adapters = {"stage_adapter", "load_staged_adapter", "set_adapter_slots"}
    assert (methods - {"prepare", "change_adapters"}) | of_adapters == set(REPLAYED_METHODS)


def test_the_follower_is_told_what_the_leader_is_told():
    pair = Pair()
    pair.runner.set_page_row(np.arange(3, dtype=np.int32))
    tokens = pair.runner.run(BUCKET, np.arange(5, dtype=np.int32))
    pair.runner.set_slot_adjustments(1, np.zeros(2, np.int32), np.ones(2, np.float32))
    pair.runner.sample(np.arange(4, dtype=np.int32))
    pair.runner.sample(np.arange(4, dtype=np.int32), np.full((2, 3), 2**32 - 1, np.uint32))
    pair.runner.change_adapters(AdapterChanges([(3, np.arange(7, dtype=np.uint8))], {1: 3, 0: -1}))
    pair.wait(8)
    assert tokens.tolist() == [0, 1]
    assert len(pair.ours.told) == 8 and pair.ours.told == pair.theirs.told
    assert pair.theirs.told[5:] == [
        ("stage_adapter", list(range(7)), np.uint8),
        ("load_staged_adapter", 3),
        ("set_adapter_slots", [[1, 3], [0, -1]]),
    ]
    pair.close()
    assert [watch.failure for watch in pair.watches] == [None, None]


def test_a_followers_metrics_tell_what_it_replayed_and_how_long_ago():
    membership = Membership(coordinator="127.0.0.1:1", num_processes=2, process_id=1)
    now, state = [90.0], FollowerState(is_ready=False, num_late_compiles=0, stats=None)
    registry = follower_registry(membership, lambda: state, clock=lambda: now[0])

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("meshserve_follower_ready") == 0 and value("meshserve_followed_done_total") == 0
    assert not any(value("meshserve_followed_calls_total", method=method) for method in REPLAYED_METHODS)
    assert value("meshserve_leader_silence_seconds") is None, "process 0 was not reached"
    pair = Pair()
    for _ in range(3):
        pair.runner.run(BUCKET, np.arange(5, dtype=np.int32))
    pair.runner.set_page_row(np.arange(3, dtype=np.int32))
    pair.wait(4)
    stats = pair.follower.stats
    assert stats.acknowledged is not None and stats.heard > 0
    stats.acknowledged, stats.heard = 98.5, 99.75
    now[0], state = 100.0, FollowerState(is_ready=True, num_late_compiles=0, stats=stats)
    assert value("meshserve_follower_info", role="follower", process_id="1", num_processes="2") == 1
    assert value("meshserve_follower_ready") == 1
    assert value("meshserve_followed_calls_total", method="run") == 3
    assert value("meshserve_followed_calls_total", method="set_page_row") == 1
    assert value("meshserve_followed_done_total") == 4
    assert value("meshserve_last_followed_age_seconds") == 1.5
    assert value("meshserve_leader_silence_seconds") == 0.25 and value("meshserve_uptime_seconds") == 10
    assert value("meshserve_ready") is None, "the alerts sum it, and only process 0 serves requests"
    pair.close()


def test_a_follower_whose_device_computes_something_else_is_noticed():
    pair = Pair(offset=1)
    pair.runner.run(BUCKET, np.arange(5, dtype=np.int32))
    pair.wait(2)
    assert "call 0 (run) made different tokens" in str(pair.watches[0].failure)
    pair.close()


def test_a_call_that_fails_on_the_follower_ends_both():
    pair = Pair()
    pair.leader.call("prompt_logprobs", [to_message(np.zeros(1, np.int32))])
    pair.wait(1)
    assert "process 1" in str(pair.watches[0].failure) and "a device that fails" in str(pair.watches[0].failure)
    pair.close()


def test_only_methods_of_a_runner_can_be_called():
    pair = Pair()
    pair.leader.call("__init__", [])
    pair.wait(1)
    assert "'__init__', which this release does not know" in str(pair.watches[0].failure)
    pair.close()


@pytest.mark.parametrize("argument", [BUCKET, Bucket(8, 4, 2, 3), 7, -1])
def test_arguments_survive_the_way(argument):
    message = pb.Argument.FromString(to_message(argument).SerializeToString())
    assert from_message(message) == argument


def test_what_cannot_be_replayed_is_refused_before_it_is_done():
    pair = Pair()
    with pytest.raises(TypeError, match="runners take arrays"):
        pair.runner.set_page_row([1, 2])
    assert not pair.ours.told
    pair.close()


def test_the_digest_sees_every_leaf():
    ids = np.arange(3)
    assert result_digest(None) == b""
    assert result_digest((ids, ids)) != result_digest((ids, ids + 1)) != result_digest((ids + 1, ids))
