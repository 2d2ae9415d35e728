"""Unmodified clients of OpenAI's API in environments of their own: `make test-clients-openai`.

They need many packages, and some exclude versions of ours. --client-python names the Python that has them, and
--client-node a folder with the packages for Node. Each program of `programs` checks what it gets, and prints what is
compared here.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshserve.runtime.client.client import Client
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.checkpoints import log_likelihood, save_embedding_checkpoint
from tests.openai_server import Server, serving

PROGRAMS = Path(__file__).parent / "programs"
TASKS = Path(__file__).parent / "tasks"
TEXTS = ["The sea", "a longer text, " * 4, "x"]
_SECONDS = 1_800
# Nothing but the server is asked.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1", "OPENAI_API_KEY": "none",
}  # fmt: skip


@pytest.fixture
def python(pytestconfig: pytest.Config) -> Path:
    if not (found := pytestconfig.getoption("--client-python")):
        pytest.skip("make test-clients-openai runs it")
    return Path(found).absolute()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("demo") / "log", "--tp=1", "--cpu-devices=1") as server:
        yield server


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, second_model: Path) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("thinker")
    flags = (f"--model={second_model}", "--served-name=org/thinker", "--tp=1", "--cpu-devices=1", "--max-context=1024")
    with serving(root / "log", *flags, f"--batch-dir={root / 'batches'}") as server:
        yield server


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("embedder")
    model = save_embedding_checkpoint(root / "embedder")
    with serving(root / "log", f"--model={model}", "--tp=1", "--cpu-devices=1", "--max-step-tokens=64") as server:
        yield server


def said(command: Sequence[str | Path], folder: Path, offline: Mapping[str, str] = _OFFLINE) -> str:
    """Returns what a program has printed. It must have ended well."""
    environment = os.environ | offline
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_langchain(python, thinker, tmp_path: Path):
    assert "passed" in said([python, PROGRAMS / "langchain_client.py", thinker.url], tmp_path)


def test_litellm(python, thinker, embedder, tmp_path: Path):
    assert "passed" in said([python, PROGRAMS / "litellm_client.py", thinker.url, embedder.url], tmp_path)


def test_llama_index(python, embedder, tmp_path: Path):
    found = json.loads(said([python, PROGRAMS / "llama_index_client.py", embedder.url, *TEXTS], tmp_path))
    with Client(embedder.target) as client:
        np.testing.assert_allclose(found, client.embed(TEXTS), rtol=0, atol=1e-5)


def test_lm_eval(python, demo, tmp_path: Path):
    """Its log-likelihoods are those of Hugging Face in float32."""
    import transformers  # not at module level: it takes seconds

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_DIRECTORY)
    found = json.loads(said([python, PROGRAMS / "lm_eval_client.py", demo.url, DEMO_DIRECTORY, TASKS], tmp_path))
    expected = [_expected(each["doc"], tokenizer) for each in found["one_by_one"]["plays_choice"]]
    assert len(expected) == 4
    for label in ("one_by_one", "concurrent", "as_text", "remote"):
        for each, (choices, _) in zip(found[label]["plays_choice"], expected, strict=True):
            np.testing.assert_allclose([value for value, _ in each["filtered"]], choices, rtol=0, atol=1e-3)
        if "plays_rolling" in found[label]:
            for each, (_, whole) in zip(found[label]["plays_rolling"], expected, strict=True):
                np.testing.assert_allclose(np.ravel(each["filtered"])[0], whole, rtol=0, atol=1e-3)
    generated = [
        [each["filtered"] for each in found[label]["plays_generation"]] for label in ("one_by_one", "concurrent")
    ]
    assert generated[0] == generated[1]
    assert len(found["chat"]["plays_generation"]) == 4


def _expected(document: dict[str, Any], tokenizer: Any) -> tuple[list[float], float]:
    """Returns the log-likelihoods of the choices after the context, and that of the whole text."""
    context = tokenizer(document["context"])["input_ids"]
    choices = []
    for choice in document["choices"]:
        tokens = tokenizer(f"{document['context']} {choice}")["input_ids"]
        choices.append(log_likelihood(DEMO_DIRECTORY, tokens[: len(context)], tokens[len(context) :]))
    text = f"{document['context']} {document['choices'][document['right']]}"
    return choices, log_likelihood(DEMO_DIRECTORY, [tokenizer.eos_token_id], tokenizer(text)["input_ids"])


@pytest.mark.parametrize("endpoint", ["chat", "completions", "embeddings"])
def test_aiperf(python, demo, embedder, endpoint, tmp_path: Path):
    server, model = (embedder, "embedder") if endpoint == "embeddings" else (demo, "demo")
    command: list[str | Path] = [
        python.parent / "aiperf", "profile", "--model", model, "--url", server.url.removesuffix("/v1"),
        "--endpoint-type", endpoint, "--concurrency", "2", "--request-count", "8", "--tokenizer", DEMO_DIRECTORY,
        "--synthetic-input-tokens-mean", "20", "--ui", "none", "--artifact-dir", tmp_path / "artifacts",
    ]  # fmt: skip
    if endpoint != "embeddings":
        command += ["--streaming", "--output-tokens-mean", "8", "--extra-inputs", "ignore_eos:true"]
    said(command, tmp_path, {"OPENAI_API_KEY": "none"})  # offline it takes no directory for a tokenizer
    found = json.loads((tmp_path / "artifacts" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 8 and not found.get("error_summary"), found


def test_node(pytestconfig: pytest.Config, thinker, embedder, tmp_path: Path):
    folder = pytestconfig.getoption("--client-node")
    if not folder or shutil.which("node") is None:
        pytest.skip("make test-clients-openai runs it where node is on the PATH")
    program = shutil.copy(PROGRAMS / "openai_client.mjs", Path(folder).absolute())  # node looks for packages beside it
    text = said(["node", program, thinker.url, embedder.url], tmp_path)
    assert text.count("passed: ") == 8, text
