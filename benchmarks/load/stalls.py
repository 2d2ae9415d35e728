"""Measures how long other threads stall while one caller's request is prepared, by kind of request.

    python benchmarks/load/stalls.py [--model DIRECTORY] [--runs 3]

The engine and the event loop are threads of one process. Work that holds Python's lock, in its own thread or not,
blocks both of them. A thread that only sleeps for a millisecond at a time measures this. Reports the median over the
runs of the longest sleep, minus the millisecond, and the duration of the work. Needs two idle cores, no device.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from meshserve.deploy import demo
from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.text.grammar import Grammars
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
    array = grammars.compile(Constraint(kind="json_schema", text='{"type": "array", "items": {"type": "string"}}'))
    written = tokenizer.encode("[" + ",".join(['"abc def"'] * 8000))
    return {
        "tokenise a MB of prose": lambda: tokenizer.encode(prose),
        "tokenise a MB of digits": lambda: tokenizer.encode("1" * _NUM_CHARS),
        "tokenise a MB of spaces": lambda: tokenizer.encode(" " * _NUM_CHARS),
        f"detokenise {len(token_ids):,} tokens": lambda: tokenizer.decode(token_ids),
        "write out a chat of 32,000": lambda: tokenizer.render_chat([{"role": "user", "content": "a"}] * 32_000),
        f"resume {len(written):,} tokens, 64 samples": lambda: array.matchers(64, written),
        "follow an ambiguous grammar to its limit": lambda: follow(tokenizer, grammars),
    }


def follow(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Advances a matcher until it gives up; its masks are made without the lock, but the steps wait for them anyway."""
    matcher, draw = grammars.compile_alone(Constraint(kind="grammar", text=_AMBIGUOUS)).matcher(), random.Random(1)
    token_ids = tokenizer.encode("a") + tokenizer.encode("b")
    while matcher.failure is None and matcher.advance([draw.choice(token_ids)]):
        grammars.renew_masks([matcher])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=Path(demo.__file__).with_name("model"), help="the model whose tokenizer is used"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs per kind of work (default: %(default)s)")
    options = parser.parse_args(arguments)
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
