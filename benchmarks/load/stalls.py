"""Measures how long other threads stall while one caller's request is prepared, and other callers beside a flood.

    python benchmarks/load/stalls.py [--model DIRECTORY] [--runs 3]
    python benchmarks/load/stalls.py --floods [--runs 3]

The engine and the event loop are threads of one process. Work that holds Python's lock, in its own thread or not,
blocks both of them. A thread that only sleeps for a millisecond at a time measures this. Reports the median over the
runs of the longest sleep, minus the millisecond, and the duration of the work. Needs two idle cores, no device.

With --floods it starts a server with the demo model and measures what a polite tenant sees: the time of a chat of one
token alone and beside 150 calls of Tokenize with 500 kB each, and the longest gap in a stream alone and while eight
callers of another tenant, each with priority 100, keep all slots busy for ten seconds.
"""

import argparse
import contextlib
import hashlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from meshserve.deploy import demo
from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.client.client import CallError, Client
from meshserve.runtime.text.grammar import Grammars
from meshserve.runtime.text.mask_exchange import MaskExchange, Matcher
from meshserve.runtime.text.tokenizer import Tokenizer

_NUM_CHARS = 1_000_000
_TICK_SECONDS = 0.001
_AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b"'


class Sleeper:
    """Sleeps in a loop and records the longest delay."""

    def __enter__(self) -> "Sleeper":
        self.longest_seconds, self._is_over = 0.0, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        time.sleep(20 * _TICK_SECONDS)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._is_over:
            time.sleep(_TICK_SECONDS)
            now = time.perf_counter()
            self.longest_seconds = max(self.longest_seconds, now - last - _TICK_SECONDS)
            last = now


