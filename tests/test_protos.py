"""Checks the proto: it lints, matches the generated code, and names its fields as the dataclasses do."""

import inspect
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import Message

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.protos import steps_pb2, vllm_pb2
from meshserve.runtime.api import proto_codec
from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.api.request import FinishReason, Load, Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.client.messages import SamplingFields

from .waiting import WAIT_SECONDS

PROTOS = Path(__file__).resolve().parent.parent / "protos"


def buf(*arguments: str) -> bytes:
    path = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert path is not None, "buf comes with the test extra (buf-bin)"
    done = subprocess.run([path, *arguments], cwd=PROTOS, capture_output=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout


def test_the_proto_lints_and_is_formatted():
    buf("lint")
    buf("format", "--diff", "--exit-code")


def without_json_names(message: Message) -> Message:
    """Removes the JSON names, which protoc omits from generated code but buf computes."""
    for field, value in message.ListFields():
        if field.name == "json_name":
            message.ClearField("json_name")
        elif field.message_type is not None and field.is_repeated:
            for item in value:
                without_json_names(item)
    return message


@pytest.mark.parametrize("generated_file", [pb, steps_pb2, vllm_pb2])
def test_the_generated_code_is_that_of_the_proto(generated_file):
    built = descriptor_pb2.FileDescriptorSet.FromString(
        buf("build", "--as-file-descriptor-set", "--exclude-source-info", "--exclude-imports", "-o", "-#format=binpb")
    )
    generated = descriptor_pb2.FileDescriptorProto.FromString(generated_file.DESCRIPTOR.serialized_pb)
    [ours] = (file for file in built.file if file.package == generated.package)
    ours.name = generated.name  # buf's paths are relative to protos/, protoc's to src/
    assert without_json_names(ours) == without_json_names(generated), "run `make protos`, and commit what it writes"


def test_the_generated_stubs_have_every_method():
    for name, service in pb.DESCRIPTOR.services_by_name.items():
        servicer = getattr(pb_grpc, f"{name}Servicer")
        assert [method.name for method in service.methods] == [
            method for method in vars(servicer) if not method.startswith("_")
        ]
        for method in service.methods:
            assert f'"/{service.full_name}/{method.name}"' in inspect.getsource(
                getattr(pb_grpc, f"{name}Stub")
            ).replace("'", '"')


def test_the_generated_types_have_every_field():
    types = (PROTOS / "inference_pb2.pyi").read_text()
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        body = types.split(f"class {name}(", 1)[1].split("\nclass ", 1)[0]
        for field in message.fields_by_name:
            assert f"    {field}: " in body, f"{name}.{field}"


@pytest.mark.parametrize(
    ("message", "kind"),
    [(pb.SamplingParams, SamplingParams), (pb.GetModelInfoResponse, ModelInfo), (pb.GetLoadResponse, Load)],
)
def test_messages_and_dataclasses_have_the_same_fields(message, kind):
    assert set(message.DESCRIPTOR.fields_by_name) == {field.name for field in fields(kind)}


def test_the_client_takes_every_sampling_field():
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == set(SamplingFields.__annotations__)


def test_both_answers_have_the_same_fields_but_the_parts():
    generate, chat = pb.GenerateResponse.DESCRIPTOR, pb.ChatResponse.DESCRIPTOR
    numbers = [{field.name: field.number for field in message.fields} for message in (generate, chat)]
    assert numbers[0] | {"parts": 13} == numbers[1]


def test_a_chat_request_has_every_field_of_a_conversation():
    of_request = pb.ChatRequest.DESCRIPTOR.fields_by_name
    for field in pb.Conversation.DESCRIPTOR.fields:
        same = of_request[field.name]
        assert (same.type, same.is_repeated, same.message_type) == (field.type, field.is_repeated, field.message_type)


def test_every_finish_reason_goes_over_the_wire():
    for reason in FinishReason:
        for kind in (pb.GenerateResponse, pb.ChatResponse):
            response = proto_codec.answer(kind, Output(request_id="a", finish_reason=reason))
            assert pb.FinishReason.Name(response.finish.reason) == f"FINISH_REASON_{reason.name}"
            assert proto_codec.finish_reason(response.finish.reason) is reason


def test_presence_decides_between_a_zero_and_a_default():
    sent = pb.SamplingParams(temperature=0.0, top_k=0, seed=0, ignore_eos=False, stop=["a"])
    assert proto_codec.sampling_params(sent) == SamplingParams(temperature=0.0, seed=0, stop=("a",))
    assert proto_codec.sampling_params(pb.SamplingParams()) == SamplingParams()
