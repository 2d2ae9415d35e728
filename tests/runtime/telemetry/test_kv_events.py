"""Events about the prefix cache, from the scheduler to independent readers over ZeroMQ and gRPC."""

import contextlib
import dataclasses
import random
from collections.abc import Iterator

import grpc
import msgpack
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2 as pb

from meshserve.runtime.api.errors import ConfigError, QueueFullError
from meshserve.runtime.gateway.vllm_service import add_gateway
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.page_changes import CachedPage, PageChanges
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.telemetry.kv_events import feed as feed_module
from meshserve.runtime.telemetry.kv_events.feed import EventBatch, KvEventFeed, PublisherAddress, Replay, block_hash
from meshserve.runtime.telemetry.kv_events.zmq_publisher import ZmqPublisher, payload
from tests.kv_subscriber import Index, Subscriber, check_prefixes
from tests.runtime.loopback import running
from tests.runtime.simulation import Simulation, make_limits, make_request
from tests.waiting import WAIT_SECONDS, wait_for

PAGE_SIZE = 4


def cached(pages: PageAllocator) -> set[int]:
    """Returns the hashes of the pages that a new request could find."""
    return {block_hash(key) for key in pages._page_of}


class Recorder:
    """A publisher that decodes what it is to send, as a reader would."""

    source = PublisherAddress("", "", "", 0)

    def __init__(self) -> None:
        self.index = Index()
        self.sequences: list[int] = []

    def send(self, batch: EventBatch) -> None:
        self.index.apply(payload(batch, PAGE_SIZE))
        self.sequences.append(batch.sequence)

    def serve(self, seconds: float, replay: object) -> None: ...

    def close(self) -> None: ...


def observed(num_pages: int, **limits: int) -> tuple[Simulation, KvEventFeed, Recorder]:
    simulation, changes, recorder = Simulation(make_limits(**limits), num_pages), PageChanges(PAGE_SIZE), Recorder()
    simulation.allocator.changes = changes
    return simulation, KvEventFeed(changes, recorder), recorder


def traffic(simulation: Simulation, draw: random.Random, num_requests: int) -> Iterator[None]:
    """Runs requests of which many share prefixes and some are cancelled; yields after every step."""
    prefixes = [[draw.randrange(1, 20) for _ in range(length)] for length in (4, 9, 12)]
    for _ in range(num_requests):
        prompt = (*draw.choice(prefixes), *(draw.randrange(1, 20) for _ in range(draw.randint(1, 12))))
        salt = draw.choice(("", "", "a", "b"))
        seed = len(simulation.accepted) + 1
        request = make_request(seed, prompt=prompt, max_tokens=draw.randint(1, 16), cache_salt=salt)
        with contextlib.suppress(QueueFullError):
            simulation.add(request)
        for _ in range(draw.randint(0, 4)):
            simulation.step()
            yield
        if draw.random() < 0.1:
            simulation.finish(draw.choice(simulation.accepted))
            yield
        if draw.random() < 0.02:
            simulation.allocator.flush()
            yield


@pytest.mark.parametrize("share", [1.0, 0.1], ids=["each step", "few steps"])
def test_a_reader_rebuilds_the_index_of_a_scheduler_under_any_traffic(share: float):
    """Every step of the simulation ends with `audit()`; published steps must leave the reader with the same pages."""
    simulation, feed, recorder = observed(24, page_size=PAGE_SIZE, max_running=4, max_step_tokens=16, max_context=40)
    draw, num_checked = random.Random(7), 0
    for _ in traffic(simulation, draw, 400):
        if draw.random() < share:
            feed.publish()
            simulation.scheduler.audit()
            assert set(recorder.index.blocks) == cached(simulation.allocator)
            num_checked += check_prefixes(recorder.index, PAGE_SIZE)
    assert num_checked > 500 and simulation.allocator.num_evictions > 100
    assert recorder.index.num_stored > 100 < recorder.index.num_removed
    assert recorder.sequences == list(range(len(recorder.sequences)))
    simulation.allocator.reset(30)
    feed.publish()
    assert not recorder.index.blocks and recorder.index.num_cleared == 1


