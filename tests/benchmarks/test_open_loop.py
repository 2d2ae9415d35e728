"""Tests the search for a rate within latency bounds: draws, clock, search, table, and runs of both engines."""

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshserve.benchmarks.lib.open_loop import (
    LoadClock,
    OpenLoop,
    RateResult,
    highest_rate,
    next_rate,
    run_rate,
    run_rates,
)
from meshserve.benchmarks.lib.workloads import Work
from meshserve.benchmarks.load import comparison, open_loop
from meshserve.benchmarks.load.comparison import Engine
from meshserve.benchmarks.load.open_loop import table

SEARCH = OpenLoop(input_tokens="uniform:3:5", output_tokens="uniform:2:6", first_rate=16.0, first_ms=2000.0)


def result(rate: float, gap_p99: float, *, is_stopped: bool = False, first_p99: float = 100.0) -> RateResult:
    return RateResult(
        rate=rate, num_requests=10, num_tokens=300, num_messages=200, seconds=2.0, gap_p50=10.0, gap_p99=gap_p99,
        first_p50=50.0, first_p99=first_p99, is_stopped=is_stopped,
        is_within=not is_stopped and gap_p99 <= 50.0 and first_p99 <= 2000.0,
    )  # fmt: skip


def test_rates_share_their_arrivals_and_no_prompt():
    works, arrivals = SEARCH.requests(16.0, 15.0, 0)
    faster_works, faster = SEARCH.requests(32.0, 15.0, 0)
    assert (len(works), len(faster_works)) == (240, 480)
    assert faster[:240] == pytest.approx([time / 2 for time in arrivals])
    assert works[:100] != faster_works[:100]
    assert (works, arrivals) == SEARCH.requests(16.0, 15.0, 0)


def test_gaps_and_first_tokens_by_hand():
    works = [Work([1], 4), Work([2], 2)]
    clock = LoadClock(works, [0.5, 1.0], SEARCH)
    for index, now, num_tokens in ((0, 0.6, 1), (1, 1.3, 1), (0, 0.63, 2), (0, 0.63, 0), (1, 1.36, 1), (0, 0.65, 1)):
        clock.add(index, now, num_tokens)
    found = clock.result(16.0, 2.0, False)
    # Gaps of 30, 60 and 20 ms: the message with two tokens ends one gap.
    assert (found.num_tokens, found.num_messages, found.tokens_per_second) == (6, 5, 3.0)
    assert (found.gap_p50, found.gap_p99) == (pytest.approx(30), pytest.approx(59.4))
    assert (found.first_p50, found.first_p99) == (pytest.approx(200), pytest.approx(298))
    assert found.verdict == "beyond"


def test_a_rate_is_hopeless_when_its_p97_is_beyond_a_bound():
    works, arrivals = [Work([1], 11)] * 10, [0.0] * 10
    clock = LoadClock(works, arrivals, SEARCH)
    for index in range(10):
        clock.add(index, 0.1, 1)
    for count in range(1, 4):
        clock.add(0, 0.1 + 0.06 * count, 1)
    assert not clock.is_hopeless(1.0)  # 3 of 100 gaps are long
    clock.add(0, 0.4, 1)
    assert clock.is_hopeless(1.0)


def test_a_rate_is_hopeless_when_requests_wait_or_never_end():
    works, arrivals = [Work([1], 11)] * 10, [0.0] * 10
    assert not LoadClock(works, arrivals, SEARCH).is_hopeless(1.9)
    assert LoadClock(works, arrivals, SEARCH).is_hopeless(2.1)
    clock = LoadClock(works, arrivals, SEARCH)
    for index in range(10):
        clock.add(index, 0.1, 1)
    assert not clock.is_hopeless(2.5) and clock.is_hopeless(2.6)  # 2 s to a first token, 11 x 50 ms


@pytest.mark.parametrize("capacity", [3.0, 15.9, 16.0, 21.0, 100.0])
def test_the_search_brackets_the_highest_rate(capacity: float):
    results: list[RateResult] = []
    while (rate := next_rate(16.0, results)) is not None:
        results.append(result(rate, 40.0 if rate <= capacity else 60.0))
        assert len(results) < 16
    assert len({each.rate for each in results}) == len(results)
    within = max(each.rate for each in results if each.is_within)
    beyond = min(each.rate for each in results if not each.is_within)
    assert within <= capacity < beyond and beyond / within == pytest.approx(2 ** (1 / 16))
    assert within < highest_rate(results, 50.0) < beyond


