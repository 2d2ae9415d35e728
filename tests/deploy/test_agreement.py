"""Checks that manifests, configs, scripts, dashboards and alerts agree with the server's code."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.api.request import Load
from meshserve.runtime.cluster.follower_metrics import FollowerState, follower_registry
from meshserve.runtime.cluster.membership import Membership
from meshserve.runtime.cluster.stream_client import FollowingStats
from meshserve.runtime.commands import cli
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.options.toml_file import read_toml
from meshserve.runtime.plan.report import PlanRequest, planner_of
from meshserve.runtime.program.expert_balance import ExpertBalance
from meshserve.runtime.telemetry.metrics import Metrics, ServerState
from meshserve.sharding.chips import GIB
from tests.waiting import WAIT_SECONDS

from .manifests import DEPLOY, OVERLAYS, arguments, containers, rendered, tool, workloads

RUNBOOK = (DEPLOY.parent / "docs" / "runbook.md").read_text()
CONFIGS = sorted([*(DEPLOY / "configs").glob("*.toml"), *(DEPLOY / "tpu").glob("*.toml")])
SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
needs_kubectl = pytest.mark.skipif(tool("kubectl") is None, reason="make test-deploy installs kubectl")
overlays = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)


def served(overlay: Path, folder: Path) -> tuple[ServeConfig, dict[str, Any], int]:
    """Returns the config of an overlay's pods, their template and their number; writes the configs to `folder`."""
    for item in rendered(overlay):
        if item["kind"] == "ConfigMap" and item["metadata"]["name"] == "meshserve-configs":
            for name, text in item["data"].items():
                (folder / name).write_text(text)
    [(template, num_pods)] = [found for found in workloads(rendered(overlay)) if containers(found[0], "meshserve")]
    [container] = containers(template, "meshserve")
    [mounted] = [mount for mount in container["volumeMounts"] if mount["name"] == "configs"]
    flags = [argument.replace(mounted["mountPath"], str(folder)) for argument in arguments(container)]
    return cli.serve_config(cli._parser().parse_args(flags)), template, num_pods


@needs_kubectl
@overlays
def test_pods_serve_with_flags_and_keys_that_there_are(overlay: Path, tmp_path: Path):
    config, template, num_pods = served(overlay, tmp_path)
    [container] = containers(template, "meshserve")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    options = {"grpc": "port", "http": "http_port", "gateway": "gateway_port", "steps": "step_port",
               "kv-events": "kv_events_endpoint", "kv-replay": "kv_events_replay_endpoint"}  # fmt: skip
    for name, port in ports.items():
        assert str(getattr(config, options[name])).removeprefix("tcp://*:") == str(port), name
    assert (config.coordinator == "auto") == (num_pods > 1)
    assert config.fail_seconds < template["spec"]["terminationGracePeriodSeconds"]
    assert config.host == "0.0.0.0" and config.log_format == "json"
    assert template["spec"]["terminationGracePeriodSeconds"] > config.drain_seconds
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(config.http_port)
    assert config.cache_dir in {mount["mountPath"] for mount in container["volumeMounts"]}
    limits = container["resources"]["limits"]
    num_chips = int(limits.get("nvidia.com/gpu", limits.get("google.com/tpu", 0)))
    if overlay.name == "pathways":
        num_chips = sum(
            number * int(found["resources"]["limits"]["google.com/tpu"])
            for pod, number in workloads(rendered(overlay))
            for found in containers(pod, "worker")
        )
        num_pods = 1
    assert num_chips * num_pods == config.tp


def check_other_ports_are_closed(policy: dict[str, Any], template: dict[str, Any]) -> None:
    """Checks that a policy covers the pod and opens its unnamed ports, such as JAX's, to its own group alone."""
    assert "Ingress" in policy["policyTypes"] and not template["spec"].get("hostNetwork")
    own = policy["podSelector"]["matchLabels"]
    assert own.items() <= template["metadata"]["labels"].items()
    for rule in policy["ingress"]:
        assert rule.get("from") and (rule.get("ports") or rule["from"] == [{"podSelector": {"matchLabels": own}}])