def test_changes_that_cancel_out_take_no_memory_and_no_event():
    pages, changes, recorder = PageAllocator(2), PageChanges(PAGE_SIZE), Recorder()
    pages.changes = changes
    feed = KvEventFeed(changes, recorder)
    for token_id in range(1_000):
        request = make_request(1, prompt=(token_id,) * PAGE_SIZE)
        request.page_keys.append(token_id.to_bytes(32, "big"))
        held = pages.allocate(2)  # evicts the page before
        assert pages.publish(held[0], request.page_keys[0])
        changes.stored(request, 0)
        pages.free(held)
    assert len(changes._change.stored) == 1 and not changes._change.removed
    feed.publish()
    assert set(recorder.index.blocks) == {999} and recorder.index.num_stored == 1
    feed.publish()
    assert recorder.sequences == [0]


def test_a_reader_that_missed_more_than_is_kept_gets_the_whole_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed_module, "_MAX_HISTORY_BATCHES", 3)
    simulation, feed, recorder = observed(24, page_size=PAGE_SIZE, max_running=4, max_step_tokens=16, max_context=40)
    assert feed.replay(0) == Replay([], is_snapshot=False)
    for _ in traffic(simulation, random.Random(3), 60):
        feed.publish()
    last = recorder.sequences[-1]
    assert [batch.sequence for batch in feed.replay(last - 1).batches] == [last - 1, last]
    assert feed.replay(last + 1) == Replay([], is_snapshot=False)
    for start in (0, last - 3, last + 2):  # the last one has followed another server
        replay, index = feed.replay(start), Index()
        [whole] = replay.batches
        index.apply(payload(whole, PAGE_SIZE))
        assert replay.is_snapshot and whole.sequence == last and index.blocks == recorder.index.blocks
        known: set[int] = set()
        for run in whole.stored:  # parents first
            assert run.parent is None or run.parent in known or run.parent not in index.blocks
            known.update(run.hashes)


@pytest.mark.parametrize("place", ["block_runs", "send"])
def test_a_failure_costs_readers_nothing_but_time(place: str, monkeypatch: pytest.MonkeyPatch):
    """After it they get the whole state, since nobody knows what they have got of the change."""
    simulation, feed, recorder = observed(24, page_size=PAGE_SIZE, max_running=4, max_step_tokens=16, max_context=40)
    draw = random.Random(5)
    for number, _ in enumerate(traffic(simulation, draw, 60)):
        if number % 7 == 3:
            with monkeypatch.context() as patch, contextlib.suppress(ZeroDivisionError):
                patch.setattr(*((feed_module, place) if place == "block_runs" else (recorder, place)), lambda _: 1 / 0)
                feed.publish()
        if number % 3 == 0:
            feed.publish()
            assert set(recorder.index.blocks) == cached(simulation.allocator)
    assert recorder.index.num_cleared > 1


@contextlib.contextmanager
def published(simulation: Simulation) -> Iterator[ZmqPublisher]:
    """Publishes the changes of a simulation until the block ends."""
    changes = PageChanges(PAGE_SIZE)
    simulation.allocator.changes = changes
    tcp = "tcp://127.0.0.1:*"
    publisher = ZmqPublisher(endpoint=tcp, replay_endpoint=tcp, topic="kv@pod@toy", page_size=PAGE_SIZE)
    feed = KvEventFeed(changes, publisher)
    feed.start()
    try:
        yield publisher
    finally:
        feed.stop()


def test_subscribers_that_come_early_late_and_again_agree_over_zeromq():
    simulation = Simulation(make_limits(page_size=PAGE_SIZE, max_running=4, max_step_tokens=16, max_context=40), 24)
    draw = random.Random(11)
    with published(simulation) as publisher, contextlib.ExitStack() as stack:
        ends = publisher.source.endpoint, publisher.source.replay_endpoint
        early = stack.enter_context(Subscriber(*ends))
        for _ in traffic(simulation, draw, 60):
            pass
        late = stack.enter_context(Subscriber(*ends))
        with Subscriber(*ends) as leaving:
            wait_for(lambda: leaving.hashes() == cached(simulation.allocator), lambda: leaving.error)
        for _ in traffic(simulation, draw, 60):
            pass
        for reader in (early, late):
            wait_for(lambda: reader.hashes() == cached(simulation.allocator), lambda: reader.error)  # noqa: B023
            assert check_prefixes(reader.index, PAGE_SIZE) and reader.topics <= {"kv@pod@toy"}
        assert late.num_replayed and early.next_sequence == late.next_sequence


