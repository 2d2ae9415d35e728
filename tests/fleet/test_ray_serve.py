"""The Ray Serve application, started for real with CPU devices: two replicas behind Ray's gRPC proxy."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import yaml

from meshserve.runtime.client.client import CallError, Client
from tests.listening import free_port
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray comes with the extra ray")
ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "model": "demo", "cpu_devices": 1, "dtype": "float32", "page_size": 16, "num_pages": 256, "max_running": 8,
    "max_step_tokens": 64, "compile_threads": 1, "cpus": 0.5, "min_replicas": 2, "max_replicas": 2,
}  # fmt: skip


def children(name: str) -> set[int]:
    """Returns the processes whose command line has this word."""
    found = subprocess.run(["ps", "-e", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=1) for line in found.splitlines()]
    return {int(pid) for pid, line in rows if "meshserve serve" in line and name in line and "guard" not in line}


def test_two_replicas_answer_behind_the_proxy_and_end_with_it():
    import ray
    from ray import serve
    from ray.serve.config import gRPCOptions

    from meshserve.deploy.ray_serve.application import SERVICER, build

    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, ignore_reinit_error=False)
    try:
        serve.start(
            http_options={"port": free_port(), "host": "127.0.0.1"},
            grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[SERVICER]),
        )
        serve.run(build(ARGUMENTS | {"served_name": "rayed"}), name="meshserve", route_prefix="/")
        servers = children("--served-name=rayed")
        assert len(servers) == 2
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
        assert len(groups) == 2 and {group["strategy"] for group in groups} == {"STRICT_PACK"}
        with Client(f"127.0.0.1:{port}") as client:
            assert client.model_info().name == "rayed"
            texts = {client.complete("HAMLET:\n", seed=7, max_tokens=16).text for _ in range(8)}
            assert len(texts) == 1
            chunks = list(client.generate("HAMLET:\n", seed=7, max_tokens=16))
            assert "".join(chunk.text for chunk in chunks) == next(iter(texts))
            with pytest.raises(CallError, match="top_p"):
                client.complete("a", top_p=5.0)
            print("\nRay Serve:", texts, servers)
        victim = next(iter(servers))
        subprocess.run(["kill", "-9", str(victim)], check=True)
        wait_for(lambda: len(children("--served-name=rayed") - {victim}) == 2)  # Ray replaces the replica
    finally:
        serve.shutdown()
        ray.shutdown()
    wait_for(lambda: not children("--served-name=rayed"))


def test_the_policy_follows_load():
    from meshserve.deploy.ray_serve.application import LoadPolicy, build, load_of
    from meshserve.protos import inference_pb2 as pb

    class Context:
        target_num_replicas = 2
        aggregated_metrics: dict | None = None

    context, policy = Context(), LoadPolicy(target_load=0.7)
    assert policy(context)[0] == 2, "no metrics yet"
    rows = [
        ({"a": 0.0, "b": 0.0}, {}, 1),
        ({"a": 0.6, "b": 0.7}, {"a": 0.0, "b": 0.0}, 2),
        ({"a": 0.9, "b": 0.9}, {}, 3),
        ({"a": 0.9, "b": 0.9}, {"a": 0.5, "b": 5.0}, 5),
    ]
    for usage, queue, wanted in rows:
        context.aggregated_metrics = {"kv_usage": usage, "queue": queue}
        assert policy(context)[0] == wanted, (usage, queue)
    load = load_of(pb.GetLoadResponse(num_running=4, num_waiting=2, num_pages=10, num_free_pages=4))
    assert load == {"kv_usage": pytest.approx(0.6), "queue": 0.5}
    with pytest.raises(Exception, match="page_size is -1"):
        build(ARGUMENTS | {"page_size": -1})
    build(ARGUMENTS | {"max_replicas": 4})


def test_kuberay_gets_a_config_that_serve_takes():
    from ray.serve.schema import ServeDeploySchema

    manifest = yaml.safe_load((ROOT / "deploy" / "ray_serve" / "rayservice.yaml").read_text())
    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    [application] = config.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    [servicer] = config.grpc_options.grpc_servicer_functions
    module, _, name = servicer.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    importlib.import_module("meshserve.deploy.ray_serve.application").build(dict(application.args))
    for group in manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        [container] = group["template"]["spec"]["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) >= application.args["gpus"]
