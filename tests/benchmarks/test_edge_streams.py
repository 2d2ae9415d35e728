"""Tests the benchmark of the server's fronts with a few short streams."""

import pytest

from meshserve.benchmarks.load import edge_streams


def test_every_front_is_measured_and_tabulated(capsys: pytest.CaptureFixture):
    arguments = [
        "--streams=3",
        "--step-ms=10",
        "--seconds=0.5",
        "--rounds=1",
        "--fronts",
        "grpc",
        "completions",
        "chat",
    ]
    assert edge_streams.main(arguments) == 0
    said = capsys.readouterr().out
    for front in ("grpc", "completions", "chat"):
        assert f"{front}, a step each 10 ms: 3 streams" in said


def test_figures_of_rounds_are_medians_with_the_least_and_the_most():
    def of(num_messages: int) -> edge_streams.Measured:
        gaps = [0.01] * 99 + [0.5]
        return edge_streams.Measured(
            num_streams=2,
            seconds=2.0,
            num_messages=num_messages,
            num_tokens=400,
            gaps=gaps,
            loop=1,
            cpu_seconds={1: 1.0},
        )

    lines = edge_streams.table({(5.0, "grpc"): [of(100), of(400), of(200)]}).splitlines()
    assert (
        lines[2].startswith("| 5 | grpc | 100 (50 to 200) | 200 (200 to 200) |") and "| 50% (50% to 50%) |" in lines[2]
    )
