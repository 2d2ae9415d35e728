"""Checks the compose file and the Helm chart: what they start are flags and ports that there are, and Kubernetes takes
what the chart renders. Neither Docker nor a cluster runs here.
"""

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshserve.runtime.commands import cli
from meshserve.runtime.options.serve_config import ServeConfig
from tests.waiting import WAIT_SECONDS

from .manifests import DEPLOY, Resource, arguments, containers, tool

COMPOSE = DEPLOY / "compose"
CHART = DEPLOY / "helm" / "meshserve"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")}
needs_helm = pytest.mark.skipif(tool("helm") is None, reason="make test-deploy gets helm")


def config_of(flags: list[str]) -> ServeConfig:
    return cli.serve_config(cli._parser().parse_args(flags))


# --- compose


def services(name: str = "compose.yaml") -> dict[str, Any]:
    """Returns the services, with the defaults of the variables."""
    return yaml.safe_load(with_defaults(name))["services"]


def with_defaults(name: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (COMPOSE / name).read_text())


@pytest.mark.parametrize("name", ["compose.yaml", "gpu.yaml"])
def test_compose_follows_the_specification(name: str):
    compose_spec = pytest.importorskip("compose_spec", reason="make test-deploy installs it")
    parsed = compose_spec.PyCompose.from_yaml(with_defaults(name))
    parsed.validate()
    assert set(parsed.service_names()) == services(name).keys()


def test_the_images_of_compose_name_their_registry():
    for service in services().values():
        assert service["image"].startswith(("docker.io/", "meshserve:"))


@pytest.mark.parametrize("name", ["compose.yaml", "gpu.yaml"])
def test_the_server_of_compose_is_started_with_options_that_there_are(name: str):
    config = config_of(services(name)["server"]["command"])
    assert (config.host, config.port, config.http_port, config.gateway_port) == ("0.0.0.0", 50051, 9090, 50052)
    assert bool(config.cpu_devices) == (name == "compose.yaml")