@needs_kubectl
@overlays
def test_probes_and_ports_lead_to_the_server(overlay: Path, tmp_path: Path):
    config, template, _ = served(overlay, tmp_path)
    [container] = containers(template, "meshserve")
    names = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "grpc" in container[probe]:
            assert container[probe]["grpc"] == {"port": config.port, "service": SERVICE}
        else:
            assert container[probe]["httpGet"]["path"] in ("/livez", "/readyz")
            assert container[probe]["httpGet"]["port"] in names
    for item in rendered(overlay):
        spec, name = item.get("spec", {}), item["metadata"]["name"]
        if item["kind"] == "Service" and name == "meshserve":
            for port in spec["ports"]:
                assert names[port["targetPort"]] == port["port"]
        if item["kind"] == "NetworkPolicy":
            assert {port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())} <= names.keys()
            check_other_ports_are_closed(spec, template)
        if item["kind"] == "InferencePool":
            assert [port["number"] for port in spec["targetPorts"]] == [config.gateway_port]
    others = [item for pod, _ in workloads(rendered(overlay)) for item in containers(pod) if item is not container]
    said = dict(flag.lstrip("-").partition("=")[::2] for other in others for flag in arguments(other))
    assert said.get("service-discovery-port") in (None, str(config.gateway_port))
    assert said.get("model-server-metrics-port") in (None, str(config.http_port))


@needs_kubectl
def test_the_secured_component_wants_tls_and_tokens(tmp_path: Path):
    original = DEPLOY / "kubernetes" / "overlays" / "gpu-node"
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    base = Path(os.path.relpath(original, overlay.resolve()))
    text = yaml.safe_load((original / "kustomization.yaml").read_text())
    text["resources"] = [str(base / path) for path in text["resources"]]
    text["components"] = [str(base / path) for path in text["components"]]
    text["components"].insert(0, str(base / ".." / ".." / "components" / "secured"))
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(text))
    config, template, _ = served(overlay, tmp_path)
    [container] = containers(template, "meshserve")
    assert not config.allow_insecure
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (config.tls_cert, config.tls_key, config.tokens):
        assert str(Path(path).parent) in mounts
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/readyz", "port": "http"} and "grpc" not in container[probe]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_can_be_served(path: Path):
    config = ServeConfig(**read_toml(path))
    listed = yaml.safe_load(path.with_name("kustomization.yaml").read_text())["configMapGenerator"][0]["files"]
    assert path.name in listed
    if config.model not in ("", "demo"):
        plan(config)


def plan(config: ServeConfig) -> tuple[float, int]:
    """Returns GiB of weights and cache tokens per 80 GB device; raises if the TP size or the memory does not fit."""
    name = Path(config.model).name.lower()
    config = dataclasses.replace(config, model=name)
    found = planner_of(PlanRequest(config=config, target=f"h100:{config.tp}")).plan()
    return found.weight_bytes / GIB, found.served_tokens


def test_the_sizes_of_the_runbook_are_those_of_the_configs():
    rows = dict(re.findall(r"^\| `(qwen3\S+\.toml)` \|(.+)\|$", RUNBOOK, re.MULTILINE))
    assert rows.keys() == {path.name for path in (DEPLOY / "configs").glob("qwen3*.toml")}
    for name, row in rows.items():
        config = ServeConfig(**read_toml(DEPLOY / "configs" / name))
        gib, num_tokens = plan(config)
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[0] == str(config.tp)
        assert float(cells[1]) == pytest.approx(gib, abs=0.06)
        assert float(cells[2].replace(",", "")) == pytest.approx(num_tokens, rel=0.001), (name, num_tokens)


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--([a-z][a-z-]+[a-z])", text))


def test_commands_in_scripts_and_the_runbook_have_flags_that_there_are():
    known = {field.name.replace("_", "-") for field in dataclasses.fields(ServeConfig)} | {"config"}
    slurm = {"nodes", "gpus-per-node", "ntasks-per-node", "job-name", "exclusive", "signal", "requeue"}
    docker = {"gpus", "shm-size", "privileged", "network", "build-arg"}
    others = {"kill-on-bad-exit", "help", "target", "timeout", "days", "json"}
    for path in [*(DEPLOY / "slurm").iterdir(), DEPLOY / "tpu" / "start.sh"]:
        assert flags_in(path.read_text()) <= known | slurm | others, path
    for path in (DEPLOY / "docker").glob("Dockerfile.*"):
        comments = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
        assert flags_in(comments) <= known | docker, path
        exposed = {int(port) for port in re.findall(r"\d+", re.findall(r"EXPOSE (.+)", path.read_text())[0])}
        assert {ServeConfig.port, 50052, 9090} == exposed
    commands = re.findall(r"^ {4}(meshserve serve .+)$", RUNBOOK, re.MULTILINE)
    assert commands
    for command in commands:
        assert flags_in(command) <= known, command


