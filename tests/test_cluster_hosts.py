"""Runs a cluster on emulated hosts (network namespaces) with mutual TLS and a token on the step stream."""

import subprocess
from pathlib import Path

import grpc
import pytest

from meshserve.benchmarks.lib.namespaces import can_make_hosts, hosts
from meshserve.protos import steps_pb2 as pb
from meshserve.protos import steps_pb2_grpc as pb_grpc
from meshserve.runtime.client.client import Client
from meshserve.runtime.commands.local_cluster import local_cluster

from .certificates import certificate
from .listening import listening_addresses
from .waiting import WAIT_SECONDS

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")

FLAGS = (
    "--model=demo", "--tp=2", "--cpu-devices=1", "--dtype=float32", "--page-size=16", "--max-running=1",
    "--max-step-tokens=1", "--num-pages=64", "--no-logits-processors", "--fail-seconds=600",
)  # fmt: skip


def flags_of(index: int, folder: Path, address: str, token: str = "secret") -> list[str]:
    """Returns the flags of one process: its own certificate and addresses."""
    name = f"host{index}"
    files = certificate(folder, name, "authority", address)
    (folder / token).write_text(f"{token}\n")
    return [
        f"--host={address}", f"--tls-cert={files.certificate}", f"--tls-key={files.key}", "--allow-insecure",
        f"--cluster-ca={folder / 'authority.pem'}", f"--cluster-token={folder / token}",
    ]  # fmt: skip


def join(address: str, credentials: grpc.ChannelCredentials | None, token: str) -> grpc.StatusCode:
    """Returns the status with which process 0 refuses an unknown caller."""
    channel = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    with channel:
        hello = iter([pb.JoinRequest(hello=pb.Hello(process_id=1))])
        metadata = [("authorization", f"Bearer {token}")]
        call = pb_grpc.StepServiceStub(channel).Join(hello, metadata=metadata, timeout=WAIT_SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert isinstance(caught.value, grpc.Call)
        return caught.value.code()


def test_two_hosts_with_tls_and_a_token(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority").certificate
    with hosts(2) as made:
        options = {
            "host": made.address(0),
            "prefixes": {index: made.prefix(index) for index in range(2)},
            "own_flags": {index: flags_of(index, tmp_path, made.address(index)) for index in range(2)},
        }
        with local_cluster(2, FLAGS, tmp_path, **options) as cluster:
            trusting = grpc.ssl_channel_credentials(authority.read_bytes())
            with Client(cluster.target, credentials=trusting) as client:
                cluster.wait_until_ready(client, WAIT_SECONDS)
                said = client.complete("ROMEO:\n", max_tokens=8, temperature=0.0, ignore_eos=True)
                assert len(said.token_ids) == 8
                assert f"process 1 at ipv4:{made.address(1)}" in cluster.log(0).read_text()

                [coordinator_port, step_port] = [
                    flag.rpartition("=")[2].rpartition(":")[2]
                    for flag in cluster.commands[0]
                    if flag.startswith(("--coordinator", "--step-port"))
                ]
                opened = listening_addresses(cluster.processes[0].pid)
                assert opened[int(coordinator_port)] == opened[int(step_port)] == made.address(0)
                address = f"{made.address(0)}:{step_port}"
                assert join(address, None, "secret") is grpc.StatusCode.UNAVAILABLE  # without TLS
                assert join(address, trusting, "secret") is grpc.StatusCode.UNAVAILABLE  # without a client certificate
                wrong = [*cluster.commands[1], *flags_of(1, tmp_path, made.address(1), "wrong")]
                done = subprocess.run(wrong, capture_output=True, text=True, timeout=WAIT_SECONDS)
                assert done.returncode == 1
                assert "UNAUTHENTICATED: this is not the token of the cluster" in done.stderr

                again = client.complete("ROMEO:\n", max_tokens=8, temperature=0.0, ignore_eos=True)
                assert again.token_ids == said.token_ids  # the refused attempts had no effect
            assert cluster.stop(WAIT_SECONDS) == [0, 0]