def test_the_services_of_compose_find_each_other():
    found = services()
    server = config_of(found["server"]["command"])
    flags = dict(flag.lstrip("-").partition("=")[::2] for flag in found["gateway"]["command"])
    assert flags["worker-urls"] == f"grpc://server:{server.gateway_port}"
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in scraped}
    assert targets == {"meshserve": [f"server:{server.http_port}"], "smg": [f"gateway:{flags['prometheus-port']}"]}
    [source] = yaml.safe_load((COMPOSE / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    [provider] = yaml.safe_load((COMPOSE / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert f"../dashboards:{provider['options']['path']}:ro" in found["grafana"]["volumes"]
    home = found["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "dashboards" / Path(home).name).exists() and Path(home).parent == Path(provider["options"]["path"])


def test_what_compose_mounts_exists_and_its_ports_are_local():
    whole = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (COMPOSE / source).exists() if source.startswith(".") else source in whole["volumes"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert set(service.get("depends_on", ())) <= whole["services"].keys()
    build = services()["server"]["build"]
    context = COMPOSE / build["context"]
    assert (context / build["dockerfile"]).exists() and (context / "pyproject.toml").exists()


# --- Helm

VARIANTS = {
    "defaults": (),
    "everything": (
        "openai=true", "autoscaling.enabled=true", "options.max_step_tokens=1000000", "options.prefix_cache=false",
        "options.model=Qwen/Qwen3-8B", "options.memory_fraction=0.9", "modelsClaim=", "cache.storageClass=fast",
        "image.tag=1",
    ),
    "secured": ("tlsSecret=tls", "tokensSecret=tokens", "networkPolicy.enabled=false"),
    "pool": ("inferencePool.enabled=true", "inferencePool.gateway.name=entry"),
    "llm-d": ("inferencePool.enabled=true", "kvEvents=true"),
}  # fmt: skip
variants = pytest.mark.parametrize("variant", VARIANTS)


@functools.cache
def rendered(variant: str) -> tuple[Resource, ...]:
    settings = [word for setting in VARIANTS[variant] for word in ("--set", setting)]
    done = helm("template", "release", str(CHART), *settings)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    program = tool("helm")
    assert program is not None
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=WAIT_SECONDS)


def of_kind(variant: str, kind: str) -> Iterator[Resource]:
    """Returns the resources of a kind, except the endpoint picker's."""
    found = (item for item in rendered(variant) if item["kind"] == kind)
    return (item for item in found if not item["metadata"]["name"].endswith("-picker"))


@needs_helm
def test_the_chart_is_well_formed():
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
@variants
def test_kubernetes_takes_what_the_chart_renders(variant: str):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs it")
    jsonschema = pytest.importorskip("jsonschema", reason="make test-deploy installs it")
    for resource in rendered(variant):
        if (schema := SCHEMAS.get(resource["kind"])) is not None:
            assert resource["apiVersion"] == schema["apiVersion"]
            jsonschema.validate(resource["spec"], schema["spec"])
        else:
            kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


@needs_helm
@variants
def test_the_pods_of_the_chart_serve_with_options_that_there_are(variant: str):
    [deployment] = of_kind(variant, "Deployment")
    template = deployment["spec"]["template"]
    [container] = containers(template)
    config = config_of(arguments(container))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports["grpc"], ports["http"]) == (config.port, config.http_port)
    assert ports.get("openai", -1) == config.openai_port and ports.get("gateway", -1) == config.gateway_port
    assert ("kv-events" in ports) == bool(config.kv_events_endpoint) == (variant == "llm-d")
    assert template["spec"]["terminationGracePeriodSeconds"] > config.drain_seconds
    assert config.allow_insecure != (variant == "secured") and bool(config.tls_cert) == (variant == "secured")
    if variant == "everything":
        assert (config.max_step_tokens, config.prefix_cache, config.memory_fraction) == (1_000_000, False, 0.9)
        assert config.model == "Qwen/Qwen3-8B" and "replicas" not in deployment["spec"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in filter(None, (config.tls_cert, config.tls_key, config.tokens, f"{config.cache_dir}/x")):
        assert str(Path(path).parent) in mounts
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        each["name"] for each in template["spec"]["volumes"]
    }


@needs_helm
@variants
def test_the_resources_of_the_chart_find_each_other(variant: str):
    [deployment] = of_kind(variant, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    [container] = containers(deployment["spec"]["template"])
    names = {port["name"] for port in container["ports"]}
    for service in of_kind(variant, "Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for policy in of_kind(variant, "NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == names
    for scaler in of_kind(variant, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    claims = {item["metadata"]["name"] for item in of_kind(variant, "PersistentVolumeClaim")} | {"meshserve-models"}
    for volume in deployment["spec"]["template"]["spec"]["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims


@needs_helm
@pytest.mark.parametrize(("variant", "overlay"), [("pool", "inference-pool"), ("llm-d", "llm-d")])
def test_a_pool_of_the_chart_is_that_of_the_overlay(variant: str, overlay: str):
    resources = {(item["kind"], item["metadata"]["name"]): item["spec"] for item in rendered(variant) if "spec" in item}
    pool, route = (resources[kind, "release-meshserve"] for kind in ("InferencePool", "HTTPRoute"))
    [deployment] = of_kind(variant, "Deployment")
    [container] = containers(deployment["spec"]["template"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert pool["targetPorts"] == [{"number": ports["gateway"]}]
    assert pool["selector"]["matchLabels"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert [each["name"] for rule in route["rules"] for each in rule["backendRefs"]] == ["release-meshserve"]
    assert ("Service", pool["endpointPickerRef"]["name"]) in resources
    assert route["parentRefs"][0]["name"] == ("entry" if variant == "pool" else "inference-gateway")
    picker = resources["Deployment", "release-meshserve-picker"]["template"]["spec"]["containers"][0]
    name = {"pool": "picker.yaml", "llm-d": "picker-llm-d.yaml"}[variant]
    config = (DEPLOY / "kubernetes" / "overlays" / overlay / "picker-config.yaml").read_text()
    assert (CHART / "files" / name).read_text() == config
    [mounted] = [item for item in rendered(variant) if item["kind"] == "ConfigMap"]
    assert yaml.safe_load(mounted["data"]["picker-config.yaml"]) == yaml.safe_load(config)
    assert f"--config-file=/config/{next(iter(mounted['data']))}" in picker["args"]


@needs_helm
def test_the_chart_refuses_a_server_that_could_not_start():
    for option in ("openai", "kvEvents", "inferencePool.enabled"):
        done = helm("template", "r", str(CHART), "--set", f"{option}=true,tlsSecret=a,tokensSecret=b")
        assert done.returncode != 0 and "Leave out one of them" in done.stderr


def test_the_chart_is_of_this_release():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    text = (DEPLOY.parent / "pyproject.toml").read_text()
    assert json.dumps(chart["appVersion"]) in text.partition("version = ")[2].partition("\n")[0]
