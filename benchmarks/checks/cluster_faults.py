"""Injects faults into a local cluster and checks that every caller gets a status and every process ends in time.

    python benchmarks/checks/cluster_faults.py --repeats 3

Each round starts two processes and requests a text that must be correct, which shows that a restarted cluster serves
again. It then applies load or leaves the cluster idle, and injects one fault: kill, stop, cut the network, or corrupt a
message of the step stream. Measured are the times until the last caller got a status and until the last process ended.
Cutting the network requires network namespaces, which need root and iproute2. Exits with 1 if anything exceeded the
limit or hung.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from meshserve.benchmarks.lib.namespaces import Hosts, can_make_hosts, hosts
from meshserve.benchmarks.lib.step_proxy import StepProxy
from meshserve.protos import steps_pb2 as pb
from meshserve.runtime.client.client import CallError, Client
from meshserve.runtime.commands.local_cluster import LocalCluster, reserved_port

FLAGS = (
    "--model=demo", "--tp=2", "--cpu-devices=1", "--dtype=float32", "--page-size=16", "--max-running=4",
    "--max-step-tokens=4", "--num-pages=256", "--no-logits-processors",
)  # fmt: skip
NUM_STREAMS = 4
READY_SECONDS = 240.0
IDLE_SECONDS = 1.0  # idle time before the fault


@dataclass
class Scene:
    """The objects that a fault is applied to."""

    cluster: LocalCluster
    proxy: StepProxy | None = None
    hosts: Hosts | None = None


@dataclass(frozen=True)
class Fault:
    """A fault and the processes it is applied to: 0 is the controller, 1 the follower.

    A message fault takes effect at the next step, so an idle cluster gets a request after it.
    """

    name: str
    inject: Callable[[Scene, int], None]
    victims: tuple[int, ...] = (0, 1)
    wants_proxy: bool = False
    wants_hosts: bool = False


def kill(scene: Scene, victim: int) -> None:
    scene.cluster.processes[victim].send_signal(signal.SIGKILL)


def stop(scene: Scene, victim: int) -> None:
    scene.cluster.processes[victim].send_signal(signal.SIGSTOP)


def cut(scene: Scene, victim: int) -> None:
    assert scene.hosts is not None
    scene.hosts.cut_off(victim)


def spoiling(change: Callable[[list[pb.JoinResponse], pb.JoinResponse], Iterable[pb.JoinResponse]]) -> Callable:
    """Makes a fault of process 0's messages; `change` gets the messages held back so far and the next call."""

    def inject(scene: Scene, victim: int) -> None:
        assert scene.proxy is not None
        held: list[pb.JoinResponse] = []

        def spoil(response: pb.JoinResponse) -> Iterable[pb.JoinResponse]:
            return change(held, response) if response.HasField("call") else [response]

        scene.proxy.spoil = spoil

    return inject


def delayed(held: list[pb.JoinResponse], response: pb.JoinResponse) -> Iterable[pb.JoinResponse]:
    return []  # dropped, which looks like a delay beyond every timeout


def reordered(held: list[pb.JoinResponse], response: pb.JoinResponse) -> Iterable[pb.JoinResponse]:
    held.append(response)
    return [held.pop(), held.pop()] if len(held) == 2 else []


def corrupted(held: list[pb.JoinResponse], response: pb.JoinResponse) -> Iterable[pb.JoinResponse]:
    plan = bytearray(response.call.plan)
    plan[-1] ^= 1
    response.call.plan = bytes(plan)
    return [response]


def corrupt_digest(scene: Scene, victim: int) -> None:
    """Corrupts the digest of a follower's tokens, so that they seem to differ from process 0's."""
    assert scene.proxy is not None

    def spoil(request: pb.JoinRequest) -> Iterable[pb.JoinRequest]:
        if request.acknowledgement.digest:
            request.acknowledgement.digest = bytes(16)
        return [request]

    scene.proxy.spoil_request = spoil


def delay_digest(scene: Scene, victim: int) -> None:
    """Drops acknowledgements, so that the follower's device seems to hang."""
    assert scene.proxy is not None
    scene.proxy.spoil_request = lambda request: [] if request.HasField("acknowledgement") else [request]


FAULTS = (
    Fault("kill -9", kill),
    Fault("SIGSTOP", stop),
    Fault("partition", cut, (1,), wants_hosts=True),  # callers cut off from the controller rely on their own keepalive
    Fault("delayed call", spoiling(delayed), (1,), wants_proxy=True),
    Fault("reordered calls", spoiling(reordered), (1,), wants_proxy=True),
    Fault("corrupted plan", spoiling(corrupted), (1,), wants_proxy=True),
    Fault("corrupted digest", corrupt_digest, (0,), wants_proxy=True),
    Fault("delayed digest", delay_digest, (0,), wants_proxy=True),
)


class Stream(threading.Thread):
    """A request that would take longer than the round."""

    def __init__(self, target: str, index: int):
        super().__init__(daemon=True)
        self.num_tokens = 0
        self.code: grpc.StatusCode | None = None
        self.message = ""
        self.ended = 0.0
        self._target, self._index = target, index
        self.start()

    def run(self) -> None:
        prompt = [300 + (7 * self._index + position) % 500 for position in range(20)]
        try:
            with Client(self._target) as client:
                for chunk in client.generate(prompt, max_tokens=900, temperature=0.8, ignore_eos=True):
                    self.num_tokens += len(chunk.token_ids)
        except CallError as error:
            self.code, self.message = error.code, str(error)
        self.ended = time.monotonic()


