"""Tests off-the-shelf clients from PyPI with the demo model.

meshserve (VllmEngine)  <-  smg (HTTP)  <-  openai

tests/runtime/server/test_vllm_service.py tests what needs no gateway.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from meshserve.deploy import demo
from meshserve.runtime.commands.local_cluster import reserved_port

from .waiting import WAIT_SECONDS, wait_for

openai = pytest.importorskip("openai", reason="needs the extra gateway-test")
SMG = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
pytestmark = pytest.mark.skipif(SMG is None, reason="smg comes with the extra gateway")

SERVE = [
    sys.executable, "-m", "meshserve", "serve", "--model=demo", "--port=0", "--gateway-port=0", "--tp=2",
    "--cpu-devices=2", "--dtype=float32", "--page-size=16", "--max-running=8", "--max-step-tokens=32",
    "--num-pages=256",
]  # fmt: skip


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of the gateway, once it has discovered the model, and of the server port behind it."""
    logs = tmp_path_factory.mktemp("gateway")
    with contextlib.ExitStack() as stack:
        server_log, smg_log = (stack.enter_context((logs / name).open("w")) for name in ("server", "smg"))
        port, metrics_port = (stack.enter_context(reserved_port()) for _ in range(2))
        server = subprocess.Popen(SERVE, stdout=subprocess.PIPE, stderr=server_log, text=True)
        gateway = None
        try:
            assert server.stdout is not None
            target = next(found[1] for line in server.stdout if (found := re.search(r"gateways on (\S+)", line)))
            command = [SMG, "launch", "--host=127.0.0.1", f"--port={port}", f"--worker-urls=grpc://{target}"]
            command += [f"--prometheus-port={metrics_port}", "--prometheus-host=127.0.0.1"]
            gateway = subprocess.Popen(command, stdout=smg_log, stderr=smg_log)
            wait_for(lambda: b"demo" in models(port) or gateway.poll() is not None, (logs / "smg").read_text)
            assert gateway.poll() is None, (logs / "smg").read_text()[-3000:]
            yield f"http://127.0.0.1:{port}/v1", target
        finally:
            for process in (gateway, server):
                if process is not None:
                    process.kill()
                    process.wait()


@pytest.fixture
def url(addresses: tuple[str, str]) -> str:
    return addresses[0]


@pytest.fixture
def target(addresses: tuple[str, str]) -> str:
    return addresses[1]


def models(port: int) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=WAIT_SECONDS) as answer:
            return answer.read()
    except OSError:
        return b""


@pytest.fixture
def client(url: str) -> Iterator:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "user", "content": "Who art thou?"}]


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=200, temperature=0)
    assert whole.choices[0].message.content and whole.choices[0].finish_reason in ("stop", "length")
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=200, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    parts, usage = [], None
    for chunk in stream:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == whole.choices[0].message.content
    assert len([part for part in parts if part]) > 1  # a busy server sends fewer, larger parts
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens, whole.usage.completion_tokens
    )  # fmt: skip


def test_completions_and_a_seed(client):
    def text() -> str:
        done = client.completions.create(model="demo", prompt="HAMLET:\n", max_tokens=16, temperature=0.9, seed=7)
        assert done.usage.completion_tokens == 16
        return done.choices[0].text

    assert text() == text() != ""


def test_several_samples(client):
    done = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=12, temperature=1.0, seed=3, n=3
    )  # fmt: skip
    texts = [choice.message.content for choice in done.choices]
    assert len(texts) == 3 and len(set(texts)) == 3
    assert sorted(choice.index for choice in done.choices) == [0, 1, 2]


def test_stop_strings(client):
    whole = client.completions.create(model="demo", prompt="HAMLET:\n", max_tokens=40, temperature=0)
    word = whole.choices[0].text.split()[3]
    cut = client.completions.create(model="demo", prompt="HAMLET:\n", max_tokens=40, temperature=0, stop=[word])
    assert cut.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_structured_output(client):
    def answer(response_format: dict) -> object:
        done = client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=300, temperature=1.5, seed=5, response_format=response_format
        )
        assert done.choices[0].finish_reason == "stop"
        return json.loads(done.choices[0].message.content)

    schema = {"type": "object", "properties": {"king": {"type": "string", "maxLength": 12}, "acts": {"enum": [4, 5]}},
              "required": ["king", "acts"], "additionalProperties": False}  # fmt: skip
    value = answer({"type": "json_schema", "json_schema": {"name": "play", "schema": schema, "strict": True}})
    assert set(value) == {"king", "acts"} and value["acts"] in (4, 5) and len(value["king"]) <= 12


def test_log_probabilities(client):
    chat = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    positions = chat.choices[0].logprobs.content
    assert len(positions) == chat.usage.completion_tokens
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.logprob == max(top.logprob for top in position.top_logprobs) <= 0, "greedy takes the likeliest"
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [
        position.logprob
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for position in choice.logprobs.content
    ]
    assert streamed == pytest.approx([position.logprob for position in positions], abs=1e-4)


def test_penalties_and_bias(client):
    def text(**options: object) -> str:
        done = client.completions.create(model="demo", prompt="HAMLET:\n", max_tokens=24, temperature=0, **options)
        return done.choices[0].text

    plain = text()
    assert text(frequency_penalty=2.0, presence_penalty=2.0) != plain == text()
    assert text(extra_body={"repetition_penalty": 2.0}) != plain


def test_bytes_that_are_no_message(target: str):
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(b"\xff\xff", timeout=WAIT_SECONDS))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "option",
    [
        {"logprobs": True, "top_logprobs": 21},
        {"frequency_penalty": 2.5},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_the_server_cannot_do_is_refused_by_name(client, option):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=4, **option)


def test_a_prompt_that_is_too_long(client):
    with pytest.raises(openai.BadRequestError, match="1024 tokens"):
        client.completions.create(model="demo", prompt="word " * 4000, max_tokens=4)


def test_aiperf_measures_it(url, tmp_path):
    """Runs the benchmark tool with only the URL and the tokenizer."""
    aiperf = shutil.which("aiperf")
    if aiperf is None:
        pytest.skip("aiperf is not on the PATH; it needs a separate environment")
    command = [aiperf, "profile", "-m", "demo", "--url", url.removesuffix("/v1"), "--endpoint-type", "chat"]
    command += ["--streaming", "--tokenizer", str(Path(demo.__file__).with_name("model")), "--concurrency", "4"]
    command += ["--request-count", "16", "--isl", "30", "--osl", "16", "--ui", "simple"]
    done = subprocess.run(
        [*command, "--artifact-dir", str(tmp_path)], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = tmp_path.rglob("profile_export_aiperf.json")
    measured = json.loads(report.read_text())
    assert measured["request_count"]["avg"] == 16
    assert not (measured.get("error_request_count") or {}).get("avg")
