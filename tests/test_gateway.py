"""Tests off-the-shelf clients from PyPI with the demo model.

meshserve (VllmEngine)  <-  smg (HTTP)  <-  openai

tests/runtime/gateway/test_vllm_service.py tests what needs no gateway.
"""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from meshserve.deploy import demo
from tests.certificates import certificate

from .openai_server import Server, serving
from .waiting import WAIT_SECONDS, wait_for

openai = pytest.importorskip("openai", reason="needs the extra gateway-test")
SMG = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
pytestmark = pytest.mark.skipif(SMG is None, reason="smg comes with the extra gateway")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("gateway") / "log") as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    return server.url


@pytest.fixture
def target(server: Server) -> str:
    return server.target


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


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
# The demo model does not know tools: an expression makes it write what Qwen3 writes.
CALL = {"regex": r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Paris"\}\}\n</tool_call>'}
THOUGHT = {"regex": r"<think>\nIt is [a-z]{4}\.\n</think>\n\nParis is warm\."}


def test_tools_that_the_model_chooses(client):
    """Tests smg's parser of Qwen3's tool calls, whole and streamed."""
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 200, "tools": [WEATHER], "extra_body": CALL}
    whole = client.chat.completions.create(**options)
    [call] = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls" and not whole.choices[0].message.content
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    deltas = [
        choice.delta for chunk in client.chat.completions.create(**options, stream=True) for choice in chunk.choices
    ]
    parts = [part.function for delta in deltas for part in delta.tool_calls or ()]
    assert "".join(part.name or "" for part in parts) == "get_weather"
    assert json.loads("".join(part.arguments or "" for part in parts)) == {"city": "Paris"}
    assert not "".join(delta.content or "" for delta in deltas)
    result = {"role": "tool", "tool_call_id": call.id, "content": "15 degrees"}
    turns = [*MESSAGES, whole.choices[0].message.model_dump(include={"role", "content", "tool_calls"}), result]
    assert turns[1]["content"] is None
    done = client.chat.completions.create(model="demo", messages=turns, max_tokens=4)
    assert done.usage.completion_tokens > 0


def test_tools_that_the_caller_chooses(client):
    """smg makes a JSON schema of them, which the server enforces."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    done = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=400, tools=[WEATHER], tool_choice=named, seed=1
    )
    [call] = done.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_reasoning_is_separate_from_the_answer(client):
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 200, "seed": 1}
    message = client.chat.completions.create(**options, extra_body=THOUGHT).choices[0].message
    assert re.fullmatch(r"It is [a-z]{4}\.", message.reasoning_content.strip())
    assert message.content.strip() == "Paris is warm."
    stream = client.chat.completions.create(**options, extra_body=THOUGHT, stream=True)
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning.strip() == message.reasoning_content.strip()
    assert "".join(delta.content or "" for delta in deltas).strip() == "Paris is warm."
    together = client.chat.completions.create(**options, extra_body={**THOUGHT, "separate_reasoning": False})
    assert "</think>" in together.choices[0].message.content


def test_what_the_gateway_drops(client):
    """docs/operations.md says so. When a release of smg passes them on, this test and that page change."""
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    plain, biased = (client.chat.completions.create(**options, **rest) for rest in ({}, {"logit_bias": {"100": 100}}))
    assert plain.choices[0].message.content == biased.choices[0].message.content
    done = client.completions.create(model="demo", prompt="HAMLET:", max_tokens=3, logprobs=2)
    assert done.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="demo", prompt=[5, 6, 7], max_tokens=3)


def test_callers_cannot_control_the_gateway(url):
    for method, path in (("POST", "flush_cache"), ("GET", "workers"), ("POST", "start_profile")):
        request = urllib.request.Request(url.removesuffix("v1") + path, method=method)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=WAIT_SECONDS)


def gateways(server: int) -> list[int]:
    """Returns the processes of gateways that a server has started: children of its guards."""
    found = subprocess.run(
        ["ps", "-e", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    processes = [line.split(maxsplit=2) for line in found.splitlines()]
    guards = [pid for pid, parent, line in processes if parent == str(server) and "gateway_guard" in line]
    return [int(pid) for pid, parent, _ in processes if parent in guards]


def test_the_gateway_is_restarted_and_ends_with_the_server(tmp_path: Path):
    with serving(tmp_path / "log") as server, openai.OpenAI(base_url=server.url, api_key="none") as client:
        [first] = gateways(server.process.pid)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: "OpenAI's API ended with status 137; it is restarted" in server.log.read_text())

        def answers() -> bool:
            try:
                return bool(client.completions.create(model="demo", prompt="a", max_tokens=2).choices)
            except openai.APIError:
                return False

        wait_for(answers, server.log.read_text)
        [second] = gateways(server.process.pid)
        assert second != first
        server.process.terminate()
        assert server.process.wait(WAIT_SECONDS) == 0
        assert not Path(f"/proc/{second}").exists()


def test_with_a_certificate_the_api_is_encrypted(tmp_path: Path):
    files = certificate(tmp_path, "server")
    flags = (f"--tls-cert={files.certificate}", f"--tls-key={files.key}")
    trusted = ssl.create_default_context(cafile=str(files.certificate))
    with serving(tmp_path / "log", *flags) as server:
        assert server.url.startswith("https://")
        with urllib.request.urlopen(f"{server.url}/models", timeout=WAIT_SECONDS, context=trusted) as answer:
            assert json.load(answer)["data"][0]["id"] == "demo"


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
