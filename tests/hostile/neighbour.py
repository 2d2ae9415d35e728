"""A tenant with manners, beside whom the attacks run: its streams must go on, with the same results and no refusal.

It is a process of its own, so that its times are not those of the attackers' process. Run as a program, it reads
commands from its standard input: "begin" with kinds starts one stream after the other, "end" finishes the last one and
prints a report, "count" prints how many have ended.
"""

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshserve.runtime.client.client import CallError, Client
from tests.waiting import WAIT_SECONDS, wait_for

_TENANT = "neighbour"
_PROMPT = [300, 301, 302, 303, 304, 305, 306, 307]
# What it asks for, in turn. All have the same numbers of tokens, which fill its quota.
STREAMS: Mapping[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "processed": {"temperature": 0.8, "seed": 7, "logprobs": 2, "frequency_penalty": 0.5},
    "constrained": {"temperature": 1.0, "seed": 8, "constraint": {"regex": "[a-z ]{400}"}},
}
HTTP_STREAMS: Mapping[str, dict[str, Any]] = {  # fields of /v1/completions
    "plain over HTTP": {"temperature": 0},
    "processed over HTTP": {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.5},
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
      first: Times to the first message of each stream, in the same form.
      failures: Streams that were refused, broken off, or ended with other tokens than alone.
    """

    gaps: dict[str, list[float]]
    first: dict[str, list[float]]
    failures: list[str]
    num_streams: int


class Neighbour:
    """Controls the neighbour's process."""

    def __init__(self, target: str, openai: str, num_tokens: int):
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), target, openai, str(num_tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Neighbour":
        kinds = [*STREAMS, *HTTP_STREAMS]
        self.begin(kinds)  # the first results are those without an attack
        self.wait_for_streams(len(kinds))
        report = self.end()
        assert not report.failures, report.failures
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()

    def begin(self, kinds: Sequence[str] = tuple(STREAMS)) -> None:
        """Starts its streams, of these kinds in turn."""
        self._ask("begin " + ",".join(kinds))

    def wait_for_streams(self, num_streams: int) -> None:
        """Waits until `num_streams` streams have ended since `begin`."""
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

    def __init__(self, client: Client, openai: str, num_tokens: int):
        self._client, self._openai = client, openai
        self._max_tokens = num_tokens - len(_PROMPT)
        self._alone: dict[str, object] = {}  # results of the first streams, by their kind
        self._num_begun = {kind: 0 for kind in (*STREAMS, *HTTP_STREAMS)}
        self._is_over = threading.Event()
        self._thread = threading.Thread()

    def begin(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds
        self.gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
        self.first: dict[str, list[float]] = {kind: [] for kind in kinds}
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
        """Has stream after stream, of each kind as often. Those over HTTP share a connection."""
        with contextlib.closing(http.client.HTTPConnection(self._openai, timeout=WAIT_SECONDS)) as connection:
            while not self._is_over.is_set():
                kind = min(self._kinds, key=self._num_begun.__getitem__)
                self._num_begun[kind] += 1
                self._stream(kind, self._over_http(connection, kind) if kind in HTTP_STREAMS else self._over_grpc(kind))
                self.num_streams += 1

    def _stream(self, kind: str, messages: Iterator[tuple[Sequence[int], str, str]]) -> None:
        """Reads a stream: the tokens of each message, their text, and the reason for the end."""
        last, times = time.perf_counter(), []
        token_ids: list[int] = []
        text = reason = ""
        try:
            for new, its_text, its_reason in messages:
                now = time.perf_counter()
                times.append(now - last)
                last = now
                token_ids += new
                text += its_text
                reason = its_reason or reason
        except (CallError, OSError, ValueError, KeyError, http.client.HTTPException) as error:
            code = error.code if isinstance(error, CallError) else type(error).__name__
            self.failures.append(f"{kind} stream after {len(token_ids)} tokens: {code}: {error}")
            return
        result = [token_ids, text, reason]
        if result != self._alone.setdefault(kind, result) or reason != "length":
            self.failures.append(f"{kind} stream was {result} instead of {self._alone[kind]}")
        self.first[kind].append(times[0])
        self.gaps[kind] += times[1:]

    def _over_grpc(self, kind: str) -> Iterator[tuple[Sequence[int], str, str]]:
        for chunk in self._client.generate(
            _PROMPT, max_tokens=self._max_tokens, ignore_eos=True, timeout_seconds=WAIT_SECONDS, **STREAMS[kind]
        ):
            yield chunk.token_ids, chunk.text, chunk.finish.reason.value if chunk.finish is not None else ""

    def _over_http(self, connection: http.client.HTTPConnection, kind: str) -> Iterator[tuple[Sequence[int], str, str]]:
        body = {"prompt": _PROMPT, "max_tokens": self._max_tokens, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, **HTTP_STREAMS[kind]}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {_TENANT}"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {answer.read()[:300]!r}")
        is_whole = False
        for line in answer:
            if line.startswith(b"data: {"):
                [choice] = json.loads(line.removeprefix(b"data: "))["choices"]
                yield choice["token_ids"], choice["text"], choice["finish_reason"] or ""
            is_whole |= line.startswith(b"data: [DONE]")
        if not is_whole:
            raise ValueError("the stream was broken off")


def main(arguments: Sequence[str]) -> None:
    """Runs the neighbour.

    `arguments` are the addresses of gRPC and of OpenAI's API, and the number of tokens of a stream.
    """
    target, openai, num_tokens = arguments
    with Client(target, token=_TENANT) as client:
        streams = _Streams(client, openai, int(num_tokens))
        for line in sys.stdin:
            answer: Any = None
            match line.strip().split(maxsplit=1):
                case ["begin", kinds]:
                    streams.begin(kinds.split(","))
                case ["count"]:
                    answer = streams.num_streams
                case ["end"]:
                    answer = streams.end()
            print(json.dumps(answer), flush=True)
