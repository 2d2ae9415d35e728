"""vLLM's own gRPC API at the gateway port, by its protocol. Dynamo and vllm-router before real servers: tests/fleet."""

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.protos import vllm_pb2 as pb
from meshserve.protos import vllm_pb2_grpc as pb_grpc
from meshserve.runtime.api.adapters import NoAdapters
from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.gateway.vllm_native_service import SERVICES, refuse_unsupported, sampling_params
from meshserve.runtime.gateway.vllm_service import add_gateway
from meshserve.runtime.scheduler.page_changes import PageChanges
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.telemetry.kv_events.feed import KvEventFeed, PublisherAddress
from tests.runtime.fake_adapters import FakeCatalog
from tests.runtime.loopback import INFO, Running, running
from tests.waiting import WAIT_SECONDS

LISTEN = Listen(gateway_port=0, add_gateway=add_gateway, gateway_services=SERVICES)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(listen=LISTEN) as server:
        yield server


@pytest.fixture(scope="module")
def channel(server: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.handle.gateway_port}") as channel:
        yield channel


def request(text: str = "a", max_new_tokens: int = 3, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens), **fields)


def test_a_stream_and_a_whole_answer_say_the_same(channel: grpc.Channel):
    stub = pb_grpc.InferenceStub(channel)
    asked = request(response=pb.ResponseOptions(prompt_token_ids=True, output_token_ids=True))
    parts = list(stub.GenerateStream(asked, timeout=WAIT_SECONDS))
    assert "".join(part.outputs.text for part in parts) == "98 99 100 "
    assert [token_id for part in parts for token_id in part.outputs.token_ids] == [98, 99, 100]
    first, last = parts[0].prompt_info, parts[-1].outputs.finish_info
    assert (first.num_prompt_tokens, list(first.token_ids)) == (1, [97])
    assert not any(part.HasField("prompt_info") for part in parts[1:])
    assert (last.num_output_tokens, last.finish_reason) == (3, pb.FinishInfo.LENGTH)
    whole = stub.Generate(asked, timeout=WAIT_SECONDS)
    assert (whole.outputs.text, list(whole.outputs.token_ids)) == ("98 99 100 ", [98, 99, 100])
    assert whole.outputs.num_tokens == 3 and whole.outputs.finish_info == last and whole.prompt_info == first


def test_what_was_not_asked_for_is_left_out(channel: grpc.Channel):
    asked = request(response=pb.ResponseOptions(output_text=False))
    whole = pb_grpc.InferenceStub(channel).Generate(asked, timeout=WAIT_SECONDS)
    assert (whole.outputs.text, list(whole.outputs.token_ids), whole.outputs.num_tokens) == ("", [], 3)
    assert not whole.prompt_info.token_ids


def test_samples_are_told_apart_and_salts_are_passed_on(server: Running, channel: grpc.Channel):
    asked = request(sampling=pb.RandomSampling(num_sequences=2), kv=pb.KVCacheParameters(cache_salt="mine"))
    stub = pb_grpc.InferenceStub(channel)
    parts = list(stub.GenerateStream(asked, timeout=WAIT_SECONDS))
    assert {part.outputs.index for part in parts} == {0, 1} and server.engine.salts[-1] == "mine"
    with pytest.raises(grpc.RpcError, match="num_sequences: got 2"):
        stub.Generate(asked, timeout=WAIT_SECONDS)
    asked.kv.bypass_prefix_cache = True
    for _ in range(2):
        list(stub.GenerateStream(asked, timeout=WAIT_SECONDS))
    assert len({"mine", *server.engine.salts[-2:]}) == 3


