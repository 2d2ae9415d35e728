"""From a model's files to an engine, where the files do not agree."""

import contextlib
import json
import queue
import socket
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.request import FinishReason, Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.client.client import CallError, Client, call_errors
from meshserve.runtime.commands.generate import generate_file
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.startup.launch import launch
from meshserve.runtime.telemetry.kv_events.feed import block_hash
from tests import checkpoints
from tests.kv_subscriber import Subscriber, check_prefixes
from tests.runtime.loopback import serving
from tests.waiting import WAIT_SECONDS, wait_for

SMALL: dict[str, Any] = {
    "page_size": 8, "num_pages": 16, "max_running": 2, "max_step_tokens": 8, "max_context": 32, "cache_dir": "",
}  # fmt: skip
DEFAULTS = {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "max_new_tokens": 7}


def completions(model: Path, folder: Path, *lines: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    generate_file(ServeConfig(model=str(model), **SMALL | options), folder / "in.jsonl", folder / "out.jsonl")
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_a_models_sampling_defaults_hold_unless_a_request_says_otherwise(tmp_path: Path) -> None:
    model = checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=1)
    (model / "generation_config.json").write_text(json.dumps(DEFAULTS))
    bare = {"prompt_token_ids": [1, 2, 3], "seed": 5}
    explicit = {name.replace("max_new", "max"): value for name, value in DEFAULTS.items()}
    plain = {"temperature": 1, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "max_tokens": 9}
    with_defaults = completions(model, tmp_path, bare, bare | explicit, bare | plain, bare | {"max_tokens": 3})
    tokens = [line["token_ids"] for line in with_defaults]
    assert len(tokens[0]) == 7 and tokens[0] == tokens[1] and tokens[3] == tokens[0][:3]
    off = completions(model, tmp_path, bare, bare | explicit, bare | plain, generation_config="off")
    assert [line["token_ids"] for line in off[1:]] == tokens[1:3]
    assert off[0]["token_ids"][:9] == tokens[2] != tokens[0]
    with pytest.raises(ConfigError, match="generation_config.json sets repetition_penalty, which needs"):
        completions(model, tmp_path, bare, logits_processors=False)


def test_a_seed_of_the_server_makes_requests_without_one_reproducible(tmp_path: Path) -> None:
    model = checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=1)
    lines = [{"prompt_token_ids": [1, 2, 3], "max_tokens": 9, "ignore_eos": True}] * 2
    first, again, other = (
        [line["token_ids"] for line in completions(model, tmp_path, *lines, seed=seed, logits_processors=False)]
        for seed in (3, 3, 4)
    )
    assert first == again != other
    assert first[0] != first[1], "requests draw different tokens"


def test_a_model_without_a_tokenizer_is_served_for_token_ids(tmp_path: Path) -> None:
    model = checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=1)
    (model / "tokenizer.json").unlink()
    (model / "generation_config.json").write_text(json.dumps(DEFAULTS))
    queues = OutputQueues()
    launched = launch(ServeConfig(model=str(model), **SMALL), queues.deliver)
    edge = Edge(queues)
    edge.attach(Backend(launched.engine, launched.tokenizer, launched.info, launched.grammars))
    launched.engine.start()
    try:
        with serving(edge, queues) as server, Client(server.target) as client, contextlib.ExitStack() as stack:
            info = client.model_info()
            assert not (info.supports_text or info.supports_chat or info.supports_structured_output)
            assert info.default_sampling == {name.replace("max_new", "max"): value for name, value in DEFAULTS.items()}
            done = client.complete([1, 2, 3], seed=1)
            assert len(done.token_ids) == 7 and done.text == ""
            assert len(client.complete([1, 2, 3], seed=1, max_tokens=2, logprobs=1).logprobs) == 2
            refused = {
                "text: needs a tokenizer": lambda: client.complete("a"),
                "messages: needs a tokenizer": lambda: list(client.chat([{"role": "user", "content": "a"}])),
                "sampling.stop: needs a tokenizer": lambda: client.complete([1], stop=["a"]),
                "its model has no tokenizer.json": lambda: client.complete([1], constraint={"regex": "a"}),
                "text: needs": lambda: stub.Tokenize(pb.TokenizeRequest(text="a")),
                "Detokenize needs": lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[1])),
            }
            stub = pb_grpc.InferenceServiceStub(stack.enter_context(grpc.insecure_channel(server.target)))
            for message, call in refused.items():
                with pytest.raises(CallError, match=message) as caught, call_errors():
                    call()
                is_constraint = message.startswith("its model")
                expected = grpc.StatusCode.INVALID_ARGUMENT if is_constraint else grpc.StatusCode.FAILED_PRECONDITION
                assert caught.value.code is expected
    finally:
        launched.engine.stop()


