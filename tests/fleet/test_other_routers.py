"""Routers of other projects before real replicas: Dynamo's frontend with its sidecar, and vllm-router.

They are installed in an environment of their own, because their dependencies exclude some of ours; --routers names its
Python.
"""

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.client.client import Client
from tests.fleet.replicas import MODEL, Replica, replicas
from tests.listening import free_port
from tests.waiting import WAIT_SECONDS, wait_for

PROMPT = "HAMLET:\nTo be, or not to be, that is the"


@pytest.fixture
def python(pytestconfig: pytest.Config) -> str:
    if not (found := pytestconfig.getoption("--routers")):
        pytest.skip("--routers is not given")
    return str(Path(found).absolute())  # the routers run in folders of their own


@contextlib.contextmanager
def running(log: Path, commands: Sequence[list[str]], **environment: str) -> Iterator[None]:
    """Runs processes until the block ends."""
    with log.open("w") as output, contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent, env=os.environ | environment
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        return json.load(answer)


def answers(url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the answer, or None while the router does not know the model."""
    try:
        return post(url, body)
    except (OSError, urllib.error.HTTPError):
        time.sleep(0.5)  # it logs every call
        return None


def expected(replica: Replica, max_tokens: int) -> str:
    """Returns what the replica itself says."""
    with Client(replica.said["listens on"]) as client:
        return client.complete(PROMPT, temperature=0, max_tokens=max_tokens, ignore_eos=True).text


def test_dynamo_drives_replicas_by_its_sidecar(python: str, tmp_path: Path):
    """The frontend routes by KV events: a prompt that has been answered goes to the replica that has its prefix."""
    port = free_port()
    planes = ["--discovery-backend=file", "--request-plane=tcp", "--event-plane=zmq"]
    frontend = [python, "-m", "dynamo.frontend", f"--http-port={port}", "--router-mode=kv", *planes]
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with replicas(tmp_path, 2) as fleet:
        sidecars = [
            [python, "-m", "dynamo.vllm.sidecar", f"--grpc-endpoint={each.said['answers gateways on']}", *planes]
            for each in fleet
        ]
        log = tmp_path / "dynamo.log"
        with running(log, [frontend, *sidecars], DYN_FILE_KV=str(tmp_path / "store")):
            wait_for(lambda: answers(url, body), lambda: log.read_text()[-6000:])
            texts = {post(url, body)["choices"][0]["text"] for _ in range(6)}
            print("\nDynamo:", texts, [replica.metric("meshserve_cached_tokens_total") for replica in fleet])
            assert texts == {expected(fleet[0], 12)}
            long = body | {"prompt": PROMPT * 8}
            before = [replica.metric("meshserve_admitted_tokens_total") for replica in fleet]
            for _ in range(6):
                post(url, long)
            after = [replica.metric("meshserve_admitted_tokens_total") for replica in fleet]
            print("tokens by replica:", [new - old for new, old in zip(after, before, strict=True)])


def vllm_router(python: str, port: int, workers: Sequence[str]) -> list[str]:
    command = [python, "-m", "vllm_router.launch_router", "--host=127.0.0.1", f"--port={port}"]
    return [*command, f"--prometheus-port={free_port()}", "--policy=round_robin", "--worker-urls", *workers]


def test_vllm_router_before_grpc_workers(python: str, tmp_path: Path):
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who art thou?"}], "max_tokens": 12,
            "temperature": 0}  # fmt: skip
    with replicas(tmp_path, 2) as fleet:
        log = tmp_path / "router.log"
        command = vllm_router(python, port, [replica.worker_url for replica in fleet])
        with running(log, [command], VLLM_ROUTER_TOKENIZER=str(MODEL)):
            wait_for(lambda: answers(url, body), lambda: log.read_text()[-3000:])
            texts = {post(url, body)["choices"][0]["message"]["content"] for _ in range(6)}
        print("\nvllm-router, gRPC:", texts, [replica.metric("meshserve_prompt_tokens_total") for replica in fleet])
        assert len(texts) == 1 and all(replica.metric("meshserve_prompt_tokens_total") for replica in fleet)


def test_vllm_router_before_openai_ports(python: str, tmp_path: Path):
    port, openai_ports = free_port(), [free_port(), free_port()]
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        fleet = [
            stack.enter_context(replicas(tmp_path / str(number), 1, f"--openai-port={number}"))[0]
            for number in openai_ports
        ]
        log = tmp_path / "router.log"
        command = vllm_router(python, port, [f"http://127.0.0.1:{number}" for number in openai_ports])
        with running(log, [command]):
            wait_for(lambda: answers(url, body), lambda: log.read_text()[-3000:])
            texts = {post(url, body)["choices"][0]["text"] for _ in range(6)}
        print("\nvllm-router, HTTP:", texts)
        assert texts == {expected(fleet[0], 12)}
