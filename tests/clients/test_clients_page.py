"""Pastes blocks of docs/clients.md into an empty folder, as they stand but for the address (`make test-clients`)."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshserve.runtime.client.client import Client
from tests.clients.replica import Replica
from tests.waiting import WAIT_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BLOCK = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^```$', re.M | re.S)
SECTIONS = {
    "Shell": ("buf", "FINISH_REASON"),
    "Python": ("python3", "INVALID_ARGUMENT, field sampling.temperature, retry after None"),
    "TypeScript": ("npm", "sampling.temperature"),
    "C++": ("grpc_cpp_plugin", "sampling.temperature is refused"),
}


@pytest.fixture(scope="module")
def target(pytestconfig: pytest.Config) -> Iterator[str]:
    if not pytestconfig.getoption("--clients"):
        pytest.skip("installs packages and compiles; `make test-clients` passes --clients")
    replica = Replica()
    try:
        with Client(replica.target) as client:
            client.wait_until_ready(WAIT_SECONDS)
        yield replica.target
    finally:
        replica.stop()


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_works_as_it_stands(section: str, target: str, tmp_path: Path):
    program, wanted = SECTIONS[section]
    binaries = Path(sys.executable).parent
    path = os.pathsep.join((str(binaries), os.environ["PATH"]))
    # The compiler of C++ and its protoc belong together.
    if section == "C++":
        path = os.environ["PATH"].replace(f"{binaries}{os.pathsep}", "")
    if shutil.which(program, path=path) is None:
        pytest.skip(f"there is no {program}")
    subprocess.run([sys.executable, "-m", "meshserve", "protos", tmp_path / "protos"], check=True, capture_output=True)
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    said = ""
    for block in BLOCK.finditer(text):
        code = block["code"].replace("127.0.0.1:50051", target)
        if block["language"] == "python":
            command = [sys.executable, "-c", code]
        elif block["language"] != "bash":
            (tmp_path / str(block["title"])).write_text(code)
            continue
        elif block["title"] == "grpcurl" and shutil.which("grpcurl") is None:
            continue
        else:
            command = ["bash", "-ec", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True,
            timeout=3 * WAIT_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        said += done.stdout
    assert wanted in said
