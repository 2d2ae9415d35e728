"""Runs a real Prometheus beside a real server, with the compose file's configuration and the alerts, and asks it what
the panels of the dashboard ask. Skipped without `prometheus` on the PATH (on Debian, `apt-get install prometheus`).
"""

import contextlib
import json
import math
import re
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshserve.runtime.client.client import Client
from tests.listening import free_port
from tests.waiting import WAIT_SECONDS, wait_for

from .manifests import DEPLOY, tool

pytestmark = pytest.mark.skipif(tool("prometheus") is None, reason="prometheus is not installed")
SERVE = [
    sys.executable, "-m", "meshserve", "serve", "demo", "--port=0", "--http-port=0", "--cpu-devices=1",
    "--page-size=16", "--max-running=8", "--max-step-tokens=32", "--num-pages=256", "--cache-dir=",
]  # fmt: skip
RATE_INTERVAL = "4s"  # four scrapes


@contextlib.contextmanager
def running_server(log: Path) -> Iterator[tuple[str, str]]:
    """Yields the address of a server and that of its metrics."""
    with log.open("w") as stderr:
        process = subprocess.Popen(SERVE, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"listens on (\S+)\n.*probes on http://(\S+)", said)
        assert found is not None, said + log.read_text()
        yield found[1], found[2]
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_prometheus(folder: Path, metrics: str) -> Iterator[str]:
    """Yields the base URL of a Prometheus that scrapes a server each second."""
    config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())
    [job] = [job for job in config["scrape_configs"] if job["job_name"] == "meshserve"]
    job["static_configs"] = [{"targets": [metrics]}]
    config |= {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": [job]}
    config["rule_files"] = [str(DEPLOY / "alerts" / Path(path).name) for path in config["rule_files"]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address, program = f"127.0.0.1:{free_port()}", tool("prometheus")
    assert program is not None
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def ask(url: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=WAIT_SECONDS) as answer:
        return json.load(answer)["data"]


def expressions() -> dict[str, list[str]]:
    """Returns the expressions of the dashboard, by the title of their panel."""
    dashboard = json.loads((DEPLOY / "dashboards" / "meshserve.json").read_text())
    panels = [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", ()))]
    variables = {"$__rate_interval": RATE_INTERVAL, "$instance": ".*"}
    pattern = re.compile("|".join(map(re.escape, variables)))
    return {
        panel["title"]: [pattern.sub(lambda found: variables[found[0]], each["expr"]) for each in panel["targets"]]
        for panel in panels
        if "targets" in panel
    }


def test_every_panel_has_data_and_every_alert_is_evaluated(tmp_path: Path):
    is_over = threading.Event()
    with running_server(tmp_path / "server.log") as (target, metrics), running_prometheus(tmp_path, metrics) as url:

        def ask_the_model() -> None:
            with Client(target) as client:
                while not is_over.is_set():
                    client.complete("HAMLET:", max_tokens=8)

        caller = threading.Thread(target=ask_the_model)
        caller.start()
        try:

            def empty() -> list[str]:
                """Panels of which no expression has a number yet."""
                return [
                    title
                    for title, found in expressions().items()
                    if "mixture of experts only" not in title  # the demo's model is dense
                    and not any(has_number(ask(f"{url}/api/v1/query", query=each)["result"]) for each in found)
                ]

            wait_for(lambda: is_answering(url) and not empty(), empty)
        finally:
            is_over.set()
            caller.join()
        groups = ask(f"{url}/api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 5 and {rule["health"] for rule in rules} == {"ok"}, rules


def is_answering(url: str) -> bool:
    try:
        return bool(ask(f"{url}/api/v1/targets")["activeTargets"])
    except OSError:
        return False


def has_number(result: list[Any]) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in result)
