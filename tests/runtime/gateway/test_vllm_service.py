"""The service for gateways, by its own protocol. Off-the-shelf gateways: tests/test_gateway.py."""

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.client.client import CallError, call_errors
from meshserve.runtime.gateway.vllm_service import add_gateway, refuse_others, sampling_params
from meshserve.runtime.server.lifecycle import Listen
from tests.runtime.loopback import running
from tests.waiting import WAIT_SECONDS

LISTEN = Listen(gateway_port=0, add_gateway=add_gateway)


def test_a_full_queue_refuses_a_request_before_it_is_read(monkeypatch):
    with running(listen=LISTEN) as server:
        monkeypatch.setattr(server.engine, "is_full", True)
        generate = "/vllm.grpc.engine.VllmEngine/Generate"
        with grpc.insecure_channel(f"127.0.0.1:{server.handle.gateway_port}") as channel:
            with pytest.raises(CallError, match="9 requests wait") as caught, call_errors():
                list(channel.unary_stream(generate)(b"\xff no message"))
            monkeypatch.undo()
            with pytest.raises(CallError, match="the bytes are not a message"), call_errors():
                list(channel.unary_stream(generate)(b"\xff no message"))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED and caught.value.retry_seconds == 2.5
        assert server.counted("meshserve_refused_calls_total", code="resource_exhausted") == 1


def test_every_field_of_the_gateways_protocol_is_passed_on():
    """Tests every field, including logit_bias, which smg 1.13 itself omits but other gateways may not."""
    fields = {"min_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5,
              "min_tokens": 3, "logprobs": 0, "prompt_logprobs": 5, "logit_bias": {7: -1.5}}  # fmt: skip
    params = sampling_params(pb.SamplingParams(**fields))
    assert {name: getattr(params, name) for name in fields} == fields
    bare = sampling_params(pb.SamplingParams())
    assert bare == SamplingParams(skip_special_tokens=False)  # this field is always sent
    assert sampling_params(pb.SamplingParams(skip_special_tokens=True)).skip_special_tokens
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 5}
    with_defaults = sampling_params(pb.SamplingParams(temperature=0.0), defaults=defaults)
    assert (with_defaults.temperature, with_defaults.top_k, with_defaults.max_tokens) == (0.0, 20, 5)
    for name, value in {"truncate_prompt_tokens": 4, "logprobs": -1, "structural_tag": "{}"}.items():
        with pytest.raises(InvalidRequestError):
            sampling_params(pb.SamplingParams(**{name: value}))


def test_what_is_not_looked_at_is_refused():
    request = pb.GenerateRequest(request_id="a", text="b", stream=True, data_parallel_rank=0)
    refuse_others(request)
    for others in ({"mm_inputs": {}}, {"kv_transfer_params_json": "{}"}, {"data_parallel_rank": 3}):
        with pytest.raises(InvalidRequestError, match=next(iter(others))):
            refuse_others(pb.GenerateRequest(text="b", **others))


def test_a_call_aborts_so_many_requests():
    with running(listen=LISTEN) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.handle.gateway_port}") as channel:
            stub = pb_grpc.VllmEngineStub(channel)
            with server.engine.holding(50):
                request = pb.GenerateRequest(request_id="a", text="b", stream=True)
                request.sampling_params.max_tokens = 50
                call = stub.Generate(request)
                next(call)
                with pytest.raises(CallError, match="request_ids: got 1025; allowed are 1024"), call_errors():
                    stub.Abort(pb.AbortRequest(request_ids=["a"] * 1025), timeout=WAIT_SECONDS)
                stub.Abort(pb.AbortRequest(request_ids=["a"] * 1024), timeout=WAIT_SECONDS)
                assert [message.complete.finish_reason for message in call][-1] == "abort"
