"""Every replica of a fleet is replaced while streams run: none fails, and each text is what one replica alone says."""

import threading
from pathlib import Path
from typing import Any

import pytest

from meshserve import LLM, SamplingParams
from tests.fleet.load import Answer, Load
from tests.fleet.prompts import shared_prefixes
from tests.fleet.replicas import Gateway, Replica, gateway, replicas, start
from tests.waiting import wait_for

NUM_STREAMS, MAX_TOKENS = 1_000, 24
LEAST_GAP = 1e-3  # nats
MOST_ROUNDS = 20  # rounds of the same prompts; streams go on until every replica has been replaced


@pytest.fixture(scope="module")
def expected(pytestconfig: pytest.Config) -> dict[str, str]:
    """Returns 1,000 prompts and what a single engine says to them.

    Prompts with a step whose two likeliest tokens nearly tie are left out: float32 rounds otherwise in larger steps.
    """
    if not pytestconfig.getoption("--fleet"):
        return {}
    prompts = shared_prefixes(50, NUM_STREAMS * 11 // 10, prefix_words=16, suffix_words=8, seed=3)
    with LLM("demo", tp=1, dtype="float32", page_size=16, max_running=64, max_step_tokens=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
        outputs = [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]
    texts = {
        prompt: output.text
        for prompt, output in zip(prompts, outputs, strict=True)
        if min(gap(position) for position in output.logprobs) > LEAST_GAP
    }
    print(f"\n{len(prompts) - len(texts)} of {len(prompts)} prompts are left out as ties")
    return dict(list(texts.items())[:NUM_STREAMS])


def gap(position: dict[int, Any]) -> float:
    """Returns by how much the likeliest token is ahead, in nats."""
    first, second = sorted((found.logprob for found in position.values()), reverse=True)[:2]
    return first - second


def surge(entry: Gateway, old: Replica, new: Replica) -> None:
    """A new replica joins before the old one leaves the gateway and drains."""
    new.wait()
    entry.replace(old, new)
    assert old.stop() == 0


def in_place(entry: Gateway, old: Replica, folder: Path) -> Replica:
    """The old replica drains, known to the gateway or not, before the new one starts: there is no spare accelerator."""
    assert old.stop() == 0
    entry.remove(old)
    new = start(folder)
    new.wait()
    entry.call("POST", "/workers", {"url": new.worker_url})
    wait_for(lambda: new.worker_url in entry.healthy(), entry.workers)
    return new


@pytest.mark.parametrize(("way", "run"), [("surge", 0), ("surge", 1), ("surge", 2), ("in place", 0)])
def test_no_stream_fails_while_each_replica_is_replaced(way: str, run: int, expected: dict[str, str], tmp_path: Path):
    prompts, texts = list(expected), list(expected.values())
    assert len(prompts) == NUM_STREAMS
    with replicas(tmp_path, 3) as fleet, gateway(tmp_path / "smg", fleet, "--policy=round_robin") as entry:
        is_changed = threading.Event()
        load = Load(entry.url, prompts * MOST_ROUNDS, MAX_TOKENS, concurrency=6)
        load.is_enough = lambda number: number >= NUM_STREAMS and is_changed.is_set()
        sender = threading.Thread(target=load.run)
        sender.start()
        at: list[int] = []
        for number, old in enumerate(fleet[:3]):
            wait_for(lambda: load.num_done > (number + 1) * NUM_STREAMS // 5)  # noqa: B023
            folder = tmp_path / f"new{number}"
            if way == "surge":
                fleet.append(start(folder))
                surge(entry, old, fleet[-1])
            else:
                fleet.append(in_place(entry, old, folder))
            at.append(load.num_done)
        wait_for(lambda: fleet[-1].metric("meshserve_decode_tokens_total"))  # streams also reach the last one
        is_changed.set()
        sender.join()
        served = [replica.metric("meshserve_decode_tokens_total") for replica in fleet[3:]]
        report(way, run, load.answers, texts, at, served)


def report(way: str, run: int, answers: list[Answer], texts: list[str], at: list[int], served: list[float]) -> None:
    failed = [answer.error for answer in answers if answer.error]
    other = [number for number, answer in enumerate(answers) if answer.text != texts[number % NUM_STREAMS]]
    print(
        f"\n{way}, run {run + 1}: {len(answers)} streams, {len(failed)} failed, {len(other)} with another text; "
        f"replaced after {at} streams; tokens of the new replicas: {served}"
    )
    assert not failed, failed[:3]
    assert not other, [(answers[number].text, texts[number % NUM_STREAMS]) for number in other[:3]]
    assert len(answers) >= NUM_STREAMS and at[-1] < len(answers) and all(served), "streams must run meanwhile"
