"""The server that is attacked: a process of `meshserve serve` with several tenants, and checks of what attacks leave.

The demo model, in `make test` only its first layer, runs on one CPU device. Its tokenizer has one token of many
characters, because texts that cannot fit in a context are refused before they cost anything.
"""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.client.client import Client
from tests import checkpoints
from tests.hostile.neighbour import STREAMS, Neighbour
from tests.hostile.processes import Process, worker_processes
from tests.waiting import wait_for

MAX_CONTEXT = 256
NUM_NEIGHBOUR_TOKENS = 32  # in each of its streams, prompt and output
# Limits of the tenant "attacker". All of its quota must be free again after an attack.
MAX_REQUESTS = 32
MAX_TOKENS = MAX_REQUESTS * MAX_CONTEXT

MAX_WORKER_BYTES = 64 << 20  # per process in which constraints run

# What each tenant may do, as lines of the tokens file. The token of a tenant is its name.
TENANTS = {
    "neighbour": f"max_requests = 1\nmax_tokens = {NUM_NEIGHBOUR_TOKENS}",
    "attacker": f"max_requests = {MAX_REQUESTS}\nmax_tokens = {MAX_TOKENS}",
    "crowd": "",  # no quota
    "urgent": "max_priority = 100",
    "operator": 'permissions = ["admin", "info", "inference"]',
}
_OPTIONS = (
    "--port=0", "--gateway-port=0", "--openai-port=0", "--http-port=0",
    "--cpu-devices=1", "--dtype=float32", "--page-size=16", "--num-pages=64",
    "--max-running=8", "--max-step-tokens=32", f"--max-context={MAX_CONTEXT}", "--max-waiting=256",
    f"--constraint-memory-mib={MAX_WORKER_BYTES >> 20}", "--cache-dir=",
)  # fmt: skip
# glibc otherwise keeps up to 150 MB of large messages for later, which would hide what the server keeps.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "4"}
_LONG_TOKEN = f"<|endoftext|{'-' * 600}>"

# Bounds on what stays: the pools of threads that the server fills as it needs them (24 for compiling, 5 for
# tokenising, asyncio's own, gRPC's), and the workers of constraints (spare, shared, and of slow constraints).
_MAX_POOL_THREADS = 64
_MAX_WORKERS = 4 + 16 + 32
_DESCRIPTORS_PER_WORKER = 2  # its socket and its memory
_SPARE_DESCRIPTORS = 8  # connections of the neighbour and of callers that are just closing
_MAX_TRIES = 5  # to have all requests of a quota open at the same time
_LOGGED_ERROR = re.compile(r"^.*\b(?:ERROR|CRITICAL)\b.*$|^Traceback.*$|^.*\bUnraisable\b.*$", re.MULTILINE)


def bearer(tenant: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a tenant's calls; those of "" have no token."""
    return (("authorization", f"Bearer {tenant}"),) if tenant else ()


def percentile(values: list[float], share: float) -> float:
    """Returns the value that a share of the values does not exceed, in milliseconds; 0 without values."""
    return 1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def tokens_file() -> str:
    """Returns the content of the server's tokens file."""
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in TENANTS}
    return "\n".join(
        f'[tenants.{name}]\n{limits}\ntokens = [{{ sha256 = "{digests[name]}" }}]\n' for name, limits in TENANTS.items()
    )


@dataclass
class Served:
    """A running server.

    Attributes:
      gaps: What the neighbour saw, by attack and kind of stream: times between two messages, in seconds.
      first: Times to the first message, in the same form.
    """

    process: subprocess.Popen
    target: str
    gateway: str  # address of the gateway port
    openai: str  # of OpenAI's API
    probes: str  # of the port for probes and metrics
    log: Path
    neighbour: Neighbour
    gaps: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    first: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _base: dict[str, int] = field(default_factory=dict)
    _num_log_chars: int = 0

    def __post_init__(self) -> None:
        self.main = Process(self.process.pid)
        self.operator = Client(self.target, token="operator")
        self.check_idle()
        self._base = self.main.counts()

    @contextlib.contextmanager
    def under_attack(self, name: str, num_streams: int = 1, kinds: Sequence[str] = tuple(STREAMS)) -> Iterator[None]:
        """Runs an attack beside the polite neighbour, and checks what it has seen and what is left.

        Args:
          num_streams: How many streams of the neighbour begin and end meanwhile, at least.
          kinds: Their kinds.
        """
        self.neighbour.begin(kinds)
        try:
            yield
            self.neighbour.wait_for_streams(num_streams)
        finally:
            report = self.neighbour.end()
        for seen, new in ((self.gaps, report.gaps), (self.first, report.first)):
            for kind, times in new.items():
                seen.setdefault((name, kind), []).extend(times)
        assert not report.failures, f"beside {name!r}: {report.failures[:3]}"
        self.check_clean()

    def check_clean(self) -> None:
        """Checks that an attack has left nothing: no request, page, quota, process, thread, descriptor or error."""
        assert self.process.poll() is None, f"the server has ended:\n{self.log.read_text()[-3000:]}"
        self.check_idle()
        check_quota_is_free(self.target)
        self.check_idle()
        counts = self.main.counts
        wait_for(lambda: not self._surplus(), lambda: f"left: {self._surplus()} of {counts()}")
        text = self.log.read_text()
        new, self._num_log_chars = text[self._num_log_chars :], len(text)
        assert not (errors := _LOGGED_ERROR.findall(new)), errors[:5]

    def _surplus(self) -> dict[str, int]:
        """Returns what there is beyond what may stay."""
        counts = self.main.counts()
        num_new_workers = max(0, counts["workers"] - self._base["workers"])
        allowed = {
            "templates": 1,
            "workers": _MAX_WORKERS,
            "threads": self._base["threads"] + _MAX_POOL_THREADS,
            "descriptors": self._base["descriptors"] + _DESCRIPTORS_PER_WORKER * num_new_workers + _SPARE_DESCRIPTORS,
            "busy workers": 0,
        }
        return {name: counts[name] for name, most in allowed.items() if counts[name] > most}

    def check_idle(self) -> None:
        """Waits until no request is open, and checks that every page is free."""

        def is_idle() -> bool:
            load = self.operator.load()
            return (
                (load.num_running, load.num_waiting) == (0, 0)
                and load.num_free_pages == load.num_pages
                and self.operator.server_info().num_open_requests == 0
            )

        wait_for(is_idle, lambda: f"{self.operator.load()}, {self.operator.server_info().num_open_requests} open")

    def workers(self) -> list[int]:
        """Returns the processes in which constraints run."""
        return worker_processes(self.process.pid)[1]