@dataclass
class Case:
    """All rounds of one fault applied to one process, under load or idle."""

    name: str
    statuses: dict[str, int] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)
    status_seconds: list[float] = field(default_factory=list)
    gone_seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    reason: str = ""

    def report(self) -> dict[str, object]:
        return {
            "case": self.name,
            "rounds": len(self.gone_seconds),
            "statuses": self.statuses,
            "exits": self.exits,
            "last_status_seconds": round(max(self.status_seconds, default=0.0), 2),
            "last_gone_seconds": round(max(self.gone_seconds, default=0.0), 2),
            "reason": self.reason,
            "problems": self.problems,
        }


class Rounds:
    """Runs rounds and compares every generated text with the first one."""

    def __init__(self, limit_seconds: float, cache: Path):
        self._limit_seconds = limit_seconds
        self._flags = (*FLAGS, f"--fail-seconds={limit_seconds:g}", f"--cache-dir={cache}")
        self._text = ""

    def round(self, case: Case, fault: Fault, victim: int, *, is_loaded: bool) -> None:
        with tempfile.TemporaryDirectory() as folder, self._scene(fault, Path(folder)) as scene:
            self._check_text(scene.cluster, case)
            streams = [Stream(scene.cluster.target, index) for index in range(NUM_STREAMS if is_loaded else 0)]
            while not all(stream.num_tokens or stream.ended for stream in streams):
                time.sleep(0.02)
            time.sleep(0 if is_loaded else IDLE_SECONDS)
            began = time.monotonic()
            fault.inject(scene, victim)
            if not is_loaded:
                streams = [Stream(scene.cluster.target, 0)] if fault.wants_proxy else []
            self._judge(case, scene.cluster, streams, began)

    def _judge(self, case: Case, cluster: LocalCluster, streams: list[Stream], began: float) -> None:
        for stream in streams:
            stream.join(2 * self._limit_seconds)
            if not stream.ended:
                case.problems.append("a caller got no status")
                continue
            name = stream.code.name if stream.code is not None else "OK"
            case.statuses[name] = case.statuses.get(name, 0) + 1
            case.status_seconds.append(stream.ended - began)
            case.reason = case.reason or stream.message
        try:
            exits = cluster.wait(2 * self._limit_seconds)
        except TimeoutError as error:
            case.problems.append(str(error))
            return
        case.gone_seconds.append(time.monotonic() - began)
        name = ", ".join(map(str, exits))
        case.exits[name] = case.exits.get(name, 0) + 1
        if 0 in exits:
            case.problems.append(f"exit statuses {name}")
        if max(case.gone_seconds[-1], *case.status_seconds, 0.0) > self._limit_seconds:
            case.problems.append("the time limit was exceeded")
        if case.statuses.keys() - {"UNAVAILABLE"}:
            case.problems.append(f"statuses {case.statuses}")

    @contextlib.contextmanager
    def _scene(self, fault: Fault, folder: Path) -> Iterator[Scene]:
        """Yields two running processes, with a proxy or separate hosts if the fault needs them."""
        with contextlib.ExitStack() as undo:
            options: dict[str, object] = {}
            scene_hosts, proxy = None, None
            flags: tuple[str, ...] = self._flags
            if fault.wants_hosts:
                scene_hosts = undo.enter_context(hosts(2))
                options["host"] = scene_hosts.address(0)
                options["prefixes"] = {index: scene_hosts.prefix(index) for index in range(2)}
                options["own_flags"] = {index: [f"--host={scene_hosts.address(index)}"] for index in range(2)}
                flags = (*flags, "--allow-insecure")
            if fault.wants_proxy:
                step_port = undo.enter_context(reserved_port())
                proxy = StepProxy(f"127.0.0.1:{step_port}")
                undo.callback(proxy.close)
                options["own_flags"] = {0: [f"--step-port={step_port}"], 1: [f"--step-port={proxy.port}"]}
            cluster = LocalCluster(2, flags, folder, **options)  # type: ignore[arg-type]
            undo.callback(cluster.kill)
            yield Scene(cluster, proxy, scene_hosts)

    def _check_text(self, cluster: LocalCluster, case: Case) -> None:
        with Client(cluster.target) as client:
            cluster.wait_until_ready(client, READY_SECONDS)
            text = client.complete("ROMEO:\n", max_tokens=12, temperature=0.0).text
        self._text = self._text or text
        if text != self._text:
            case.problems.append(f"after a restart the text was {text!r}, expected {self._text!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Inject faults into a local cluster, each several times.")
    parser.add_argument("--repeats", type=int, default=3, help="rounds per case (default: %(default)s)")
    parser.add_argument("--fail-seconds", type=float, default=10.0, help="time limit in seconds (default: %(default)s)")
    parser.add_argument("--only", default="", help="run only faults whose name contains this text")
    options = parser.parse_args(arguments)
    has_hosts, is_clean = can_make_hosts(), True
    with tempfile.TemporaryDirectory() as cache:
        rounds = Rounds(options.fail_seconds, Path(cache))
        for fault in FAULTS:
            if options.only not in fault.name or (fault.wants_hosts and not has_hosts):
                print(f"skipped: {fault.name}", file=sys.stderr)
                continue
            for victim, is_loaded in [(victim, loaded) for victim in fault.victims for loaded in (True, False)]:
                who, how = ("controller", "follower")[victim], "under load" if is_loaded else "idle"
                case = Case(f"{fault.name}, {who}, {how}")
                for _ in range(options.repeats):
                    rounds.round(case, fault, victim, is_loaded=is_loaded)
                print(json.dumps(case.report()), flush=True)
                is_clean = is_clean and not case.problems
    return 0 if is_clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
