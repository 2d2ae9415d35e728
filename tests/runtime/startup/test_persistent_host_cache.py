"""Tests that a server that is stopped and started again has its prefix cache, with real processes."""

from pathlib import Path
from typing import Any

import pytest

from meshserve.benchmarks.load.warm_restart import damage, random_prompts, serve
from tests import checkpoints

SETTINGS: dict[str, Any] = {
    "cpu_devices": 1, "dtype": "float32", "page_size": 16, "max_running": 2, "max_step_tokens": 16,
    "num_pages": 48, "max_context": 300, "host_cache_gib": 0.1, "logits_processors": False, "strict": True,
    "cache_dir": "",
}  # fmt: skip  # of 8 prompts with 13 pages each, the device holds three


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    model = checkpoints.truncated_demo(tmp_path / "model", 1)
    return SETTINGS | {"model": str(model), "host_cache_dir": str(tmp_path / "tier")}


def test_a_restarted_server_has_the_pages_of_both_tiers_that_are_whole(settings: dict[str, Any]) -> None:
    """Each start is of a process with the files of the one before."""
    directory, prompts = Path(settings["host_cache_dir"]), random_prompts(8, 210)
    before, _ = serve(settings, prompts, num_passes=2)
    assert before.hit_rate > 0.9 and damage(directory, 0) > 8
    after, _ = serve(settings, prompts)
    assert after.hit_rate >= 0.95 * before.hit_rate and after.texts == before.texts
    damage(directory, 3)
    (directory / "a.kv").symlink_to("nowhere")
    (directory / "b.kv").mkdir()
    after, _ = serve(settings, prompts)
    assert 0.3 < after.hit_rate < before.hit_rate and after.texts == before.texts, "damaged files are not used"
    after, _ = serve(settings, prompts)
    assert after.hit_rate > 0.9, "damaged files have been written anew, whatever else there is"
    after, _ = serve(settings | {"page_size": 32, "num_pages": 24}, prompts)
    assert after.hit_rate == 0.0, "files of another layout are not used"
