"""smg before three real replicas: its index of their caches, and what routing by it saves."""

import statistics
from pathlib import Path

from tests.fleet.load import Load
from tests.fleet.prompts import shared_prefixes
from tests.fleet.replicas import PAGE_SIZE, Gateway, Replica, gateway, replicas
from tests.kv_subscriber import Subscriber, check_prefixes
from tests.waiting import wait_for

NUM_GROUPS, NUM_REQUESTS = 18, 270


def indexed(entry: Gateway, replica: Replica) -> float:
    """Returns how many blocks of a replica smg knows."""
    found = entry.metrics("smg_kv_index_blocks")
    return next((number for labels, number in found.items() if replica.worker_url in labels), 0.0)


def test_independent_subscribers_rebuild_the_index_of_each_replica(tmp_path: Path):
    """Evictions included: the caches hold fewer pages than the prompts need."""
    prompts = shared_prefixes(12, 120, prefix_words=200, suffix_words=20, seed=1)
    with replicas(tmp_path, 3, "--num-pages=112") as fleet:
        readers = [Subscriber(*replica.events) for replica in fleet]
        with readers[0], readers[1], readers[2], gateway(tmp_path / "smg", fleet, "--policy=cache_aware") as entry:
            answers = Load(entry.url, prompts, max_tokens=8, concurrency=9).run()
            assert not [answer.error for answer in answers if answer.error]
            for replica, reader in zip(fleet, readers, strict=True):
                held = replica.audited()
                wait_for(lambda: reader.hashes() == held, lambda: f"{len(reader.hashes())} of {len(held)}")  # noqa: B023
                assert check_prefixes(reader.index, PAGE_SIZE) > 20
                wait_for(lambda: indexed(entry, replica) == len(held), lambda: indexed(entry, replica))  # noqa: B023
                print(
                    f"\n{len(held)} pages cached; events: {reader.index.num_stored} stored, "
                    f"{reader.index.num_removed} removed, {reader.next_sequence} batches"
                )
            assert sum(reader.index.num_removed for reader in readers) > 100
            print({name: entry.metrics(f"smg_kv_event_{name}_total") for name in ("batches", "gaps", "resyncs")})
            late = Subscriber(*fleet[0].events)
            with late:
                wait_for(lambda: late.hashes() == readers[0].hashes(), lambda: late.error)


def measured(tmp_path: Path, fleet: list[Replica], policy: str, prompts: list[str]) -> tuple[float, float, float]:
    """Returns prefill tokens, the median time to the first text, and the share of cached tokens, from empty caches."""
    names = [f"meshserve_{name}_tokens_total" for name in ("prefill", "admitted", "cached")]
    with gateway(tmp_path / f"smg {policy}", fleet, f"--policy={policy}") as entry:
        entry.call("POST", "/flush_cache")
        wait_for(lambda: not any(replica.audited() for replica in fleet))
        before = [sum(replica.metric(name) for replica in fleet) for name in names]
        answers = Load(entry.url, prompts, max_tokens=4, concurrency=6).run()
        assert not [answer.error for answer in answers if answer.error]
        after = [sum(replica.metric(name) for replica in fleet) for name in names]
        if policy == "cache_aware":
            for name in ("smg_cache_aware_policy_branch_total", "smg_kv_index_blocks"):
                print(name, entry.metrics(name))
    prefill, admitted, cached = (new - old for new, old in zip(after, before, strict=True))
    return prefill, statistics.median(answer.first_seconds for answer in answers), cached / admitted


def test_cache_aware_routing_against_round_robin(tmp_path: Path):
    """18 prefixes of about 600 tokens; the cache of a replica holds eight of them."""
    prompts = shared_prefixes(NUM_GROUPS, NUM_REQUESTS, prefix_words=400, suffix_words=12, seed=2)
    with replicas(tmp_path, 3, "--num-pages=384") as fleet:
        for replica in fleet:  # compiled programs run for the first time
            assert replica.metric("meshserve_ready") == 1
        found = {"round_robin": [], "cache_aware": []}
        for number in range(2):
            for policy in found if number else reversed(found):
                found[policy].append(measured(tmp_path, fleet, policy, prompts))
    for policy, rows in found.items():
        for prefill, first, share in rows:
            print(
                f"\n{policy}: {prefill:,.0f} prefill tokens, median first text {1e3 * first:.0f} ms, {share:.0%} cached"
            )
    best = {policy: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for policy, rows in found.items()}
    assert best["round_robin"][0] >= 1.5 * best["cache_aware"][0], best
    assert best["round_robin"][1] >= 2 * best["cache_aware"][1], best
