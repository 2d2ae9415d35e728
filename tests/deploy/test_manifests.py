"""Checks that every overlay renders and validates against Kubernetes' schemas and those of the custom resources."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.waiting import WAIT_SECONDS

from .manifests import DEPLOY, OVERLAYS, Resource, containers, pod_templates, rendered, tool, workloads

jsonschema = pytest.importorskip("jsonschema", reason="make test-deploy installs it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs it")
pytestmark = pytest.mark.skipif(tool("kubectl") is None, reason="make test-deploy installs kubectl")

SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")}
overlays = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)


def check_native(resource: Resource) -> None:
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def check(resource: Resource) -> None:
    """Raises if the API server would refuse the resource."""
    schema = SCHEMAS.get(resource["kind"])
    if schema is None:
        check_native(resource)
        return
    assert resource["apiVersion"] == schema["apiVersion"]
    jsonschema.validate(resource["spec"], schema["spec"])
    for template, _ in pod_templates(resource):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **template["metadata"]}}
        kubernetes_validate.validate(
            {**pod, "spec": template["spec"]}, kubernetes_validate.latest_version(), strict=True
        )
    for job in resource["spec"].get("replicatedJobs", ()):
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]}
        check_native(whole)
        assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@overlays
def test_kubernetes_takes_every_resource(overlay: Path):
    resources = rendered(overlay)
    assert {"Namespace", "Service", "NetworkPolicy", "PodDisruptionBudget"} <= {item["kind"] for item in resources}
    assert not any(item["kind"] == "PodTemplate" for item in resources)
    for resource in resources:
        check(resource)


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_the_schemas_refuse_what_they_do_not_know(kind: str):
    [found, *_] = [item for overlay in OVERLAYS for item in rendered(overlay) if item["kind"] == kind]
    with pytest.raises(jsonschema.ValidationError):
        check({**found, "spec": {**found["spec"], "replica": 1}})


def test_a_wrong_field_of_a_pod_in_a_group_is_seen():
    [found, *_] = [item for overlay in OVERLAYS for item in rendered(overlay) if item["kind"] == "JobSet"]
    changed = json.loads(json.dumps(found))
    [(template, _), *_] = pod_templates(changed)
    template["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(changed)


@overlays
def test_names_that_resources_say_of_each_other_exist(overlay: Path):
    resources = rendered(overlay)
    names = {(item["kind"], item["metadata"]["name"]) for item in resources}
    pods = [template for template, _ in workloads(resources)]
    for item in resources:
        selector = item["spec"].get("selector", {}) if item["kind"] in ("Service", "InferencePool") else None
        if item["kind"] == "PodDisruptionBudget":
            selector = item["spec"]["selector"]
        if selector:
            wanted = {
                name: value
                for name, value in selector.get("matchLabels", selector).items()
                if name.startswith(("app.", "meshserve/"))  # the orchestrators add their own labels
            }
            assert wanted and any(wanted.items() <= pod["metadata"]["labels"].items() for pod in pods), item
        if item["kind"] == "HorizontalPodAutoscaler":
            target = item["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in names
        if item["kind"] == "InferencePool":
            assert ("Service", item["spec"]["endpointPickerRef"]["name"]) in names
    for pod in pods:
        for volume in pod["spec"].get("volumes", ()):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
        account = pod["spec"].get("serviceAccountName")
        assert account is None or ("ServiceAccount", account) in names


@overlays
def test_pods_keep_to_the_security_standard_that_the_namespace_enforces(overlay: Path):
    resources = rendered(overlay)
    [namespace] = [item for item in resources if item["kind"] == "Namespace"]
    if namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] != "restricted":
        assert overlay.name == "pathways"
        return
    for template, _ in workloads(resources):
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        assert template["spec"]["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in containers(template):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]


@pytest.mark.skipif(tool("hadolint") is None, reason="make test-deploy installs hadolint")
@pytest.mark.parametrize("name", ["Dockerfile.cuda", "Dockerfile.tpu"])
def test_hadolint_has_nothing_to_say(name: str):
    done = subprocess.run(
        [tool("hadolint"), str(DEPLOY / "docker" / name)], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(tool("smg") is None, reason="make test-deploy installs smg")
def test_the_gateway_knows_its_flags():
    pods = [pod for overlay in OVERLAYS for pod, _ in workloads(rendered(overlay))]
    [gateway] = [found for pod in pods for found in containers(pod, "smg")]
    known = subprocess.run(
        [tool("smg"), "launch", "--help"], capture_output=True, text=True, timeout=WAIT_SECONDS
    ).stdout
    assert gateway["command"] == ["smg", "launch"]
    for argument in gateway["args"]:
        assert argument.partition("=")[0] + " " in known, argument
