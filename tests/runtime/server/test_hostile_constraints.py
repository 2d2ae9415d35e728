"""Hostile constraints against a real server process: each costs its own caller, and the server stays."""

import concurrent.futures
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from meshserve.runtime.client.client import CallError, Client
from tests.runtime.loopback import running
from tests.runtime.text.test_constraint_isolation import ENDLESS, chained_references, chained_rules, chained_terminals
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode
SERVE = [
    sys.executable, "-m", "meshserve", "serve", "--model=demo", "--port=0", "--cpu-devices=1", "--dtype=float32",
    "--max-running=4", "--max-step-tokens=4", "--num-pages=64", "--max-context=128", "--constraint-memory-mib=64",
]  # fmt: skip


@dataclass
class Server:
    process: subprocess.Popen
    target: str


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*SERVE, *options], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"listens on (\S+)", process.stdout.readline())
        assert found is not None
        with Client(found[1]) as client:
            client.wait_until_ready(WAIT_SECONDS)
        yield Server(process, found[1])
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"grammar": chained_rules(3_500)}, "has rules 3502"),
        ({"json_schema": chained_references(1_300)}, "has references 1301"),
        ({"grammar": chained_terminals(3_500)}, "has rules 3502"),
        ({"regex": ".*" * 8_000}, "constraint_memory_mib"),
        ({"regex": ".*" * 30_000}, "constraint_memory_mib"),
        ({"json_schema": ENDLESS.text}, "constraint_memory_mib"),
    ],
)
def test_it_is_refused_and_the_server_stays(server: Server, constraint: dict[str, str], words: str):
    with Client(server.target) as client:
        with pytest.raises(CallError, match=words) as caught:
            client.complete("a", max_tokens=3, constraint=constraint, timeout_seconds=WAIT_SECONDS)
        assert (caught.value.code, caught.value.field) == (
            Code.INVALID_ARGUMENT, f"sampling.constraint.{next(iter(constraint))}",
        )  # fmt: skip
        completion = client.complete("a", max_tokens=9, constraint={"regex": "[a-z]{3}"}, timeout_seconds=WAIT_SECONDS)
        assert re.fullmatch("[a-z]{3}", completion.text)
    assert server.process.poll() is None


def test_an_ambiguous_grammar_ends_alone(server: Server):
    with Client(server.target) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(
            client.complete, "a", max_tokens=100, temperature=1.0, ignore_eos=True,
            constraint={"grammar": 'start: s\ns: s s s | s s | "a" | "b"'}, timeout_seconds=WAIT_SECONDS,
        )  # fmt: skip
        for seed in range(3):
            schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
            schema["additionalProperties"] = False
            polite = client.complete("a", max_tokens=60, seed=seed, constraint={"json_schema": json.dumps(schema)})
            assert isinstance(json.loads(polite.text)["a"], bool)
        try:
            assert set(hostile.result(WAIT_SECONDS).text) <= set("ab")
        except CallError as error:
            assert "too complex" in str(error)
    assert server.process.poll() is None


def test_sigterm_ends_what_is_being_compiled(tmp_path: Path):
    options = ("--constraint-memory-mib=4096", f"--constraint-seconds={WAIT_SECONDS}", "--drain-seconds=0")
    with serving(tmp_path, *options) as server:
        with Client(server.target) as client, concurrent.futures.ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(client.complete, "a", constraint={"regex": ".*" * number}, timeout_seconds=WAIT_SECONDS)
                for number in (30_000, 29_999)
            ]
            template = child_of(server.process.pid)
            wait_for(lambda: sum(is_busy(pid) for pid in children(template)) >= 2)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(WAIT_SECONDS) == 0
            wait_for(lambda: not Path(f"/proc/{template}").exists())
            for call in calls:
                with pytest.raises(CallError) as caught:
                    call.result(WAIT_SECONDS)
                assert caught.value.code in (Code.UNAVAILABLE, Code.CANCELLED)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def child_of(pid: int) -> int:
    """Returns the process that forks the workers."""
    for path in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (path / "children").read_text().split()):
            if b"constraint_worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    raise AssertionError("the server has no process for constraints")


def is_busy(pid: int) -> bool:
    """Returns whether a process has used a second of processor time."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) > 100


def test_a_constraint_counts_against_the_quota_while_it_is_compiled(tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    digest = "c96c6d5be8d08a12e7b5cdc1b207fa6b2430974c86803d8891675e76fd992c20"  # of "input"
    tokens.write_text(f'[tenants.a]\nmax_requests = 1\ntokens = [{{ sha256 = "{digest}" }}]\n')
    with running(tokens=tokens) as server, Client(server.target, token="input") as client:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            slow = pool.submit(client.complete, "a", constraint={"regex": ".*" * 8_000}, max_tokens=1)
            usage = server.edge.access._usage
            wait_for(lambda: "a" in usage and usage["a"].num_requests == 1)
            with pytest.raises(CallError, match="max_requests") as caught:
                client.complete("a", max_tokens=1)
            assert caught.value.code is Code.RESOURCE_EXHAUSTED
            with pytest.raises(CallError):
                slow.result(WAIT_SECONDS)
        assert client.complete("a", max_tokens=1).finish_reason
        assert usage["a"].num_requests == 0
