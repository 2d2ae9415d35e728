"""Runs the real server as a process on a mesh of virtual CPU devices, with real clients on loopback."""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.client.client import AsyncClient, CallError, Client

from .waiting import WAIT_SECONDS

NUM_STREAMS = 64
README = Path(__file__).parents[1] / "README.md"
SERVE = [
    sys.executable, "-m", "meshserve", "serve", "--model=demo", "--port=0", "--tp=4", "--cpu-devices=8",
    "--dtype=float32", "--page-size=16", "--max-running=16", "--max-step-tokens=16", "--num-pages=96",
    f"--drain-seconds={WAIT_SECONDS:g}", "--cache-dir=",
]  # fmt: skip


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """Yields address and process of a ready server, which is killed at the end; its log goes to `folder`.

    The cache is too small for all streams at once, so requests are preempted.
    """
    log = folder / "stderr"
    with log.open("w") as stderr:
        waits = [flag for flag in os.environ["XLA_FLAGS"].split() if "collective" in flag]
        environment = os.environ | {"XLA_FLAGS": " ".join(waits)}  # it compiles as a user's server does
        process = subprocess.Popen(SERVE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        try:
            target = None
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"listens on (\S+)", line):
                    target = found[1]
                    break
            assert target is not None, log.read_text()
            with Client(target) as client:
                client.wait_until_ready(WAIT_SECONDS)
            yield target, process
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server shared by tests, each of which must leave it unchanged, since their order may vary."""
    with _serving(tmp_path_factory.mktemp("server")) as (target, _):
        yield target


async def _one_stream(client: AsyncClient, index: int) -> str:
    """Runs a stream that randomly completes, is cancelled or has a deadline, and returns how it ended."""
    draw = random.Random(index)
    fate = draw.choice(["whole", "cancelled", "deadline"])
    # Cancelled streams request enough tokens to be cancelled in time, even if tokens arrive in bursts.
    max_tokens = 500 if fate == "cancelled" else draw.randint(1, 120)
    sampling = {"max_tokens": max_tokens, "temperature": 0.8, "seed": index, "ignore_eos": True}
    timeout_seconds = draw.uniform(0.05, 2.0) if fate == "deadline" else None
    prompt = [draw.randrange(300, 2000) for _ in range(draw.randint(1, 200))]
    finishes, num_tokens = [], 0
    try:
        async for chunk in client.generate(prompt, **sampling, timeout_seconds=timeout_seconds):
            assert not finishes, "a message after the last"
            num_tokens += len(chunk.token_ids)
            if chunk.finish is not None:
                finishes.append(chunk.finish.reason)
            elif fate == "cancelled" and draw.random() < 0.2:
                return "cancelled"
    except CallError as error:
        assert not finishes and error.code is grpc.StatusCode.DEADLINE_EXCEEDED, error
        return "deadline"
    assert finishes == [FinishReason.LENGTH] and num_tokens == sampling["max_tokens"]
    return "whole"


async def _all_streams(target: str) -> list[str]:
    async with AsyncClient(target) as client:
        ends = await asyncio.gather(*(_one_stream(client, index) for index in range(NUM_STREAMS)))
        end = time.monotonic() + WAIT_SECONDS
        while (
            load := await client.load()
        ).num_free_pages < load.num_pages:  # the last cancellations are still in progress
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, load.num_pages)
    return ends


def test_64_streams_leave_no_page_behind(server: str) -> None:
    ends = asyncio.run(_all_streams(server))
    assert set(ends) == {"whole", "cancelled", "deadline"}, "the draw did not produce every fate"


def test_the_example_of_the_readme_shows_something(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.+?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    [code] = [example for example in examples if "127.0.0.1:50051" in example]
    exec(code.replace("127.0.0.1:50051", server), {})
    said = capsys.readouterr().out
    found = json.loads(said[said.rindex("{") :])
    assert found["speaker"] in ("HAMLET", "OPHELIA", "HORATIO") and 1 <= found["act"] <= 5
    assert len(said[: said.rindex("{")].split()) > 10, "the text before it"


def test_a_seed_fixes_the_text_whatever_else_runs(server: str) -> None:
    async def texts() -> list[str]:
        async with AsyncClient(server) as client:
            calls = [
                client.complete("HAMLET:\n", max_tokens=40, temperature=1.0, top_p=0.9, top_k=50, seed=seed)
                for seed in (1, 2, 3, 1)
            ]
            return [completion.text for completion in await asyncio.gather(*calls)]

    async def alone() -> str:
        async with AsyncClient(server) as client:
            return (
                await client.complete("HAMLET:\n", max_tokens=40, temperature=1.0, top_p=0.9, top_k=50, seed=1)
            ).text

    together = asyncio.run(texts())
    assert together[0] == together[3] == asyncio.run(alone())
    assert len(set(together)) == 3


def test_an_output_keeps_to_its_constraint(server: str) -> None:
    person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
    with Client(server) as client:
        assert client.model_info().supports_structured_output
        sampling = {"temperature": 1.5, "max_tokens": 200}
        done = client.complete("HAMLET:\n", constraint={"json_schema": person}, seed=1, **sampling)
        value = json.loads(done.text)
        assert set(value) == {"name", "age"} and isinstance(value["age"], int)
        assert done.finish_reason is FinishReason.STOP
        done = client.complete("HAMLET:\n", constraint={"regex": "[0-9]{3}-[A-Z]{2}"}, seed=1, **sampling)
        assert re.fullmatch("[0-9]{3}-[A-Z]{2}", done.text)
        done = client.complete("HAMLET:\n", constraint={"choice": ["aye", "nay"]}, **sampling)
        assert done.text in ("aye", "nay")
        with pytest.raises(CallError, match="uniqueItems") as caught:
            client.complete("a", constraint={"json_schema": {"type": "array", "uniqueItems": True}})
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.field == "sampling.constraint.json_schema"


def test_samples_share_their_prompt_and_draw_as_requests_of_their_own(server: str) -> None:
    prompt, sampling = [300 + index for index in range(50)], {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    with Client(server) as client:
        alone = [client.complete(prompt, seed=seed, cache_salt="alone", **sampling) for seed in (7, 8, 9)]
        together = client.complete_samples(prompt, 3, seed=7, cache_salt="together", priority=1, **sampling)
        again = client.complete(prompt, seed=8, cache_salt="together", **sampling)
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in alone]
    assert again.token_ids == alone[1].token_ids
    assert [sample.usage.num_cached_tokens for sample in (*alone, *together)] == [0, 48, 48, 0, 48, 48]
    assert again.usage.num_cached_tokens == 48


def test_the_server_and_the_command_line_agree(server: str, tmp_path: Path) -> None:
    """Compares the greedy text of the server at TP 4 with that of `meshserve generate` at TP 2."""
    with Client(server) as client:
        served = client.complete("ROMEO:\nBut soft", max_tokens=24, temperature=0.0)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "ROMEO:\nBut soft", "max_tokens": 24, "temperature": 0}))
    flags = ["--tp=2", "--cpu-devices=2", "--dtype=float32", "--max-running=1", "--max-step-tokens=1", "--num-pages=8"]
    command = [*SERVE[:3], "generate", "--model=demo", *flags, f"--input={source}", f"--output={target}"]
    subprocess.run(command, check=True, timeout=WAIT_SECONDS)
    line = json.loads(target.read_text())
    assert (line["token_ids"], line["text"]) == (list(served.token_ids), served.text)


def test_buf_curl_lists_and_calls_through_reflection(server: str) -> None:
    """Uses an unmodified generic client that only gets the address."""
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert buf is not None, "buf comes with the test extra (buf-bin)"
    curl = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    listed = subprocess.run([*curl, f"http://{server}", "--list-services"], check=True, capture_output=True, text=True)
    assert "meshserve.v1.InferenceService" in listed.stdout
    body = json.dumps({"text": "JULIET:\n", "sampling": {"maxTokens": 5, "temperature": 0, "ignoreEos": True}})
    url = f"http://{server}/meshserve.v1.InferenceService/Generate"
    called = subprocess.run([*curl, "-d", body, url], check=True, capture_output=True, text=True)
    assert '"FINISH_REASON_LENGTH"' in called.stdout
    assert len(re.findall(r'"numOutputTokens": 5\b', called.stdout)) == 1


def test_refusals_name_the_field(server: str) -> None:
    with Client(server) as client:
        for fields, field in (({"top_p": 1.5}, "sampling.top_p"), ({"max_tokens": 0}, "sampling.max_tokens")):
            with pytest.raises(CallError, match=field) as caught:
                client.complete("x", **fields)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(CallError, match="max_context"):
            client.complete([300] * 5000)


def test_a_reader_of_stdout_that_has_gone_ends_nobody() -> None:
    says = "from meshserve.runtime.telemetry.logs import say; say('one'); input(); say('two'); say('three')"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", says], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(WAIT_SECONDS) == 0


def test_sigterm_ends_the_server_in_order(tmp_path: Path) -> None:
    """A running stream finishes, and the exit status is 0."""
    with _serving(tmp_path) as (target, process):
        with Client(target) as client:
            stream = client.generate("HAMLET:\n", max_tokens=60, ignore_eos=True)
            next(stream)
            process.send_signal(signal.SIGTERM)
            *_, last = stream
            assert last.finish is not None and last.finish.reason is FinishReason.LENGTH
        assert process.wait(WAIT_SECONDS) == 0