def test_blocks_of_an_adapter_have_its_name():
    keys = [bytes([number] * 32) for number in (1, 2)]
    pages = [CachedPage(keys[0], None, (1, 2), "salt", "law"), CachedPage(keys[1], keys[0], (3, 4), "salt", "law")]
    [run] = feed_module.block_runs(pages)
    [event] = msgpack.unpackb(payload(EventBatch(0, 1.0, stored=(run,)), 2))[1]
    assert event[-2:] == ["law", [["law", "salt"], ["law"]]]
    [run] = feed_module.block_runs([dataclasses.replace(page, adapter="") for page in pages])
    [event] = msgpack.unpackb(payload(EventBatch(0, 1.0, stored=(run,)), 2))[1]
    assert event[-2:] == [None, [["salt"], None]]


def test_gateways_get_the_state_and_what_follows():
    simulation = Simulation(make_limits(page_size=PAGE_SIZE, max_running=4, max_step_tokens=16, max_context=40), 24)
    changes = PageChanges(PAGE_SIZE)
    simulation.allocator.changes = changes
    feed = KvEventFeed(changes)
    listen = Listen(gateway_port=0, add_gateway=add_gateway)
    with running(listen=listen) as server, grpc.insecure_channel(f"127.0.0.1:{server.handle.gateway_port}") as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        subscribe = pb.SubscribeKvEventsRequest
        with pytest.raises(grpc.RpcError, match="without --kv-events"):
            next(stub.SubscribeKvEvents(subscribe(), timeout=WAIT_SECONDS))
        assert server.edge.backend is not None
        object.__setattr__(server.edge.backend, "kv_events", feed)
        early = stub.SubscribeKvEvents(subscribe(), timeout=WAIT_SECONDS)
        wait_for(lambda: feed._readers)
        batches: list[pb.KvEventBatch] = []
        draw = random.Random(5)
        for _ in traffic(simulation, draw, 60):
            feed.publish()
        while not batches or batches[-1].sequence_number < feed._next_sequence - 1:
            batches.append(next(early))
        assert [batch.sequence_number for batch in batches] == list(range(len(batches)))
        assert rebuilt(batches) == {as_signed(each) for each in cached(simulation.allocator)}
        feed._history.clear()
        first = next(stub.SubscribeKvEvents(subscribe(), timeout=WAIT_SECONDS))
        assert (first.snapshot.index, first.snapshot.count) == (0, 1) and first.events[0].HasField("cleared")
        assert rebuilt([first]) == rebuilt(batches) and first.snapshot.blocks == len(rebuilt(batches))
        early.cancel()
        wait_for(lambda: not feed._readers)


def as_signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def rebuilt(batches: list[pb.KvEventBatch]) -> set[int]:
    """Returns the hashes that a gateway knows after these batches."""
    blocks: set[int] = set()
    for event in (event for batch in batches for event in batch.events):
        if event.HasField("cleared"):
            blocks.clear()
        blocks.difference_update(event.removed.block_hashes)
        for block in event.stored.blocks:
            assert len(block.token_ids) == block.block_size == PAGE_SIZE
            blocks.add(block.block_hash)
    return blocks


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"kv_events_topic": "a"}, "kv_events_topic needs kv_events_endpoint"),
        ({"kv_events": True, "prefix_cache": False}, "which prefix_cache turns off|prefix_cache is off"),
        ({"kv_events_endpoint": "5557"}, "it must be tcp://ADDRESS:PORT"),
        ({"kv_events_endpoint": "tcp://*:5557"}, "other machines can reach"),
    ],
)
def test_options_that_cannot_be_served_are_refused(options: dict, fault: str):
    with pytest.raises(ConfigError, match=fault):
        ServeConfig(**options)
    ServeConfig(kv_events_endpoint="tcp://*:5557", kv_events_replay_endpoint="tcp://[::]:5558", allow_insecure=True)


def test_an_endpoint_in_use_is_named():
    first = ZmqPublisher(endpoint="tcp://127.0.0.1:*", replay_endpoint="", topic="", page_size=1)
    try:
        with pytest.raises(ConfigError, match="kv_events_endpoint is .* cannot be bound: Address already in use"):
            ZmqPublisher(endpoint=first.source.endpoint, replay_endpoint="", topic="", page_size=1)
    finally:
        first.close()
