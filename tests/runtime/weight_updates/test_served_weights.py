"""A server replaces its weights, pauses and sleeps, over gRPC and under the HTTP names of trainers."""

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import load_file

from meshserve.client import Client
from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.errors import InvalidRequestError, UnavailableFeatureError
from meshserve.runtime.server.weight_methods import checked_directory
from tests import checkpoints, openai_server
from tests.waiting import WAIT_SECONDS, wait_for

PROMPT = "HAMLET:\n"
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models like the demo model: `same`, and `other`, whose final norm is negated."""
    folder = tmp_path_factory.mktemp("weights")
    shutil.copytree(checkpoints.DEMO, folder / "same")
    shutil.copytree(checkpoints.DEMO, folder / "other")
    tensors = load_file(folder / "other" / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    checkpoints.replace_tensors(folder / "other", tensors)
    return folder


@pytest.fixture(scope="module")
def server(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai_server.Server]:
    log = tmp_path_factory.mktemp("log") / "log"
    with openai_server.serving(log, f"--weights-below={weights}", "--strict") as server:
        yield server


@pytest.fixture(scope="module")
def admin(server: openai_server.Server) -> Iterator[Callable[..., Any]]:
    with grpc.insecure_channel(server.target) as channel:
        stub = pb_grpc.AdminServiceStub(channel)
        yield lambda name, **fields: getattr(stub, name)(getattr(pb, f"{name}Request")(**fields), timeout=WAIT_SECONDS)


def generated(server: openai_server.Server) -> pb.GenerateResponse:
    """Returns the whole greedy output as one message."""
    whole = pb.GenerateResponse()
    with grpc.insecure_channel(server.target) as channel:
        sampling = pb.SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        asked = pb.GenerateRequest(text=PROMPT, sampling=sampling)
        for response in pb_grpc.InferenceServiceStub(channel).Generate(asked, timeout=WAIT_SECONDS):
            whole.MergeFrom(response)
    return whole


def post(server: openai_server.Server, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.url.removesuffix('/v1')}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
        return json.load(response)


def spans(response: pb.GenerateResponse) -> list[tuple[str, int]]:
    return [(span.version, span.num_tokens) for span in response.finish.weight_spans]


def reference(directory: Path) -> list[int]:
    [prompt] = [list(checkpoints.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(PROMPT).ids)]
    return checkpoints.greedy(directory, [prompt], MAX_TOKENS)[0]


def test_weights_are_replaced(server: openai_server.Server, admin: Callable[..., Any], weights: Path):
    before = generated(server)
    assert spans(before) == [(admin("GetWeightVersion").version, MAX_TOKENS)]
    done = admin("UpdateWeights", directory=str(weights / "other"), version="other")
    assert done.version == "other" and done.num_bytes > 0 and 0 < done.paused_seconds <= done.seconds
    after = generated(server)
    assert list(after.token_ids) == reference(weights / "other") != list(before.token_ids)
    assert spans(after) == [("other", MAX_TOKENS)]
    with Client(server.target) as client:
        [*_, last] = client.generate(PROMPT, max_tokens=2, ignore_eos=True)
        assert last.finish is not None and last.finish.weight_spans == (("other", 2),)
    answer = post(server, "/update_weights_from_disk", model_path=str(weights / "same"), weight_version="same")
    assert answer["success"] and answer["weight_version"] == "same"
    assert list(generated(server).token_ids) == list(before.token_ids)
    with urllib.request.urlopen(
        f"{server.url.removesuffix('/v1')}/get_weight_version", timeout=WAIT_SECONDS
    ) as response:
        assert json.load(response) == {"weight_version": "same", "is_paused": False, "is_asleep": False}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_over_http_name_the_version_of_their_tokens(
    path: str, server: openai_server.Server, admin: Callable[..., Any], weights: Path
):
    admin("UpdateWeights", directory=str(weights / "same"), version="named")
    body = {"model": "demo", "max_tokens": MAX_TOKENS, "ignore_eos": True, "n": 2}
    body |= {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    expected = [{"version": "named", "num_tokens": MAX_TOKENS}]
    choices = post(server, path, **body, return_token_ids=True)["choices"]
    assert [choice["weight_spans"] for choice in choices] == [expected] * 2
    assert not any("weight_spans" in choice for choice in post(server, path, **body)["choices"])
    chunks = [choice for chunk in streamed(server, path, **body, return_token_ids=True) for choice in chunk["choices"]]
    assert [chunk["weight_spans"] for chunk in chunks if chunk["finish_reason"]] == [expected] * 2
    assert not any("weight_spans" in chunk for chunk in chunks if not chunk["finish_reason"])


def streamed(server: openai_server.Server, path: str, **body: Any) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        server.url.removesuffix("/v1") + path,
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
        lines = [line.removeprefix("data: ") for line in response.read().decode().splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_refusals_over_both(server: openai_server.Server, admin: Callable[..., Any], weights: Path, tmp_path: Path):
    version = admin("GetWeightVersion").version
    for fields, code, message in [
        ({"directory": str(tmp_path)}, grpc.StatusCode.INVALID_ARGUMENT, "allowed are directories below"),
        ({"directory": str(weights / "none")}, grpc.StatusCode.INVALID_ARGUMENT, "is no directory"),
        ({"directory": str(weights / "same"), "running": 9}, grpc.StatusCode.INVALID_ARGUMENT, "running: got 9"),
        ({"directory": str(weights)}, grpc.StatusCode.INVALID_ARGUMENT, "model.safetensors"),
    ]:
        with pytest.raises(grpc.RpcError, match=message) as caught:
            admin("UpdateWeights", **fields)
        assert caught.value.code() is code  # type: ignore[attr-defined]
    for path, body, message in [
        ("/pause_generation", {"mode": "stop"}, "mode: got 'stop'; allowed are abort, retract, in_place"),
        ("/release_memory_occupation", {"tags": ["weights"]}, "allowed are weights and kv_cache together"),
        ("/update_weights_from_disk", {}, "model_path"),
    ]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(server, path, **body)
        assert refused.value.code == 400 and message in refused.value.read().decode()
    assert admin("GetWeightVersion").version == version


def test_a_paused_server_accepts_and_waits(server: openai_server.Server, admin: Callable[..., Any]):
    wanted = list(generated(server).token_ids)
    with ThreadPoolExecutor(1) as pool:
        for pause, go_on in [
            (lambda: admin("Pause"), lambda: admin("Continue")),
            (lambda: post(server, "/pause_generation"), lambda: post(server, "/continue_generation")),
            (lambda: admin("Sleep"), lambda: admin("Wake")),
            (lambda: post(server, "/release_memory_occupation"), lambda: post(server, "/resume_memory_occupation")),
        ]:
            pause()
            assert admin("GetWeightVersion").is_paused
            waiting = pool.submit(generated, server)
            with Client(server.target) as client:
                wait_for(lambda: client.load().num_waiting == 1)
            go_on()
            assert list(waiting.result().token_ids) == wanted


def test_dropped_weights_must_be_replaced(server: openai_server.Server, admin: Callable[..., Any], weights: Path):
    assert admin("Sleep", drop_weights=True).num_freed_bytes > 0
    with pytest.raises(grpc.RpcError, match="sleeps. Wake it first"):
        admin("Continue")
    with pytest.raises(grpc.RpcError, match="sleeps. Wake it first"):
        admin("UpdateWeights", directory=str(weights / "same"))
    assert not admin("Wake").has_continued
    with pytest.raises(grpc.RpcError, match="the weights were dropped. Update them first"):
        admin("Continue")
    admin("UpdateWeights", directory=str(weights / "same"))
    admin("Continue")
    assert list(generated(server).token_ids) == reference(weights / "same")


def test_a_sleeping_server_is_not_ready_and_a_paused_one_is(
    server: openai_server.Server, admin: Callable[..., Any], weights: Path
):
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    with grpc.insecure_channel(server.target) as channel:
        service = health_pb2_grpc.HealthStub(channel)

        def status() -> int:
            return service.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS).status

        assert status() == serving
        admin("Sleep")
        wait_for(lambda: status() == not_serving)
        admin("Wake")
        wait_for(lambda: status() == serving)
        admin("Sleep", drop_weights=True)
        wait_for(lambda: status() == not_serving)
        admin("Wake")
        admin("UpdateWeights", directory=str(weights / "same"))
        wait_for(lambda: status() == serving)
        assert admin("GetWeightVersion").is_paused, "and yet ready"
        admin("Continue")


def test_requests_are_aborted_by_name_or_all(server: openai_server.Server, admin: Callable[..., Any]):
    admin("Pause")
    with ThreadPoolExecutor(1) as pool, Client(server.target) as client:
        waiting = pool.submit(generated, server)
        wait_for(lambda: client.load().num_waiting == 1)
        assert post(server, "/abort_request", rid="none") == {"num_aborted": 0}
        assert post(server, "/abort_request", abort_all=True) == {"num_aborted": 1}
        assert waiting.result().finish.reason == pb.FINISH_REASON_CANCELLED
    admin("Continue")


def test_directories_lie_below_those_of_the_operator(tmp_path: Path):
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    for directory in (allowed / "model", outside):
        directory.mkdir(parents=True)
    (allowed / "link").symlink_to(outside)
    (allowed / "inner").symlink_to(allowed / "model")
    assert checked_directory(str(allowed / "model"), [str(allowed)]) == (allowed / "model").resolve()
    assert checked_directory(str(allowed / "inner"), [str(allowed)]) == (allowed / "model").resolve()
    for bad in (allowed / "link", outside, allowed / ".." / "outside", allowed / "none"):
        with pytest.raises(InvalidRequestError, match="directory: "):
            checked_directory(str(bad), [str(allowed)])
    for text in ("", "model", "a\0b", "/" * 5000):
        with pytest.raises(InvalidRequestError, match="allowed is an absolute path"):
            checked_directory(text, [str(allowed)])
    with pytest.raises(UnavailableFeatureError, match="--weights-below"):
        checked_directory(str(outside), [])
    os.chmod(allowed / "model", 0o777)
    with pytest.raises(InvalidRequestError, match="other users may write to it"):
        checked_directory(str(allowed / "model"), [str(allowed)])
