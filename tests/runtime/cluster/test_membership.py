"""Tests which processes form a cluster, and which weights each of them reads."""

import json
import os
import socket
import subprocess
import sys

import pytest

from meshserve.runtime.cluster.membership import ClusterError, Membership, find_membership, start_devices
from meshserve.runtime.commands.local_cluster import reserved_port
from tests.waiting import WAIT_SECONDS

LWS = {"LWS_LEADER_ADDRESS": "m-0.m.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip


def test_flags_name_a_cluster():
    found = find_membership("10.0.0.1:50060", 2, 1, {})
    assert found == Membership(coordinator="10.0.0.1:50060", num_processes=2, process_id=1)
    assert not found.is_leader and found.host == "10.0.0.1"


def test_one_process_is_no_cluster():
    assert find_membership("", 1, 0, LWS) is None
    assert find_membership("10.0.0.1:50060", 1, 0, {}) is None
    assert find_membership("auto", 1, 0, LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}) is None


def test_leader_worker_set_names_a_cluster():
    found = find_membership("auto", 1, 0, LWS)
    assert found == Membership(coordinator="m-0.m.default:50060", num_processes=4, process_id=2)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, Membership(coordinator="node3", num_processes=2, process_id=1)),
        (
            # On TPUs the LeaderWorkerSet sets the slice's hosts as GKE does, and jax is queried.
            LWS | {"TPU_WORKER_HOSTNAMES": "localhost,t-1", "TPU_WORKER_ID": "1"},
            Membership(coordinator="localhost", num_processes=2, process_id=1),
        ),
        (
            {
                "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            },
            Membership(coordinator="10.96.0.1", num_processes=2, process_id=1),
        ),
    ],
    ids=["slurm", "gke", "openmpi"],
)  # fmt: skip
def test_what_jax_knows_names_a_cluster(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", "TPU_WORKER_ID" in environment)
    monkeypatch.setattr(
        "jax._src.clusters.cloud_tpu_cluster.get_metadata", lambda key: ("", 404)
    )  # instead of this machine's metadata
    found = find_membership("auto", 1, 0, environment)
    assert found is not None and found.coordinator.rpartition(":")[2].isdigit()
    assert (found.host, found.num_processes, found.process_id) == (
        expected.coordinator, expected.num_processes, expected.process_id
    )  # fmt: skip


def test_a_port_in_use_is_an_error():
    """Without this check, jax would abort the process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        coordinator = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"cannot meet at {coordinator}: the port is in use. Free it"):
            start_devices(Membership(coordinator=coordinator, num_processes=2, process_id=0))


@pytest.mark.parametrize(
    ("host", "leads_to", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("[::1]", None, "[::1]"),
        ("localhost", None, "localhost"),
        ("192.0.2.1", None, "[::]"),  # an address of another machine, as with network address translation
        ("node3", "127.0.1.1", "[::]"),  # /etc/hosts of a Debian machine called node3
        ("nowhere.invalid", None, "[::]"),
    ],
)
def test_process_0_listens_where_the_others_look_for_it(monkeypatch, caplog, host, leads_to, expected):
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **kind: look_up(leads_to or host, *args, **kind))
    membership = Membership(coordinator=f"{host}:50060", num_processes=2, process_id=0)
    assert membership.listening_host == membership.listening_host == expected
    assert caplog.text.count("process 0 listens on all addresses") == (expected == "[::]")


def test_an_orchestrator_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", False)
    with pytest.raises(ClusterError, match="Pass --coordinator HOST:PORT"):
        find_membership("auto", 1, 0, {})


MEMBER = """
import json, sys
import jax
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.weights.registry import read_model
from meshserve.runtime.weights.locate import find_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.cluster.membership import Membership, start_devices
from meshserve.sharding.mesh import make_mesh, use_cpu_devices
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

coordinator, process_id = sys.argv[1], int(sys.argv[2])
use_cpu_devices(3)
start_devices(Membership(coordinator=coordinator, num_processes=2, process_id=process_id))
copied = 0
fill = TensorFiles.fill

def counting(self, tensor, block, copies):
    global copied
    copied += sum(copy.target.size for copy in copies)
    fill(self, tensor, block, copies)

TensorFiles.fill = counting
mesh = make_mesh(4)
files = find_model("demo")
model = read_model(files.small / "config.json")
_, params = load_model(files.weights, model, model_layout(model, 4), mesh, jax.numpy.dtype("float32"))
shards = [shard.data for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
print(json.dumps({
    "mesh": [device.process_index for device in mesh.devices.flat],
    "copied": copied,
    "held": sum(shard.size for shard in shards),
    "all": sum(leaf.size for leaf in jax.tree.leaves(params)),
    "devices": sorted({str(device) for shard in shards for device in shard.devices()}),
    "own": [str(device) for device in mesh.local_devices],
}))
jax.distributed.shutdown()
"""


def test_each_process_reads_and_holds_its_own_shards_only():
    with reserved_port() as port:
        command = [sys.executable, "-c", MEMBER, f"127.0.0.1:{port}"]
        # A proxy that refuses everything must not be asked for the other process.
        env = {**os.environ, "http_proxy": "http://127.0.0.1:1", "no_proxy": "other.example"}
        processes = [
            subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, text=True, env=env) for index in range(2)
        ]
        said = [json.loads(process.communicate(timeout=WAIT_SECONDS)[0].splitlines()[-1]) for process in processes]
    for one in said:
        assert one["mesh"] == [0, 0, 1, 1]  # with three devices each, the same number from either process
        assert one["devices"] == sorted(one["own"])
        # Norms are replicated and padding is not read, so the shares are slightly above and below one half.
        assert 0.45 * one["all"] < one["copied"] <= one["held"] < 0.6 * one["all"]