def test_a_tokenizer_with_more_tokens_than_the_model_is_served(tmp_path: Path) -> None:
    model = checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=1, vocab_size=200)
    lines = ({"prompt": "abc", "constraint": {"regex": "[a-z]{4}"}}, {"prompt": "a b"}, {"prompt": "abc"})
    constrained, refused, free = completions(model, tmp_path, *lines)
    assert constrained["finish_reason"] == "stop" and constrained["text"].isalpha() and len(constrained["text"]) == 4
    assert refused["error"].startswith("prompt: ") and refused["error"].endswith("allowed are 0 to 199.")
    assert free["finish_reason"] == "length" and max(free["token_ids"]) < 200


def test_end_tokens_that_the_vocabulary_no_longer_has_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The generation_config.json of a model whose vocabulary was cut. Penalties write down which tokens end."""
    caplog.set_level("INFO")
    model = checkpoints.save_checkpoint(tmp_path, num_hidden_layers=1)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 319, 320, 151645]}))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "A"}))
    ends: list[Output] = []
    has_ended = threading.Event()

    def deliver(outputs: list[Output]) -> None:
        ends.extend(output for output in outputs if output.finish_reason is not None)
        if ends:
            has_ended.set()

    config = ServeConfig(
        model=str(model), tp=1, cpu_devices=8, page_size=8, num_pages=16, max_running=2, max_step_tokens=8,
        max_context=32, cache_dir="",
    )  # fmt: skip
    launched = launch(config, deliver)
    assert launched.info.eos_token_ids == (5, 32, 319)
    named = "32 A (tokenizer_config.json); 319 (generation_config.json)"
    assert f"end tokens: 5 & (generation_config.json); {named}" in caplog.text
    launched.engine.start()
    try:
        launched.engine.submit("a", (1, 2), SamplingParams(max_tokens=4, ignore_eos=False, presence_penalty=1.0))
        assert has_ended.wait(WAIT_SECONDS)
        assert launched.engine.failure is None
        assert ends[0].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    finally:
        launched.engine.stop()


def test_an_engine_publishes_what_its_prefix_cache_holds(tmp_path: Path) -> None:
    """From the options to an independent subscriber, through a change of the mesh, which empties the cache."""
    model = checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=1)
    ends: dict[str, Any] = {
        "kv_events_endpoint": f"ipc://{tmp_path}/a",
        "kv_events_replay_endpoint": f"ipc://{tmp_path}/b",
    }
    done: queue.Queue[str] = queue.Queue()
    launched = launch(
        ServeConfig(model=str(model), served_name="toy", tp=1, logits_processors=False, **SMALL | ends),
        lambda outputs: [done.put(output.request_id) for output in outputs if output.finish_reason] and None,
    )
    launched.engine.start()
    try:
        with Subscriber(*ends.values()) as reader:
            pages = launched.engine._pages

            def agrees() -> bool:
                with launched.engine._changed:
                    launched.engine._scheduler.audit()
                    return reader.hashes() == {block_hash(key) for key in pages._page_of}

            for number in range(12):  # 16 pages hold seven of them, so that pages are evicted
                params = SamplingParams(max_tokens=4, ignore_eos=True)
                launched.engine.submit(str(number), tuple(range(number, number + 20)), params)
                assert done.get(timeout=WAIT_SECONDS) == str(number)
                if not number:
                    wait_for(agrees)  # its pages are published before they are evicted
            wait_for(agrees)
            assert check_prefixes(reader.index, block_size=8) == len(reader.hashes()) > 4
            assert reader.index.num_removed and reader.topics == {f"kv@{socket.gethostname()}@toy"}
            launched.resharder.change_tp(2)
            wait_for(lambda: reader.index.num_cleared == 1 and agrees())
    finally:
        launched.close()