def works(tokenizer: Tokenizer, grammars: Grammars) -> dict[str, Callable[[], object]]:
    """Returns the kinds of work that a request may cause, by their names in the report."""
    draw = random.Random(0)
    words = "the quick brown fox jumps over a lazy dog and says that this is how long prompts read".split()
    prose = " ".join(draw.choices(words, k=_NUM_CHARS // 4))[:_NUM_CHARS]
    token_ids = tokenizer.encode(prose)
    array = Constraint(kind="json_schema", text='{"type": "array", "items": {"type": "string"}}')
    written = tokenizer.encode("[" + ",".join(['"abc def"'] * 8000))
    return {
        "tokenise a MB of prose": lambda: tokenizer.encode(prose),
        "tokenise a MB of digits": lambda: tokenizer.encode("1" * _NUM_CHARS),
        "tokenise a MB of spaces": lambda: tokenizer.encode(" " * _NUM_CHARS),
        f"detokenise {len(token_ids):,} tokens": lambda: tokenizer.decode(token_ids),
        "write out a chat of 32,000": lambda: tokenizer.render_chat([{"role": "user", "content": "a"}] * 32_000),
        f"resume {len(written):,} tokens under a constraint": lambda: grammars.compile(array, written),
        "follow an ambiguous grammar to its limit": lambda: follow(tokenizer, grammars),
    }


def follow(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Follows one sample until it is given up."""
    exchange, draw = MaskExchange(), random.Random(1)
    matcher = Matcher(grammars.compile(Constraint(kind="grammar", text=_AMBIGUOUS)))
    token_ids = tokenizer.encode("a") + tokenizer.encode("b")
    while matcher.failure is None:
        exchange.advance(matcher, draw.choice(token_ids))
        while matcher.is_waiting:
            exchange.renew(1.0, for_any=True)


_NUM_TOKENIZE_CALLS, _TOKENIZE_CHARS = 150, 500_000
_NUM_FLOODING, _FLOOD_SECONDS = 8, 10.0
_SERVE = [
    sys.executable, "-m", "meshserve", "serve", "--port=0", "--cpu-devices=1", "--dtype=float32", "--page-size=16",
    "--max-running=4", "--max-step-tokens=64", "--num-pages=512",
]  # fmt: skip


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Runs a server with two tenants, "polite" and "flood", who may use any priority, and yields its address.

    Its tokenizer is the demo model's with one very long token, because texts that no context can hold are refused.
    """
    with tempfile.TemporaryDirectory() as directory:
        model, tokens = Path(directory) / "model", Path(directory) / "tokens.toml"
        shutil.copytree(Path(demo.__file__).with_name("model"), model)
        for path in (model / "tokenizer.json", model / "tokenizer_config.json"):
            path.write_text(path.read_text().replace("<|endoftext|>", f"<|endoftext|{'-' * 600}>"))
        for tenant, permissions in (("polite", ["inference", "info"]), ("flood", ["inference", "admin"])):
            digest = hashlib.sha256(tenant.encode()).hexdigest()
            with tokens.open("a") as file:
                file.write(f"[tenants.{tenant}]\npermissions = {permissions}\ntokens = [{{ sha256 = '{digest}' }}]\n")
        command = [*_SERVE, f"--model={model}", f"--tokens={tokens}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            target = next(found[1] for line in process.stdout if (found := re.search(r"listens on (\S+)", line)))
            with Client(target, token="polite") as client:
                client.wait_until_ready(300.0)
            yield target
        finally:
            process.terminate()
            process.wait()


def chat_seconds(client: Client) -> float:
    """Returns the time of a chat of one token, with a prompt that is long enough not to be tokenised inline."""
    began = time.perf_counter()
    list(client.chat([{"role": "user", "content": "The sea. " * 250}], max_tokens=1))
    return time.perf_counter() - began


def longest_gap(client: Client, is_over: Callable[[], bool]) -> float:
    """Returns the longest time between two messages of the client's streams, one after the other, until `is_over`."""
    longest, last = 0.0, time.perf_counter()
    while not is_over():
        for _ in client.generate("The sea", max_tokens=500, ignore_eos=True):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            if is_over():
                break
    return max(longest, time.perf_counter() - last)


def beside_tokenize(target: str, num_runs: int) -> None:
    def call(number: int) -> str:
        with grpc.insecure_channel(target) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            request = pb.TokenizeRequest(text=f"{number} the sea and the sky " * (_TOKENIZE_CHARS // 25))
            try:
                stub.Tokenize(request, metadata=[("authorization", "Bearer flood")])
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    with Client(target, token="polite") as client:
        alone = [chat_seconds(client) for _ in range(5 * num_runs)]
        beside: list[float] = []
        with ThreadPoolExecutor(_NUM_TOKENIZE_CALLS) as pool:
            calls = [pool.submit(call, number) for number in range(_NUM_TOKENIZE_CALLS)]
            time.sleep(1.0)
            while not all(each.done() for each in calls):
                beside.append(chat_seconds(client))
        codes = Counter(each.result() for each in calls)
    _print("chat of one token", "Tokenize", alone, beside)
    print(f"  Tokenize: {dict(codes)}", flush=True)


def beside_priorities(target: str, num_runs: int) -> None:
    with Client(target, token="polite") as client:
        alone, beside = [], []
        for _ in range(num_runs):
            end = time.perf_counter() + _FLOOD_SECONDS
            alone.append(longest_gap(client, lambda end=end: time.perf_counter() > end))  # type: ignore[misc]
            is_over = threading.Event()
            flooding = [threading.Thread(target=flood, args=(target, is_over)) for _ in range(_NUM_FLOODING)]
            timer = threading.Timer(_FLOOD_SECONDS, is_over.set)
            for thread in (*flooding, timer):
                thread.start()
            beside.append(longest_gap(client, is_over.is_set))
            for thread in flooding:
                thread.join()
    _print("longest gap of a stream", "priority 100", alone, beside)


def flood(target: str, is_over: threading.Event) -> None:
    """Sends one request after the other until `is_over`."""
    with Client(target, token="flood") as client:
        while not is_over.is_set():
            with contextlib.suppress(CallError):
                for _ in client.generate("The sky", max_tokens=400, ignore_eos=True, priority=100):
                    if is_over.is_set():
                        break


def _print(what: str, flooded_with: str, alone: list[float], beside: list[float]) -> None:
    figures = [f"{1e3 * statistics.median(each):.0f} ms, longest {1e3 * max(each):.0f}" for each in (alone, beside)]
    print(f"{what}: alone {figures[0]}; beside a flood of {flooded_with} {figures[1]} ({len(beside)})", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=Path(demo.__file__).with_name("model"), help="the model whose tokenizer is used"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs per kind of work (default: %(default)s)")
    parser.add_argument("--floods", action="store_true", help="measure other callers beside a flood instead")
    options = parser.parse_args(arguments)
    if options.floods:
        with server() as target:
            beside_tokenize(target, options.runs)
            beside_priorities(target, options.runs)
        return 0
    tokenizer = Tokenizer(options.model)
    vocab_size = -(-tokenizer.vocab_size // 32) * 32
    eos_token_ids = frozenset(filter(tokenizer.knows, tokenizer.eos_token_ids))
    grammars = Grammars(options.model / "tokenizer.json", vocab_size, eos_token_ids)
    tokenizer.render_chat([{"role": "user", "content": "a"}])  # as a server does at startup
    for name, work in works(tokenizer, grammars).items():
        stalls, seconds = [], []
        for _ in range(options.runs):
            with Sleeper() as sleeper:
                started = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - started)
            stalls.append(sleeper.longest_seconds)
        still, took = (statistics.median(values) * 1e3 for values in (stalls, seconds))
        print(f"{name:40} {took:8.1f} ms, other threads stalled for {still:7.1f} ms", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