def test_the_highest_rate_is_interpolated_between_whole_runs_only():
    assert highest_rate([result(16, 25.0), result(20, 100.0)], 50.0) == pytest.approx(18.0)
    assert highest_rate([result(16, 25.0), result(20, 100.0, is_stopped=True)], 50.0) == 16
    assert highest_rate([result(16, 25.0), result(20, 30.0, first_p99=9e3)], 50.0) == 16
    assert highest_rate([result(16, 100.0)], 50.0) == 0.0
    assert highest_rate([result(16, 40.0)], 50.0) == 16
    # A rate above one that missed its bounds does not count.
    assert highest_rate([result(16, 25.0), result(20, 100.0), result(24, 40.0)], 50.0) == pytest.approx(18.0)


def test_the_table_has_the_ratio_of_the_highest_rates():
    engines = {"ours": Engine("meshserve", "", {}), "vllm": Engine("vLLM", "", {})}
    results = {"ours": [result(16, 25.0), result(20, 100.0)], "vllm": [result(16, 40.0), result(20, 100.0)]}
    lines = table(SEARCH, results, engines).splitlines()
    assert lines[0] == "| | meshserve | vLLM | meshserve : vLLM |"
    assert lines[2].endswith(" ms, uniform:3:5 tokens in, uniform:2:6 out | 18.0 | 17.0 | 1.06 |")
    assert lines[6] == "| 16.00 | meshserve | 10.0, 25.0 | 50, 100 | 150 | 1.50 | within |"
    assert [line.split(" | ")[1] for line in lines[6:]] == ["meshserve", "vLLM", "meshserve", "vLLM"]
    assert table(SEARCH, {"ours": results["ours"]}, engines).splitlines()[2].endswith("| 18.0 |  |")


class FakeEngine:
    """Serves `rate` tokens per second, one request after the other, and counts those that were cancelled."""

    def __init__(self, token_seconds: float, error: str = ""):
        self.token_seconds, self.error = token_seconds, error
        self.lock, self.num_cancelled = asyncio.Lock(), 0

    async def stream(self, work: Work, temperature: float) -> AsyncIterator[int]:
        if self.error:
            raise RuntimeError(self.error)
        try:
            async with self.lock:
                for _ in range(work.max_tokens):
                    await asyncio.sleep(self.token_seconds)
                    yield 1
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def test_a_rate_within_the_bounds_runs_to_its_end():
    engine = FakeEngine(0.0)
    found = asyncio.run(run_rate(engine.stream, SEARCH, 100.0, 0.3, 0))
    works, _ = SEARCH.requests(100.0, 0.3, 0)
    assert (found.num_requests, found.num_tokens) == (30, sum(work.max_tokens for work in works))
    assert found.num_messages == found.num_tokens and not found.is_stopped and engine.num_cancelled == 0


def test_a_rate_far_beyond_the_bounds_ends_early():
    engine = FakeEngine(0.06)  # a request takes 0.24 s, and 30 arrive per second
    found = asyncio.run(run_rate(engine.stream, SEARCH, 30.0, 20.0, 0))
    assert found.is_stopped and found.verdict == "stopped early" and found.seconds < 15 and engine.num_cancelled > 0


def test_a_rate_with_failed_requests_names_the_first_error():
    found = asyncio.run(run_rate(FakeEngine(0.0, "full\nmore").stream, SEARCH, 100.0, 0.2, 0))
    assert not found.is_within and found.verdict == "failed: RuntimeError: full" and math.isnan(found.gap_p99)


