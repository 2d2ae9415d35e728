"""Tests the page of `meshserve bench report`."""

import dataclasses
import json
import xml.dom.minidom
from pathlib import Path

import pytest

from meshserve.benchmarks.load import report
from meshserve.benchmarks.load.serving_report import Call, figures
from meshserve.runtime.api.errors import ConfigError

pytest.importorskip("matplotlib", reason="needs the extra plots")


def written(path: Path, *num_requests: int, error: str = "") -> Path:
    """Writes what `bench serve --json` writes for loads of these numbers of requests."""
    loads = []
    for number in num_requests:
        calls = [
            Call(num_input_tokens=4, sent=0.0, messages=[(0.1, 1), (0.3, 4)], ended=0.3, error=error)
            for _ in range(number)
        ]
        loads.append(dataclasses.asdict(figures(f"{number} open (closed loop)", calls)))
    path.write_text(json.dumps(loads))
    return path


def test_a_page_has_a_line_for_each_file_and_a_row_for_each_load(tmp_path: Path, capsys: pytest.CaptureFixture):
    first, second = written(tmp_path / "ours.json", 1, 4), written(tmp_path / "<b>theirs.json", 2)
    target = tmp_path / "page.html"
    assert report.main([str(first), str(second), "--output", str(target), "--title", "A & B"]) == 0
    text = target.read_text()
    assert "<h1>A &amp; B</h1>" in text and "<h2>ours</h2>" in text and "<h2>&lt;b&gt;theirs</h2>" in text
    assert text.count("<tr><td>") == 3 and "<td>4 open (closed loop)</td>" in text
    assert "<td>50.0</td>" in text, "the time per output token"
    plots = [f"<svg{part.partition('</svg>')[0]}</svg>" for part in text.split("<svg")[1:]]
    assert len(plots) == 4
    for plot in plots:
        xml.dom.minidom.parseString(plot)
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://creativecommons.org", "").replace(
        "http://purl.org", ""
    ), "the page loads nothing"


def test_loads_that_failed_are_told_and_not_drawn(tmp_path: Path):
    target = tmp_path / "page.html"
    assert report.main([str(written(tmp_path / "a.json", 2, error="UNAVAILABLE")), "--output", str(target)]) == 0
    assert "<tr class=failed>" in target.read_text()


@pytest.mark.parametrize("text", ["{", "[1]", '{"loads": [{}]}', "[]"])
def test_another_file_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="other.json"):
        report.main([str(path), "--output", str(tmp_path / "page.html")])
    with pytest.raises(ConfigError, match="none.json cannot be read"):
        report.main([str(tmp_path / "none.json")])
