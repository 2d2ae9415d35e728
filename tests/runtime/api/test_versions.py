"""meshserve run from its source, without being installed."""

import importlib.metadata
from pathlib import Path

import pytest

import meshserve
from meshserve.runtime.api.versions import installed_version
from meshserve.runtime.commands.cli import main

ROOT = Path(__file__).parents[3]


def test_a_package_that_is_not_installed_has_an_unknown_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert installed_version() == importlib.metadata.version("meshserve") == meshserve.__version__

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert installed_version() == meshserve.__version__ == "unknown"
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == "meshserve unknown\n"


def test_nothing_else_asks_for_versions():
    """A server that did would load its model, and then fail if it is not installed."""
    paths = [path for folder in ("runtime", "sharding", "kernels", "src") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in paths if "importlib.metadata" in path.read_text()] == ["versions.py"]