def test_images_can_be_built_from_a_mirror():
    for path in (DEPLOY / "docker").glob("Dockerfile.*"):
        text = path.read_text()
        [base] = re.findall(r"^ARG BASE_IMAGE=(.+)$", text, re.MULTILINE)
        assert base.startswith("docker.io/library/") and ":" in base, "qualified, with a tag"
        assert {line.split()[1] for line in text.splitlines() if line.startswith("FROM ")} == {"${BASE_IMAGE}"}


@dataclasses.dataclass(frozen=True)
class Image:
    """The packages that a Dockerfile installs."""

    python: str
    requirements: tuple[str, ...]
    constraints: Path

    @classmethod
    def named(cls, name: str) -> "Image":
        dockerfile = (DEPLOY / "docker" / f"Dockerfile.{name}").read_text()
        extras = re.findall(r'"\.\[(.+)\]"', dockerfile)[0].split(",")
        project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
        optional = [line for extra in extras for line in project["optional-dependencies"][extra]]
        return cls(
            python=re.findall(r"^ARG BASE_IMAGE=docker.io/library/python:(\d+\.\d+)", dockerfile, re.MULTILINE)[0],
            requirements=(*project["dependencies"], *optional),
            constraints=DEPLOY / "docker" / f"constraints-{name}.txt",
        )

    @property
    def pins(self) -> dict[str, str]:
        return dict(line.split("==") for line in self.constraints.read_text().splitlines() if line)


@pytest.mark.parametrize("name", ["cuda", "tpu"])
def test_images_pin_what_they_install(name: str):
    image = Image.named(name)
    for requirement in map(Requirement, image.requirements):
        assert requirement.specifier.contains(image.pins[requirement.name.lower()]), requirement


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["cuda", "tpu"])
def test_pins_go_together_and_nothing_else_is_installed(name: str, tmp_path: Path):
    """Resolves the image's packages against the package index, restricted to wheels for its Python; takes minutes."""
    pytest.importorskip("promql_parser", reason="make test-deploy installs it")
    image, report = Image.named(name), tmp_path / "report.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"),
            *("--report", str(report), "--target", str(tmp_path / "nowhere")),
            # pip checks a package's Python requirement against pip's own Python, so only test that a wheel for the
            # image's exists.
            *("--python-version", image.python, "--only-binary", ":all:", "--ignore-requires-python"),
            *("--constraint", str(image.constraints), *image.requirements),
        ],
        check=True,
    )
    installed = {
        canonicalize_name(package["metadata"]["name"]): package["metadata"]["version"]
        for package in json.loads(report.read_text())["install"]
    }
    pins = {canonicalize_name(package): version for package, version in image.pins.items()}
    assert installed.items() <= pins.items()


