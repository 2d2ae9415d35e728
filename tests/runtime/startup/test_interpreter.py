"""The garbage collector waits while a server starts, and works as usual afterwards, whatever became of the start."""

import gc

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.commands.cli import main
from meshserve.runtime.startup import serve


def test_the_garbage_collector_waits_during_a_start(monkeypatch: pytest.MonkeyPatch):
    usual, during = gc.get_threshold(), []

    def started(*_: object) -> int:
        during.append(gc.get_threshold())
        raise ConfigError("the address is in use")

    monkeypatch.setattr(serve, "serve_config_until_stopped", started)
    assert main(["serve", "demo"]) == 2
    assert during == [(50_000, *usual[1:])] and usual[0] < 50_000
    assert gc.get_threshold() == usual