def test_no_rate_begins_without_time_for_it():
    search = OpenLoop(
        input_tokens="fixed:3", output_tokens="fixed:2", first_rate=50.0, arrival_seconds=0.2, warm_up_seconds=0.1,
        max_seconds=0.5,
    )  # fmt: skip
    lines: list[str] = []
    results = asyncio.run(run_rates(FakeEngine(0.0).stream, search, lines.append))
    assert 1 <= len(results) <= 3 and len(lines) == len(results)
    given = OpenLoop(**{**vars(search), "rates": (20.0, 40.0), "max_seconds": 60.0})
    results = asyncio.run(run_rates(FakeEngine(0.0).stream, given, lines.append))
    assert [each.rate for each in results] == [20.0, 40.0]


VLLM = {
    "__init__": """
from .sampling_params import SamplingParams
__version__ = "0"
class AsyncEngineArgs:
    def __init__(self, **options): self.options = options
""",
    "sampling_params": """
class RequestOutputKind: DELTA = 1
class SamplingParams:
    def __init__(self, **fields): self.__dict__ |= fields
""",
    "usage": "",
    "usage.usage_lib": "class UsageContext: OPENAI_API_SERVER = 7",
    "v1": "",
    "v1.engine": "",
    "v1.engine.async_llm": """
import asyncio, types

def output(number): return types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[7] * number)])

class AsyncLLM:
    @classmethod
    def from_engine_args(cls, arguments, usage_context):
        asyncio.get_running_loop()
        assert usage_context == 7 and arguments.options["max_model_len"] == 4096, arguments.options
        engine = cls()
        engine.names = set()
        engine.vllm_config = types.SimpleNamespace(cache_config=types.SimpleNamespace(num_gpu_blocks=7, block_size=16))
        return engine

    async def generate(self, prompt, params, request_id):
        assert request_id not in self.names and params.ignore_eos and params.output_kind == 1
        self.names.add(request_id)
        for number in [2] + [1] * (params.max_tokens - 2):
            await asyncio.sleep(0.001)
            yield output(number)

    def shutdown(self): asyncio.get_running_loop()
""",
}


def fake_vllm(folder: Path) -> Path:
    """Returns an interpreter with nothing but a stand-in for vLLM, whose first message of a request has two tokens."""
    packages = {name.rpartition(".")[0] for name in VLLM if "." in name} | {"v1", "usage"}
    for name, text in VLLM.items():
        parts = name.split(".")
        path = folder / "vllm" / Path(*parts)
        path = path / "__init__.py" if name in packages else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} -S "$@"\n')
    interpreter.chmod(0o755)
    return interpreter


def test_a_server_and_vllms_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.setattr(comparison, "model_config_json", lambda model: {})
    options = {"cpu_devices": 1, "num_pages": 64, "cache_dir": "", "max_step_tokens": 8, "max_running": 4,
               "logits_processors": "false", "max_context": 64}  # fmt: skip
    status = open_loop.main(
        ["--model=demo", "--dtype=float32", *(f"--set-all={name}={value}" for name, value in options.items()),
         "--engines", "ours", "vllm", f"--python-vllm={fake_vllm(tmp_path)}", "--rates", "4", "8", "--seconds=1",
         "--warm-up-seconds=1", "--p99-ms=2000", "--first-p99-ms=20000", "--input-tokens=uniform:3:6",
         "--output-tokens=uniform:3:5", "--vocab-size=100", f"--json={tmp_path / 'found.json'}",
         f"--markdown={tmp_path / 'table.md'}"]
    )  # fmt: skip
    said = capfd.readouterr()
    assert status == 0, said.err
    assert said.err.count(" requests/s: gaps P50") == 4  # a line as each rate ends
    found = json.loads((tmp_path / "found.json").read_text())
    for report in found.values():
        assert [each["num_requests"] for each in report["rates"]] == [4, 8]
        assert all(each["is_within"] for each in report["rates"]), report["rates"]
    ours, theirs = ([each["num_tokens"] for each in found[key]["rates"]] for key in ("ours", "vllm"))
    assert ours == theirs
    assert [each["num_messages"] for each in found["vllm"]["rates"]] == [theirs[0] - 4, theirs[1] - 8]
    assert found["vllm"]["kv_tokens"] == 112 and found["vllm"]["version"] == "vllm 0"
    assert "meshserve bench open_loop --model=demo" in (tmp_path / "table.md").read_text()
    assert said.out.count("| within |") == 4
