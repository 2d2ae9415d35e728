"""Tests `meshserve top` on a server with a fake engine, and the figures that it computes from two readings."""

import io

import pytest
from rich.console import Console

from meshserve.runtime.api.request import Load
from meshserve.runtime.client.client import Client
from meshserve.runtime.client.dashboard.readings import Interval, Reading, with_metrics
from meshserve.runtime.client.dashboard.screen import SCREEN_LINES, screen
from meshserve.runtime.client.dashboard.top import Reader, show_top
from meshserve.runtime.commands.cli import main
from meshserve.runtime.server.lifecycle import Listen
from tests.runtime.loopback import INFO, LISTEN, running

PAGE = """
# HELP meshserve_requests_total Requests that have ended, by method and outcome.
# TYPE meshserve_requests_total counter
meshserve_requests_total{{method="Generate",outcome="stop"}} {stopped}
meshserve_requests_total{{method="Chat",outcome="stop"}} 1.0
meshserve_requests_total{{method="Chat",outcome="length"}} 0.0
# HELP meshserve_output_tokens_total Output tokens sent to callers.
# TYPE meshserve_output_tokens_total counter
meshserve_output_tokens_total {tokens}
# HELP meshserve_step_seconds Time of a step.
# TYPE meshserve_step_seconds histogram
meshserve_step_seconds_bucket{{le="0.01"}} {fast}
meshserve_step_seconds_bucket{{le="0.02"}} {all}
meshserve_step_seconds_bucket{{le="+Inf"}} {all}
meshserve_step_seconds_count {all}
meshserve_step_seconds_sum {total}
"""
STEP = "meshserve_step_seconds"


def reading(seconds: float, **numbers: float) -> Reading:
    values = {"stopped": 0, "tokens": 0, "fast": 0, "all": 0, "total": 0} | numbers
    return with_metrics(Reading(seconds=seconds, state="READY"), PAGE.format(**values))


def drawn(*readings: Reading, info=INFO, columns: int = 120) -> str:
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(screen("host:50051", info, readings), height=SCREEN_LINES)
    return console.file.getvalue()


def test_rates_means_and_quantiles_are_those_of_the_time_between():
    before = reading(10.0, tokens=100, fast=5, all=10, total=1.0, stopped=3)
    after = reading(12.0, tokens=300, fast=15, all=30, total=1.3, stopped=7)
    change = Interval(before, after)
    assert change.rate("meshserve_output_tokens_total") == 100.0
    assert after.outcomes == {"stop": 8.0, "length": 0.0} and after.values["meshserve_requests_total"] == 8.0
    assert change.mean(STEP) == pytest.approx(0.015)
    assert change.quantile(STEP, 0.25) == pytest.approx(0.005)  # 10 of 20 new steps took up to 0.01 s
    assert change.quantile(STEP, 0.75) == pytest.approx(0.015)
    assert change.quantile(STEP, 1.0) == pytest.approx(0.02)


def test_what_is_not_known_has_no_figure():
    change = Interval(reading(1.0, tokens=100, all=2, fast=1), reading(2.0, tokens=50, all=1, fast=0))
    assert change.rate("meshserve_output_tokens_total") is None, "the server was restarted"
    assert change.quantile(STEP, 0.5) is None
    same = Interval(reading(1.0), reading(1.0))
    assert same.rate("meshserve_output_tokens_total") is None and same.mean(STEP) is None
    assert same.rate("other") is None and same.quantile("other", 0.5) is None
    slow = PAGE.format(stopped=0, tokens=0, fast=0, all=0, total=0).replace('le="+Inf"} 0', 'le="+Inf"} 4')
    beyond = Interval(reading(1.0), with_metrics(Reading(seconds=2.0), slow))
    assert beyond.quantile(STEP, 0.9) == 0.02, "the last bound that is finite"


def test_the_screen_shows_the_load_and_the_times():
    load = Load(num_running=3, num_waiting=2, num_pages=100, num_free_pages=25)
    first = reading(10.0)
    last = reading(12.0, tokens=400, fast=0, all=4, total=0.06, stopped=4)
    last = Reading(**{**vars(last), "load": load})
    text = drawn(first, last)
    for words in ("READY  host:50051", "toy (8.6 B parameters, bfloat16) on 2 x cpu, TP size 2", "75% of 100 pages"):
        assert words in text
    assert "adapters" not in text
    values = {**last.values, "meshserve_adapters": 5.0, "meshserve_device_adapters": 2.0}
    assert "; adapters: 5, 2 on the devices" in drawn(first, Reading(**{**vars(last), "values": values}))
    lines = {line.strip("│ \n").split("  ")[0]: line for line in text.splitlines()}
    assert "15.0" in lines["step"] and lines["step"].count("-") == 0
    assert "200" in lines["running"], "tokens per second stand beside the running requests"
    assert "stop 2.0" in text
    assert len(text.splitlines()) == SCREEN_LINES
    narrow = drawn(first, last, columns=80)
    assert all(name in narrow for name in ("preempted/s", "KV cache", "75% of 100 pages", "running requests"))


def test_the_screen_of_a_server_that_tells_nothing():
    text = drawn(Reading(seconds=1.0, state="STARTING compiling the programs"), info=None)
    assert "STARTING compiling the programs" in text and "step, host part" in text


def test_a_server_is_read_and_drawn():
    console = Console(file=io.StringIO(), width=120, color_system=None)
    with running(listen=Listen(http_port=0, drain_seconds=LISTEN.drain_seconds)) as server:
        with Client(server.target) as client:
            reader = Reader(client, server.target, f"127.0.0.1:{server.handle.http_port}")

            def work(seconds: float) -> None:
                client.complete([1, 2, 3], max_tokens=20)

            assert show_top(reader, interval_seconds=0.0, num_screens=3, console=console, sleep=work) == 0
            assert reader.has_metrics and reader.read().values["meshserve_output_tokens_total"] == 40
            blind = Reader(client, server.target, "127.0.0.1:1")
            assert blind.read().load is not None and not blind.has_metrics
    text = console.file.getvalue()
    assert "toy" in text and "10% of 100 pages" in text and "Ctrl-C ends" in text
    assert "length" in text, "the outcome of the requests"


def test_the_command_prints_a_screen(capsys: pytest.CaptureFixture):
    with running(listen=Listen(http_port=0, drain_seconds=LISTEN.drain_seconds)) as server:
        metrics = f"--metrics=http://127.0.0.1:{server.handle.http_port}/metrics"
        assert main(["top", f"--target={server.target}", metrics, "--screens=1"]) == 0
    assert "READY" in capsys.readouterr().out
