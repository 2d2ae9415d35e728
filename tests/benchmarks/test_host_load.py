"""Tests the benchmark of the host beside a simulated device, as a newcomer runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshserve.benchmarks.load import edge_streams, host_load
from meshserve.protos import inference_pb2 as pb

_SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/load/host_load.py"


@pytest.mark.timeout(120)
def test_all_streams_get_a_token_for_each_step_of_the_device():
    arguments = "--streams=8 --step-ms=20 --decode-steps=2 --seconds=2 --warm-up-seconds=1".split()
    run = subprocess.run([sys.executable, str(_SCRIPT), *arguments], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    found = re.search(r"a step ([\d.]+) ms, [\d.]+ of the device's 20.0 ms", run.stdout)
    assert found, run.stdout
    assert 18.0 <= float(found[1]) <= 80.0  # never faster than the device; a busy machine may be slower


@pytest.mark.timeout(120)
def test_requests_that_start_together_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(host_load, "_TIMES", 2)
    assert host_load.main("--streams=4 --together=3 --step-ms=1 --prompt-ms=20".split()) == 0
    out = capsys.readouterr().out
    found = re.search(r"3 requests .*; ([\d.]+) ms .*first tokens after ([\d.]+) to ([\d.]+) ms", out)
    assert found, out
    assert 119.0 <= float(found[1]) and 20.0 <= float(found[2]) <= float(found[3]) <= float(found[1])


def test_the_server_warms_up_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []

    def measure_server(command: Any, requests: Any, seconds: float, warm_up_seconds: float) -> edge_streams.Measured:
        asked.extend((seconds, warm_up_seconds))
        return edge_streams.Measured(
            num_streams=1, seconds=1.0, num_messages=2, num_tokens=2, gaps=[0.5, 0.5], loop=0, cpu_seconds={0: 0.1}
        )

    monkeypatch.setattr(host_load, "measure_server", measure_server)
    assert host_load.main(["--streams=1", "--seconds=4", "--warm-up-seconds=7"]) == 0
    assert asked == [4.0, 7.0]


@pytest.mark.timeout(120)
def test_streams_that_end_too_soon_give_no_figures():
    command = [sys.executable, str(_SCRIPT), "--serve", "--streams=2", "--step-ms=5", "--decode-steps=2"]
    few = pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[1]), sampling=pb.SamplingParams(max_tokens=8))
    before = os.sched_getaffinity(0)
    with pytest.raises(RuntimeError, match="2 of 2 streams ended too soon"):
        edge_streams.measure_server(command, [few, few], 1.0, warm_up_seconds=0.2)
    assert os.sched_getaffinity(0) == before
