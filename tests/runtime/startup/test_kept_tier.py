"""Tests that a server that is stopped and started again has its prefix cache, with real processes."""

from pathlib import Path
from typing import Any

import pytest

from meshserve.benchmarks.load.warm_restart import restart

SETTINGS: dict[str, Any] = {
    "model": "demo", "cpu_devices": 1, "dtype": "float32", "page_size": 16, "max_running": 2, "max_step_tokens": 64,
    "num_pages": 48, "max_context": 300, "host_cache_gib": 0.1, "logits_processors": False, "strict": True,
    "cache_dir": "",
}  # fmt: skip  # of 8 prompts with 13 pages each, the device holds three


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return SETTINGS | {"host_cache_dir": str(tmp_path / "tier")}


def test_a_restarted_server_has_the_pages_of_both_tiers(settings: dict[str, Any]) -> None:
    result = restart(settings, num_prompts=8, num_tokens=210)
    assert result.before.hit_rate > 0.9 and result.after.hit_rate >= 0.95 * result.before.hit_rate
    assert result.after.texts == result.before.texts and result.num_files > 8


def test_damaged_files_and_those_of_another_layout_are_not_used(settings: dict[str, Any]) -> None:
    result = restart(settings, num_prompts=8, num_tokens=210, num_damaged=3)
    assert 0.3 < result.after.hit_rate < result.before.hit_rate
    assert result.after.texts == result.before.texts
    result = restart(settings, num_prompts=8, num_tokens=210)
    assert result.after.hit_rate > 0.9, "damaged files have been written anew"
    result = restart(settings, num_prompts=8, num_tokens=210, changes={"page_size": 32, "num_pages": 24})
    assert result.after.hit_rate == 0.0
