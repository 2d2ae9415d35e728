"""Tests the load generator: its random draws, its figures, and its counts against a server."""

import argparse
import json
import math
import random
import statistics
from pathlib import Path

import pytest

from meshserve.benchmarks.lib.traffic import Lengths, Traffic
from meshserve.benchmarks.load import serve
from meshserve.benchmarks.load.serving_report import Call, figures, open_requests, text, tokens_by_second
from meshserve.runtime.api.errors import ConfigError
from tests.runtime.loopback import running


def test_lengths_follow_their_distribution():
    source = random.Random(0)
    assert {Lengths.parse("fixed:7").draw(source) for _ in range(9)} == {7}
    assert {Lengths.parse("uniform:3:5").draw(source) for _ in range(99)} == {3, 4, 5}
    drawn = [Lengths.parse("lognormal:100:1:400").draw(source) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.1) and max(drawn) == 400 and min(drawn) >= 1


@pytest.mark.parametrize("wrong", ["7", "fixed:7:8", "uniform:5:3", "fixed:0", "normal:1:2", "lognormal:100:x:2"])
def test_wrong_lengths_are_refused(wrong: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        serve.main(["--input-tokens", wrong])
    assert "argument --input-tokens" in capsys.readouterr().err


def test_prompts_share_their_beginnings():
    traffic = Traffic(
        num_requests=40, input_lengths=Lengths.parse("uniform:1:9"), output_lengths=Lengths.parse("fixed:4"),
        num_prefix_tokens=16, num_prefixes=3, vocab_size=64,
    )  # fmt: skip
    works = traffic.requests()
    assert len({tuple(work.prompt_token_ids[:16]) for work in works}) == 3
    assert all(17 <= len(work.prompt_token_ids) <= 25 and work.max_tokens == 4 for work in works)
    assert all(0 <= token < 64 for work in works for token in work.prompt_token_ids)
    assert works == traffic.requests()


def test_arrivals_are_a_poisson_process():
    traffic = Traffic(
        num_requests=8000, input_lengths=Lengths.parse("fixed:1"), output_lengths=Lengths.parse("fixed:1")
    )
    times = traffic.arrivals(20.0)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(0.05, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.05)  # equal to the mean, so exponential
    assert times == sorted(times) and set(traffic.arrivals(math.inf)) == {0.0}


CALLS = [
    Call(num_input_tokens=10, sent=0.0, due=0.0, messages=[(0.1, 1), (0.3, 1), (0.4, 2)], ended=0.4),
    Call(num_input_tokens=20, sent=1.0, due=0.5, messages=[(2.0, 1)], ended=2.0),
    Call(num_input_tokens=99, sent=1.5, due=1.5, ended=1.75, error="UNAVAILABLE"),
]


def test_figures_by_hand():
    found = figures("a load", CALLS, {"ttft": 100.0, "tpot": 150.0})
    assert (found.completed, found.failed, found.errors) == (2, 1, {"UNAVAILABLE": 1})
    assert (found.duration, found.total_input_tokens, found.total_output_tokens) == (2.0, 30, 5)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (1.0, 2.5, 17.5)
    assert found.request_goodput == 0.5
    assert (found.max_output_tokens_per_s, found.max_concurrent_requests) == (4, 2)
    assert found.max_lateness_ms == pytest.approx(500)
    assert (found.ttft.mean, found.ttft.median) == (pytest.approx(550), pytest.approx(550))
    assert found.ttft.p99 == pytest.approx(991)
    assert found.tpot.mean == pytest.approx(100)  # 0.3 s over three tokens; a request with a single token has none
    assert (found.itl.mean, found.itl.p99) == (pytest.approx(150), pytest.approx(199))
    assert found.e2el.median == pytest.approx(700)
    assert tokens_by_second(CALLS) == [4, 0, 1]
    assert open_requests(CALLS)[-1] == (2.0, 0)


def test_the_text_is_that_of_vllms_benchmark():
    lines = text(figures("a load", CALLS)).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert f"{'Successful requests:':<40} 2" in lines
    assert f"{'Output token throughput (tok/s):':<40} 2.50" in lines
    assert "---------------Time to First Token----------------" in lines
    assert f"{'P99 TTFT (ms):':<40} 991.00" in lines and f"{'Mean TPOT (ms):':<40} 100.00" in lines
    assert not any("goodput" in line for line in lines)
    assert all("nan" in line for line in text(figures("none", CALLS[2:])).splitlines() if "TTFT" in line)


def test_loads_on_a_server(tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("matplotlib")
    with running() as server:
        arguments = [
            f"--target={server.target}", "--rate", "200", "inf", "--concurrency", "3", "--requests=20",
            "--input-tokens=uniform:1:9", "--output-tokens=uniform:2:12", "--prefix-tokens=8", "--goodput",
            "e2el:1e9", f"--json={tmp_path / 'figures.json'}", f"--plot={tmp_path / 'load.png'}",
        ]  # fmt: skip
        assert serve.main(arguments) == 0
        assert server.engine.num_submits == 3 * 21  # including a warm-up request each
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [load["completed"] for load in found] == [20] * 3 and not any(load["failed"] for load in found)
    for load in found:
        assert 20 * 9 <= load["total_input_tokens"] <= 20 * 17 and 20 * 2 <= load["total_output_tokens"] <= 20 * 12
        assert (
            load["request_goodput"] == pytest.approx(load["request_throughput"]) == pytest.approx(20 / load["duration"])
        )
        assert 0 < load["ttft"]["median"] <= load["ttft"]["p99"] <= load["e2el"]["p99"]
    assert found[1]["max_concurrent_requests"] > 3 >= found[2]["max_concurrent_requests"]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("Serving Benchmark Result") == 3


def test_the_same_load_twice_is_two_loads(tmp_path: Path):
    path = tmp_path / "figures.json"
    with running() as server:
        arguments = ["--rate", "inf", "inf", "--concurrency", "2", "2", "--requests=4", "--input-tokens=fixed:8"]
        assert serve.main([f"--target={server.target}", *arguments, "--output-tokens=fixed:2", f"--json={path}"]) == 0
        assert server.engine.num_submits == 4 * 5  # including a warm-up request each
    assert [load["load"] for load in json.loads(path.read_text())] == [
        "inf requests/s (Poisson)",
        "inf requests/s (Poisson), 2",
        "2 open (closed loop)",
        "2 open (closed loop), 2",
    ]


def test_the_defaults_fit_the_server(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The fake model has a context of 64 tokens."""
    path = tmp_path / "figures.json"
    with running() as server:
        assert serve.main([f"--target={server.target}", "--requests=4", "--concurrency=2", f"--json={path}"]) == 0
    [load] = json.loads(path.read_text())
    assert (load["completed"], load["total_input_tokens"], load["total_output_tokens"]) == (4, 4 * 48, 4 * 16)
    assert "toy on 2 x cpu, meshserve 0.1.0: fixed:48 input tokens, fixed:16 output" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "prefix", "room", "lengths"),
    [
        ((None, None), 0, 32_768, ("fixed:1024", "fixed:128")),
        ((None, None), 0, 400, ("fixed:300", "fixed:100")),
        ((None, "uniform:2:60"), 0, 100, ("fixed:40", "uniform:2:60")),
        (("fixed:90", None), 0, 100, ("fixed:90", "fixed:25")),
        ((None, None), 92, 100, ("fixed:6", "fixed:2")),
        (("fixed:5000", "fixed:7"), 0, 100, ("fixed:5000", "fixed:7")),  # what is given is sent
    ],
)
def test_lengths_that_are_not_given(given, prefix: int, room: int, lengths: tuple[str, str]):
    given = [Lengths.parse(text) if text else None for text in given]
    options = argparse.Namespace(input_tokens=given[0], output_tokens=given[1], prefix_tokens=prefix)
    serve.fit_lengths(options, room)
    assert (str(options.input_tokens), str(options.output_tokens)) == lengths


def test_a_prefix_that_leaves_no_room_is_an_error():
    options = argparse.Namespace(input_tokens=None, output_tokens=None, prefix_tokens=60)
    with pytest.raises(ConfigError, match="--prefix-tokens is 60, and a request may have 64 tokens .* Use 56 or fewer"):
        serve.fit_lengths(options, 64)


def test_a_load_that_failed_draws_no_plot(tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("matplotlib")
    with running() as server:
        plot = tmp_path / "load.png"
        flags = ["--input-tokens=fixed:100", "--requests=2", "--concurrency=1", f"--plot={plot}"]
        assert serve.main([f"--target={server.target}", *flags]) == 1
        assert not plot.exists()
    assert "No plot is drawn, because no request of 1 open (closed loop) succeeded" in capsys.readouterr().err


def test_the_second_in_which_a_load_ends_is_not_plotted():
    whole_seconds = pytest.importorskip("meshserve.benchmarks.load.serving_plots").whole_seconds
    assert (whole_seconds([4, 5, 1]), whole_seconds([3])) == ([4, 5], [3])


def test_the_plot_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    drawn: list = []
    monkeypatch.setattr(figure_class, "savefig", lambda figure, path: drawn.append(figure))
    with running() as server:
        flags = ["--requests=6", "--concurrency", "1", "3", "--input-tokens=fixed:8", "--output-tokens=fixed:8"]
        assert serve.main([f"--target={server.target}", *flags, f"--plot={tmp_path / 'load.png'}"]) == 0
    [figure] = drawn
    title = figure.get_suptitle()
    assert "toy on 2 x cpu" in title and "fixed:8 tokens in, fixed:8 out, 6 requests per load" in title
    curve = next(axes for axes in figure.axes if axes.get_title() == "Time per output token against throughput")
    lines = {line.get_label(): line for line in curve.get_lines()}
    assert set(lines) == {"median", "p99"} and all(len(line.get_xdata()) == 2 for line in lines.values())
    assert list(lines["median"].get_xdata()) == sorted(lines["median"].get_xdata())
    assert {text.get_text() for text in curve.texts} == {"1 open (closed loop)", "3 open (closed loop)"}


def test_refused_requests_count_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture):
    with running() as server:
        path = tmp_path / "figures.json"
        arguments = ["--input-tokens=fixed:100", "--requests=3", "--concurrency=1", f"--json={path}"]
        assert serve.main([f"--target={server.target}", *arguments]) == 1
    [load] = json.loads(path.read_text())
    assert (load["completed"], load["errors"], load["output_throughput"]) == (0, {"INVALID_ARGUMENT": 3}, 0)
    printed = capsys.readouterr()
    assert "nan" not in printed.out and "The first failure: INVALID_ARGUMENT" in printed.err
