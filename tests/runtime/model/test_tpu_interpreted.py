"""The demo model generates through the TPU kernels, in Pallas' interpreter, what it generates through the reference."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import checkpoints
from tests.waiting import WAIT_SECONDS

PROMPTS = ("To be, or not", "O Romeo, Romeo! wherefore")
MAX_TOKENS = 3


def generate(directory: Path, attention: str) -> list[list[int]]:
    """`meshserve generate` in a process of its own: the interpreter hangs on as few threads as a small machine has."""
    source, target = directory / "in.jsonl", directory / f"{attention}.jsonl"
    lines = [{"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0} for prompt in PROMPTS]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {
        "model": directory / "model", "dtype": "float32", "tp": 2, "cpu-devices": 2, "page-size": 16, "num-pages": 16,
        "max-context": 64, "max-running": 2, "max-step-tokens": 2, "cache-dir": "", "attention": attention,
        "input": source, "output": target,
    }  # fmt: skip
    flags = [f"--{key}={value}" for key, value in options.items()] + ["--no-logits-processors"]
    environment = {**os.environ, "NPROC": "16", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-m", "meshserve", "generate", *flags],
        env=environment,
        check=True,
        timeout=2 * WAIT_SECONDS,
    )
    return [json.loads(line)["token_ids"] for line in target.read_text().splitlines()]


def test_the_demo_model_says_the_same_through_the_tpu_kernels(tmp_path, every_case):
    checkpoints.truncated_demo(tmp_path / "model", 6 if every_case else 2)
    expected = generate(tmp_path, "reference")
    assert [len(tokens) for tokens in expected] == [MAX_TOKENS] * len(PROMPTS)
    assert generate(tmp_path, "tpu_interpreted") == expected