SCRIPTS = {"slurm/serve.sbatch": ("SLURM_JOB_NUM_NODES", "2"), "tpu/start.sh": ("TPU_WORKER_HOSTNAMES", "a,b")}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("is_group", [False, True])
def test_scripts_start_a_server_with_their_config(name: str, is_group: bool, tmp_path: Path):
    """Replaces srun and meshserve by scripts that print their arguments."""
    for program in ("srun", "meshserve"):
        (tmp_path / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (tmp_path / program).chmod(0o755)
    variable, value = SCRIPTS[name]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **({variable: value} if is_group else {})}
    config = DEPLOY / "tpu" / "v6e-4x4.toml"
    command = [str(DEPLOY / name), str(config), "--model", "/models/Qwen3-32B"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
    flags = done.stdout.split()
    served = cli.serve_config(cli._parser().parse_args(flags[flags.index("serve") :]))
    assert (served.tp, served.model) == (16, "/models/Qwen3-32B")
    assert served.coordinator == ("auto" if is_group else "")
    usage = subprocess.run(command[:1], env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert usage.returncode == 2 and "usage:" in usage.stderr


def metric_names() -> set[str]:
    """Returns all names that /metrics may show, including the parts of histograms."""
    info = ModelInfo(**{
        field.name: () if field.name == "eos_token_ids" else "" if field.type is str else 1
        for field in dataclasses.fields(ModelInfo)
    })  # fmt: skip
    load = Load(num_running=1, num_waiting=1, num_pages=2, num_free_pages=1)
    metrics = Metrics()
    metrics.read_state = lambda: ServerState(info=info, load=load)
    metrics.read_task_failures = lambda: {"engine": 0}
    one = np.ones(1, np.int64)
    balance = ExpertBalance(expert_tokens=one, device_tokens=one, expert_imbalance=1.0, device_imbalance=1.0)
    metrics.read_expert_balance = lambda: balance
    followed = FollowingStats(heard=1.0, num_calls=Counter(run=1), num_acknowledged=1, acknowledged=1.0)
    membership = Membership(coordinator="a:1", num_processes=2, process_id=1)
    state = FollowerState(is_ready=True, num_late_compiles=0, stats=followed)
    registries = (metrics.registry, follower_registry(membership, lambda: state))
    return {sample.name for registry in registries for family in registry.collect() for sample in family.samples}


def asked_names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:meshserve_|vllm:)[a-z_]+", text))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts" / "meshserve.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_autoscaler_dashboard_and_picker_ask_for_metrics_that_there_are():
    known = metric_names()
    asked = {rule["alert"]: asked_names(rule["expr"]) for rule in rules()}
    dashboard = json.loads((DEPLOY / "dashboards" / "meshserve.json").read_text())
    asked |= {panel["title"]: asked_names(json.dumps(panel)) for panel in dashboard["panels"]}
    for path in ("prometheus-adapter.yaml", "components/autoscale/autoscaler.yaml"):
        asked[path] = asked_names((DEPLOY / "kubernetes" / path).read_text())
    picker = DEPLOY / "kubernetes" / "overlays" / "inference-pool" / "picker-config.yaml"
    asked["picker"] = asked_names(picker.read_text())
    for where, names in asked.items():
        assert names, where
        assert names <= known, (where, names - known)
    assert known >= {"meshserve_request_seconds_bucket", "vllm:cache_config_info"}


# The metrics and labels that endpoint pickers read by default: docs/model-server-protocol.md of llm-d-router, whose
# core-metrics-extractor takes the engine `vllm` where a pod has no label of its own.
PICKED = {
    "vllm:num_requests_waiting": set(), "vllm:num_requests_running": set(), "vllm:kv_cache_usage_perc": set(),
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
}  # fmt: skip


def test_endpoint_pickers_find_what_they_read_by_default():
    info = ModelInfo(**{
        field.name: () if field.name == "eos_token_ids" else "" if field.type is str else 16
        for field in dataclasses.fields(ModelInfo)
    })  # fmt: skip
    metrics = Metrics()
    metrics.read_state = lambda: ServerState(
        info=info, load=Load(num_running=3, num_waiting=2, num_pages=8, num_free_pages=2)
    )
    samples = {sample.name: sample for family in metrics.registry.collect() for sample in family.samples}
    for name, labels in PICKED.items():
        assert labels <= samples[name].labels.keys()
    values = [samples[name].value for name in list(PICKED)[:3]]
    assert values == [2, 3, 0.75], "usage counts from 0 to 1"
    cache = samples["vllm:cache_config_info"].labels
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "8")


@needs_kubectl
def test_the_picker_of_llm_d_subscribes_where_the_pods_publish(tmp_path: Path):
    overlay = DEPLOY / "kubernetes" / "overlays" / "llm-d"
    config, template, _ = served(overlay, tmp_path)
    picker = yaml.safe_load((overlay / "picker-config.yaml").read_text())
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in picker["plugins"]}
    events = plugins["precise-prefix-cache-producer"]["kvEventsConfig"]
    found = events["podDiscoveryConfig"]
    assert config.kv_events_endpoint == f"tcp://*:{found['socketPort']}"
    assert config.kv_events_replay_endpoint == f"tcp://*:{found['replaySocketPort']}"
    assert template["metadata"]["labels"]["llm-d.ai/inference-serving"] == "true"  # its default selector
    assert events["topicFilter"] == "kv@" and not config.kv_events_topic
    named = [profile["pluginRef"] for each in picker["schedulingProfiles"] for profile in each["plugins"]]
    assert {*named, picker["parser"]["pluginRef"]} <= plugins.keys()


def test_alerts_parse():
    promql = pytest.importorskip("promql_parser", reason="make test-deploy installs it")
    for rule in rules():
        promql.parse(rule["expr"])
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


def test_the_runbook_has_an_answer_to_each_alert():
    assert re.findall(r"^### (Meshserve\w+)$", RUNBOOK, re.MULTILINE) == [rule["alert"] for rule in rules()]
