"""Tests the documentation: the generated reference and its links; with `--tutorial` (make docs) also every command of
the tutorial, as it stands.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from meshserve.deploy.site import pages
from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.options.serve_config import options
from meshserve.runtime.telemetry.metrics import METHODS, Metrics

from .waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```(?P<language>bash|python)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^```$', re.M | re.S)


def test_the_reference_has_every_option_message_field_and_metric():
    page = pages.options_page()
    assert all(f"| `{name}` |" in page for name in options())
    page = pages.grpc_page((ROOT / "protos" / "inference.proto").read_text())
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        section = page.partition(f"## message {message.name}\n")[2].partition("\n## ")[0]
        for field in message.fields:
            assert re.search(rf"\* `{field.name}` \(.*field {field.number}\): \S", section), (message.name, field.name)
    for service in pb.DESCRIPTOR.services_by_name.values():
        assert all(f"### rpc {method.name}(" in page for method in service.methods)
    page = pages.metrics_page()
    metrics = Metrics()
    metrics.count_request(METHODS[0], "stop")
    assert all(f"`{family.name}" in page for family in metrics.registry.collect())
    assert "`meshserve_kv_pages`" in page and "`vllm:num_requests_running`" in page


def test_links_that_leave_the_folder_become_paths():
    text = "See [the client](../runtime/client/client.py), [runtime/api](../runtime/api/), [b](plan.md#a), ![x](a.svg)."
    expected = "See the client (`runtime/client/client.py`), `runtime/api`, [b](plan.md#a), ![x](a.svg)."
    assert pages.without_outer_links(text, DOCS / "features.md") == expected
    with pytest.raises(FileNotFoundError, match="nowhere.py leads nowhere"):
        pages.without_outer_links("[a](../nowhere.py)", DOCS / "features.md")


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_the_links_of_a_page_lead_somewhere(path: Path):
    text = pages.without_outer_links(path.read_text(), path)
    for found in re.finditer(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
        is_generated = (path.parent / found[1]).resolve().is_relative_to(DOCS / "reference")
        assert is_generated or (path.parent / found[1]).exists(), f"{path} links to {found[1]}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_links_of_the_root_lead_somewhere(name: str):
    for found in re.finditer(r"\]\((?!https?:|#)([^)#\s]+)", (ROOT / name).read_text()):
        assert (ROOT / found[1]).exists(), found[1]


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/.-]+\.md", str(pages.expanded(yaml.safe_load(text)["nav"]))))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert listed >= there and {name for name in listed - there if not name.startswith("reference/")} == set()


@pytest.fixture
def tutorial(pytestconfig: pytest.Config) -> list[re.Match[str]]:
    if not pytestconfig.getoption("--tutorial"):
        pytest.skip("starts servers at the default ports; `make docs` passes --tutorial")
    return list(BLOCK.finditer((DOCS / "tutorial.md").read_text()))


def test_the_tutorial_works_as_it_stands(tutorial: list[re.Match[str]], tmp_path: Path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    environment.pop("XLA_FLAGS", None)
    servers = [block for block in tutorial if block["title"]]
    others = [block for block in tutorial if not block["title"]]
    assert len(servers) == 1 and len(others) > 5
    server = subprocess.Popen(
        ["bash", "-ec", f"exec {servers[0]['code']}"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert any("answers OpenAI's API" in line for line in server.stdout), "the server ended"
        threading.Thread(target=server.stdout.read, daemon=True).start()
        for block in others:
            command = ["bash", "-eo", "pipefail", "-c"] if block["language"] == "bash" else [sys.executable, "-c"]
            done = subprocess.run(
                [*command, block["code"]], cwd=tmp_path, env=environment, capture_output=True, text=True,
                timeout=WAIT_SECONDS,
            )  # fmt: skip
            assert done.returncode == 0 and done.stdout.strip(), f"{block['code']}\n{done.stdout}\n{done.stderr}"
        server.send_signal(signal.SIGINT)
        assert server.wait(WAIT_SECONDS) == 0
    finally:
        server.kill()
        server.wait()
