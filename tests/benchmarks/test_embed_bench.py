"""Tests the benchmark of embeddings with a tiny model, in the process and against a server."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshserve.benchmarks.baselines import vllm_embed
from meshserve.benchmarks.load import embed
from meshserve.runtime.api.errors import ConfigError
from tests.checkpoints import TINY
from tests.runtime.server.test_retrieval_methods import EMBEDDER, engine_of, retrieving


def figures(path: Path, *arguments: str) -> dict:
    assert embed.main([*arguments, f"--json={path}"]) == 0
    return json.loads(path.read_text())


def test_the_engine(tmp_path, capsys):
    raw = {key: value for key, value in TINY.items() if key != "eos_token_id"}
    raw |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    settings = ["page_size=16", "num_pages=64", "max_running=8", "max_step_tokens=64", "cache_dir="]
    found = figures(
        tmp_path / "out.json",
        f"--model={tmp_path}",
        "--random-weights",
        "--texts=20",
        "--tokens=fixed:9",
        "--set",
        *settings,
    )
    assert (found["num_texts"], found["num_tokens"], found["num_failed"]) == (20, 180, 0)
    assert found["num_steps"] >= 3 and 0 < found["padding"] < 1
    assert found["p99_ms"] is None and "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("load", [["--rate=10000"], ["--batch=7", "--concurrency=3"]], ids=["open", "closed"])
def test_a_server(tmp_path, load):
    with retrieving(EMBEDDER) as server:
        found = figures(tmp_path / "out.json", f"--target={server.target}", "--texts=30", "--tokens=uniform:2:9", *load)
        prompts = engine_of(server).prompts
    assert (found["num_texts"], found["num_failed"]) == (30, 0)
    assert found["num_tokens"] == sum(map(len, prompts[-30:])) and found["p99_ms"] >= found["p50_ms"] > 0


def test_a_model_or_a_server_is_measured():
    with pytest.raises(ConfigError, match="give --model"):
        embed.main([])


def test_vllm_gets_the_same_texts(monkeypatch):
    """With a stand-in for vllm, which cannot be installed beside the tests."""
    seen: list[list[dict]] = []

    class LLM:
        def __init__(self, **settings: object):
            assert settings["runner"] == "pooling" and settings["max_model_len"] == 9

        def embed(self, prompts: list[dict], use_tqdm: bool) -> list[dict]:
            seen.append(prompts)
            return prompts

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, __version__="0"))
    arguments = ["--model-dir=m", "--texts=5", "--tokens=uniform:2:9", '--settings={"max_model_len": 9}']
    found = vllm_embed.run(arguments)
    options = embed._parser().parse_args(["--texts=5", "--tokens=uniform:2:9"])
    ours = embed._draw(options, 151_936, 0)
    assert [prompt["prompt_token_ids"] for prompt in seen[-1]] == ours
    assert found["num_tokens"] == sum(map(len, ours)) and len(seen) == 2