def test_every_supported_field_is_passed_on():
    asked = pb.GenerateRequest(
        temperature=0.0,
        sampling=pb.RandomSampling(top_k=5, top_p=0.5, min_p=0.25, seed=-1),
        decoding=pb.DecodingParameters(
            presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={7: 1.5},
            allowed_token_ids=[7, 8], regex="a+",
        ),
        stopping=pb.StoppingCriteria(
            max_new_tokens=9, min_new_tokens=2, stop_token_ids=[3], stop_strings=["x"], include_stop_strings=True,
            ignore_eos=True,
        ),
        response=pb.ResponseOptions(output_candidates=pb.CandidateTokens(top_n=4), skip_special_tokens=False),
    )  # fmt: skip
    params = sampling_params(asked, {"temperature": 0.6, "top_k": 20})
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 5, 0.5, 0.25)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.5)
    assert params.logit_bias == {7: 1.5} and params.allowed_token_ids == (7, 8) and params.seed is not None
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids, params.stop) == (9, 2, (3,), ("x",))
    assert params.include_stop and params.ignore_eos and params.logprobs == 4 and not params.skip_special_tokens
    assert params.constraint is not None and params.constraint.kind == "regex"
    bare = sampling_params(pb.GenerateRequest(), {"temperature": 0.6, "max_tokens": 5})
    assert (bare.temperature, bare.max_tokens, bare.skip_special_tokens, bare.logprobs) == (0.6, 5, True, None)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"media": [pb.MediaItem(modality=1)]}, "media"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"response": pb.ResponseOptions(prompt_logprobs=True)}, "response.prompt_logprobs"),
        ({"kv": pb.KVCacheParameters(kv_transfer_params={"a": 1})}, "kv.kv_transfer_params"),
    ],
)
def test_unsupported_fields_are_refused_by_name(channel: grpc.Channel, fields: dict, name: str):
    with pytest.raises(InvalidRequestError, match=name):
        refuse_unsupported(request(**fields))
    with pytest.raises(grpc.RpcError, match=name) as caught:
        list(pb_grpc.InferenceStub(channel).GenerateStream(request(**fields), timeout=WAIT_SECONDS))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_name_of_an_adapter_is_passed_on(server: Running, channel: grpc.Channel):
    stub = pb_grpc.InferenceStub(channel)
    with pytest.raises(grpc.RpcError, match="serves no adapters"):
        stub.Generate(request(lora_name="law"), timeout=WAIT_SECONDS)
    server.engine.adapters = FakeCatalog("law")
    try:
        stub.Generate(request(lora_name="law"), timeout=WAIT_SECONDS)
        assert server.engine.options[-1].adapter == "law"
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(request(lora_name="other"), timeout=WAIT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        server.engine.adapters = NoAdapters()


def test_the_server_describes_itself_and_ends_requests(server: Running, channel: grpc.Channel):
    control = pb_grpc.ControlStub(channel)
    about = control.GetServerInfo(pb.GetServerInfoRequest(), timeout=WAIT_SECONDS)
    assert (about.parallelism.tensor_parallel_size, about.parallelism.data_parallel_size) == (2, 1)
    assert (about.kv_block_size, about.total_kv_blocks) == (INFO.page_size_tokens, 100)
    assert about.max_model_len == INFO.max_context_tokens and about.instance_id
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", *SERVICES):
        found = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_SECONDS)
        assert found.status == health_pb2.HealthCheckResponse.SERVING
    with server.engine.holding(50):
        call = pb_grpc.InferenceStub(channel).GenerateStream(request(max_new_tokens=50, request_id="mine"))
        next(call)
        control.Abort(pb.AbortRequest(request_ids=["mine"]), timeout=WAIT_SECONDS)
        assert [part.outputs.finish_info.finish_reason for part in call][-1] == pb.FinishInfo.ABORTED


def test_it_tells_where_events_are_published(server: Running, channel: grpc.Channel):
    control = pb_grpc.ControlStub(channel)
    assert not control.GetKvEventSources(pb.GetKvEventSourcesRequest(), timeout=WAIT_SECONDS).sources
    assert server.edge.backend is not None

    class Publishing:
        source = PublisherAddress("tcp://127.0.0.1:5557", "kv@a@b", "tcp://127.0.0.1:5558", 9)

    object.__setattr__(server.edge.backend, "kv_events", KvEventFeed(PageChanges(16), Publishing()))  # type: ignore
    [source] = control.GetKvEventSources(pb.GetKvEventSourcesRequest(), timeout=WAIT_SECONDS).sources
    assert (source.transport, source.encoding, source.schema_version) == ("zmq", "msgpack", 1)
    assert (source.endpoint, source.topic, source.replay_endpoint) == tuple(
        getattr(Publishing.source, name) for name in ("endpoint", "topic", "replay_endpoint")
    )
