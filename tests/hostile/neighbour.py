"""A tenant with manners, beside whom the attacks run: its streams must go on, with the same results and no refusal.

It is a process of its own, so that its times are not those of the attackers' process. Run as a program, it reads
commands from its standard input: "begin" starts one stream after the other, "end" finishes the last one and prints a
report, "count" prints how many have ended.
"""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshserve.runtime.client.client import CallError, Client
from tests.waiting import WAIT_SECONDS, wait_for

_PROMPT = [300, 301, 302, 303, 304, 305, 306, 307]
# What it asks for, in turn. All have the same numbers of tokens, which fill its quota.
STREAMS: Mapping[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "processed": {"temperature": 0.8, "seed": 7, "logprobs": 2, "frequency_penalty": 0.5},
    "constrained": {"temperature": 1.0, "seed": 8, "constraint": {"regex": "[a-z ]{400}"}},
}

_PROGRAM = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {__name__} import main
main(sys.argv[2:])
"""


@dataclass(frozen=True)
class Report:
    """What the neighbour saw.

    Attributes:
      gaps: Times between two messages of a stream, in seconds, by the kind of stream.
      first: Times to the first message of each stream, likewise.
      failures: Streams that were refused, broken off, or ended with other tokens than alone.
    """

    gaps: dict[str, list[float]]
    first: dict[str, list[float]]
    failures: list[str]
    num_streams: int


class Neighbour:
    """Controls the neighbour's process."""

    def __init__(self, target: str, num_tokens: int):
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), target, str(num_tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Neighbour":
        self.begin()  # the first results are those without an attack
        self.wait_for_streams(len(STREAMS))
        report = self.end()
        assert not report.failures, report.failures
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()

    def begin(self) -> None:
        """Starts its streams."""
        self._ask("begin")

    def wait_for_streams(self, num_streams: int) -> None:
        """Waits until so many streams have ended since `begin`."""
        wait_for(lambda: self._ask("count") >= num_streams)

    def end(self) -> Report:
        """Ends its streams, after the present one, and returns what it has seen since `begin`."""
        return Report(**self._ask("end"))

    def _ask(self, command: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the neighbour's process has ended; its error stands above"
        return json.loads(answer)


class _Streams:
    """Runs one stream after the other in a thread."""

    def __init__(self, client: Client, num_tokens: int):
        self._client = client
        self._max_tokens = num_tokens - len(_PROMPT)
        self._alone: dict[str, object] = {}  # results of the first streams, by their kind
        self._kinds = itertools.cycle(STREAMS)
        self._is_over = threading.Event()
        self._thread = threading.Thread()

    def begin(self) -> None:
        self.gaps: dict[str, list[float]] = {kind: [] for kind in STREAMS}
        self.first: dict[str, list[float]] = {kind: [] for kind in STREAMS}
        self.failures: list[str] = []
        self.num_streams = 0
        self._is_over.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> dict[str, Any]:
        self._is_over.set()
        self._thread.join()
        return {name: getattr(self, name) for name in ("gaps", "first", "failures", "num_streams")}

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._stream(next(self._kinds))
            self.num_streams += 1

    def _stream(self, kind: str) -> None:
        last, times = time.perf_counter(), []
        token_ids: list[int] = []
        text = reason = ""
        try:
            for chunk in self._client.generate(
                _PROMPT, max_tokens=self._max_tokens, ignore_eos=True, timeout_seconds=WAIT_SECONDS, **STREAMS[kind]
            ):
                now = time.perf_counter()
                times.append(now - last)
                last = now
                token_ids += chunk.token_ids
                text += chunk.text
                reason = chunk.finish.reason.value if chunk.finish is not None else reason
        except CallError as error:
            self.failures.append(f"{kind} stream after {len(token_ids)} tokens: {error.code}: {error}")
            return
        result = [token_ids, text, reason]
        if result != self._alone.setdefault(kind, result) or reason != "length":
            self.failures.append(f"{kind} stream was {result} instead of {self._alone[kind]}")
        self.first[kind].append(times[0])
        self.gaps[kind] += times[1:]


def main(arguments: Sequence[str]) -> None:
    """Runs the neighbour. `arguments` are the server's address and the number of tokens of a stream."""
    target, num_tokens = arguments
    with Client(target, token="neighbour") as client:
        streams = _Streams(client, int(num_tokens))
        for line in sys.stdin:
            answer: Any = None
            match line.strip():
                case "begin":
                    streams.begin()
                case "count":
                    answer = streams.num_streams
                case "end":
                    answer = streams.end()
            print(json.dumps(answer), flush=True)
