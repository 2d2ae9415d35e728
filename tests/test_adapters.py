"""Adapters from files to answers: a real engine behind gRPC and HTTP, with adapters loaded while it serves."""

import contextlib
import http.client
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.client.client import CallError, Client, call_errors
from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.startup.checks import check_before_listening
from meshserve.runtime.startup.launch import launch
from tests import checkpoints
from tests.adapters import save_adapter
from tests.openai_server import serving as openai_serving
from tests.runtime.loopback import Running, serving
from tests.waiting import WAIT_SECONDS

openai = pytest.importorskip("openai", reason="comes with the test extra")

LISTEN = Listen(drain_seconds=WAIT_SECONDS, openai_port=0, open_api=OpenAIPort)
PROMPT = list(range(3, 40))  # more than two pages, so that the prefix cache is used
SMALL: dict[str, Any] = {
    "tp": 2, "dtype": "float32", "page_size": 16, "num_pages": 64, "max_running": 4,
    "max_step_tokens": 32, "cache_dir": "", "logits_processors": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a model and three adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    base = checkpoints.save_checkpoint(folder / "model", num_hidden_layers=1)
    for seed, name in enumerate(("one", "two", "three")):
        save_adapter(folder / "root" / name, base, seed=seed, strength=1.0)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    config = ServeConfig(
        model=str(folder / "model"), adapter=(f"one={folder / 'root' / 'one'}",), adapter_root=str(folder / "root"),
        max_adapters=2, **SMALL,
    )  # fmt: skip
    queues = OutputQueues()
    launched = launch(config, queues.deliver)
    edge = Edge(queues)
    edge.adapter_roots = (folder / "root",)
    edge.observer.metrics.adapters.read_adapters = launched.engine.adapters.list
    edge.attach(Backend(launched.engine, launched.tokenizer, launched.info, launched.grammars))
    launched.engine.start()
    try:
        with serving(edge, queues, LISTEN) as server:
            yield server
    finally:
        launched.close()


def asked(server: Running, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    assert server.handle.openai_port is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.handle.openai_port, timeout=WAIT_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read().decode()
    return answer.status, json.loads(text) if text.startswith("{") else text


def greedy(client: Client, adapter: str = "") -> tuple[int, ...]:
    return client.complete(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True, adapter=adapter).token_ids


def test_adapters_answer_by_grpc_and_http_and_are_loaded_replaced_and_unloaded(server, folder):
    with Client(server.target) as client:
        assert [each.name for each in client.model_info().adapters] == ["one"]
        base, one = greedy(client), greedy(client, "one")
        assert base != one and greedy(client) == base and greedy(client, "one") == one
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for model, expected in ((None, base), ("one", one)):
            status, answer = asked(server, "/v1/completions", body | {"model": model})
            assert (status, tuple(answer["choices"][0]["token_ids"])) == (200, expected)

        for name in ("two", "three"):
            assert asked(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})[0] == 200
        two, three = greedy(client, "two"), greedy(client, "three")  # there are two slots, so one adapter leaves
        assert len({base, one, two, three}) == 4 and greedy(client, "one") == one
        assert server.counted("meshserve_adapters") == 3 and server.counted("meshserve_device_adapters") == 2

        again = {"lora_name": "two", "lora_path": str(folder / "root" / "three")}
        assert asked(server, "/v1/load_lora_adapter", again)[0] == 409
        assert asked(server, "/v1/load_lora_adapter", again | {"load_inplace": True})[0] == 200
        assert greedy(client, "two") == three, "no cached page of the adapter that had the name before"
        status, listed = asked(server, "/v1/models")
        assert [each["id"] for each in listed["data"][1:]] == ["one", "three", "two"]

        assert asked(server, "/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 200
        assert asked(server, "/v1/completions", body | {"model": "two"})[0] == 404
        with pytest.raises(CallError) as caught:
            greedy(client, "two")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND


def test_what_is_no_adapter_of_the_model_is_refused(server, folder):
    (folder / "root" / "empty").mkdir()
    other = checkpoints.save_checkpoint(folder / "other", num_hidden_layers=1, hidden_size=32)
    save_adapter(folder / "root" / "foreign", other, seed=9)
    with grpc.insecure_channel(server.target) as channel:
        load = pb_grpc.AdminServiceStub(channel).LoadAdapter
        for name in ("empty", "foreign"):
            with pytest.raises(CallError) as caught, call_errors():
                load(pb.LoadAdapterRequest(name=name, path=name), timeout=WAIT_SECONDS)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert name not in [each["id"] for each in asked(server, "/v1/models")[1]["data"]]


def test_a_stream_goes_on_with_the_same_files_only(server, folder):
    with grpc.insecure_channel(server.target) as channel:
        generate = pb_grpc.InferenceServiceStub(channel).Generate
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(token_ids=PROMPT), adapter="one",
            sampling=pb.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        )  # fmt: skip
        answers = list(generate(request, timeout=WAIT_SECONDS))
        whole = [token_id for answer in answers for token_id in answer.token_ids]
        request.token_ids.token_ids.extend(whole[:3])
        request.sampling.max_tokens, request.sampling.num_resumed_tokens = 5, 3
        request.adapter_digest = answers[0].adapter_digest
        rest = [token_id for answer in generate(request, timeout=WAIT_SECONDS) for token_id in answer.token_ids]
        assert rest == whole[3:] and len(answers[0].adapter_digest) == 64
        request.adapter_digest = "0" * 64
        with pytest.raises(CallError) as caught, call_errors():
            list(generate(request, timeout=WAIT_SECONDS))
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_process_serves_what_its_options_name(folder, tmp_path):
    root = folder / "root"
    flags = [f"--model={folder / 'model'}", f"--adapter=one={root / 'one'}", f"--adapter-root={root}", "--http-port=0"]
    with openai_serving(tmp_path / "log", *flags, "--num-pages=64", "--no-logits-processors") as server:
        with openai.OpenAI(base_url=server.url, api_key="none", timeout=WAIT_SECONDS) as client:
            client.post("/load_lora_adapter", body={"lora_name": "two", "lora_path": "two"}, cast_to=str)
            assert [each.id for each in client.models.list()] == ["model", "one", "two"]
            answers = {
                name: client.completions.create(model=name, prompt="The sea", max_tokens=8, temperature=0)
                .choices[0]
                .text
                for name in ("model", "one", "two")
            }
            assert len(set(answers.values())) == 3
        with urllib.request.urlopen(f"{server.probes}/metrics", timeout=WAIT_SECONDS) as page:
            metrics = page.read().decode()
    assert 'vllm:lora_requests_info{max_lora="8"' in metrics and "meshserve_device_adapters 2.0" in metrics
    assert 'meshserve_adapter_requests_total{adapter="two"} 1.0' in metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter_root": "/nowhere/at/all"}, "--adapter-root /nowhere/at/all is no directory"),
        ({"adapter": ("demo=/x",)}, "adapter gives the name demo, which is the model's"),
        ({"adapter": ("x=/x",), "served_name": "team/x"}, "adapter gives the name x, which is the model's"),
    ],
)
def test_options_that_cannot_be_served_are_refused_before_a_port_opens(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_before_listening(ServeConfig(model="demo", **{"port": 0, **options}))