def check_quota_is_free(target: str) -> None:
    """Checks that the tenant "attacker" has nothing in flight: its whole quota can be taken, and no more."""
    whole = pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[300]))
    whole.sampling.MergeFrom(pb.SamplingParams(max_tokens=MAX_CONTEXT - 1, ignore_eos=True))
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)

        def ends(calls: Sequence[Any]) -> list[str]:
            return [f"{call.code()} {call.details()}" for call in calls if call.done()]

        def is_free() -> bool:
            """Requests that have just been cancelled may still be counted, and the first may end before the last come.

            These calls are not read, so the client learns of those that are refused, but not of those that end.
            """
            nonlocal refused, num_accepted
            calls = [stub.Generate(whole, metadata=bearer("attacker")) for _ in range(MAX_REQUESTS)]
            try:
                num_open = most_open = 0
                while num_open < MAX_REQUESTS:
                    if (refused := ends(calls)) or num_open < most_open:
                        return False
                    time.sleep(0.005)
                    info = stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=bearer("operator"))
                    num_open, most_open = info.num_open_requests, max(num_open, most_open)
                one_more = stub.Generate(whole, metadata=bearer("attacker"))
                with contextlib.suppress(grpc.RpcError):
                    list(one_more)
                num_accepted += (is_accepted := one_more.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED)
                assert num_accepted < _MAX_TRIES, "the quota was not counted"
                return not is_accepted
            finally:
                for call in calls:
                    call.cancel()

        refused: list[str] = []
        num_accepted = 0
        wait_for(is_free, lambda: f"some of the quota is still taken: {refused}")


@contextlib.contextmanager
def serving(folder: Path, *options: str, num_layers: int = 1) -> Iterator[Served]:
    """Starts a server with its files in `folder`, and ends it with the block, however it is then.

    Args:
      options: Flags of `meshserve serve`.
      num_layers: How many of the demo model's layers it has.
    """
    model, tokens, log = folder / "model", folder / "tokens.toml", folder / "log"
    checkpoints.truncated_demo(model, num_layers)
    for path in (model / "tokenizer.json", model / "tokenizer_config.json"):
        path.write_text(path.read_text().replace("<|endoftext|>", _LONG_TOKEN))
    tokens.write_text(tokens_file())
    command = [sys.executable, "-m", "meshserve", "serve", f"--model={model}", f"--tokens={tokens}", *_OPTIONS]
    with log.open("w") as stderr, contextlib.ExitStack() as stack:
        waits = [flag for flag in os.environ["XLA_FLAGS"].split() if "collective" in flag]
        environment = os.environ | _ALLOCATOR | {"XLA_FLAGS": " ".join(waits)}  # it computes more than it compiles
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        said = ""
        assert process.stdout is not None
        for line in process.stdout:  # the gateway port is opened when the server is ready
            said += line
            if "answers gateways on" in line:
                break
        addresses = dict(re.findall(r"(listens|gateways|OpenAI's API|probes) on (?:http://)?([\d.:]+)", said))
        assert len(addresses) == 4, said + log.read_text()
        target, openai = addresses["listens"], addresses["OpenAI's API"]
        neighbour = stack.enter_context(Neighbour(target, openai, NUM_NEIGHBOUR_TOKENS))
        yield Served(process, target, addresses["gateways"], openai, addresses["probes"], log, neighbour)
