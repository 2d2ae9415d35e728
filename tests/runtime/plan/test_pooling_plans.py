"""Tests what a plan says of a server that embeds texts."""

import json

import pytest

from meshserve.runtime.commands.cli import main
from meshserve.runtime.resolve.buckets import declare_buckets


def planned(capsys: pytest.CaptureFixture, *flags: str) -> dict:
    assert main(["plan", "--model=qwen3-0.6b", "--target=h200:1", "--length=512", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_full_steps_of_texts_take_the_place_of_decode(capsys):
    """2 operations for each weight of the layers, and attention to half of a text; the head is not multiplied."""
    found = planned(capsys, "--task=embed")
    assert not found["decode"] and not found["prefill"] and found["processor_bytes"] == 0
    [roof] = [roof for roof in found["pooling"] if roof["context"] == 512]
    layer = 2 * (16 + 8) * 128 * 1024 + 3 * 3072 * 1024
    last_mlp = 3 * 3072 * 1024 * (1 - 1 / 512)
    products = 2 * (28 * layer - last_mlp) + 512 / 2 * 4 * 28 * 16 * 128
    assert roof["num_tokens"] == 8192 and roof["bound"] == "compute"
    assert roof["tokens_per_second"] == pytest.approx(989e12 / products, rel=0.002)
    assert found["best_tp"] == 1 and "embed" in found["reason"] and "texts of 512 tokens" in found["reason"]
    assert found["tp_sizes"][0]["tokens_per_second"] == pytest.approx(roof["tokens_per_second"])
    generating = planned(capsys)
    assert generating["decode"] and not generating["pooling"]
    assert found["num_programs"] < generating["num_programs"] / 5
    assert found["max_pages"] > generating["max_pages"]


def test_shapes_of_texts_only():
    buckets = declare_buckets(max_step_tokens=512, max_running=32, page_size=16, max_fused_tokens=64, is_pooling=True)
    assert [bucket.num_tokens for bucket in buckets] == [64, 128, 256, 512]
    assert all(bucket.is_pooling and not bucket.is_decode and bucket.num_requests == 32 for bucket in buckets)
    small = declare_buckets(max_step_tokens=8, max_running=2, page_size=16, is_pooling=True)
    assert [bucket.num_tokens for bucket in small] == [8]
