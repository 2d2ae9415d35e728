"""The processes in which constraints are compiled and followed, so that a crash or an endless run stays there.

llguidance is native code that reads what callers send. The server starts one process with `main`, the template, which
loads the vocabulary once and forks a worker whenever `worker_processes.WorkerTemplate` asks for one; forks share the
vocabulary's memory. A worker answers messages on its socket (length, then JSON) and writes token masks to memory that
it shares with the server. Imports neither numpy nor jax: a fork should be small and have one thread.
"""

import contextlib
import ctypes
import gc
import json
import mmap
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import llguidance

from ..api.constraint import Constraint
from .worker_protocol import (
    CONTROL,
    EXITED,
    FORK,
    HAS_FAILED,
    HEADER_BYTES,
    IS_COMPLETE,
    IS_REFUSED,
    MAY_END,
    MUST_END,
    PROGRESS,
    READY,
    RENICE,
    SIGNAL,
    encoded,
    receive,
)

_SLOW_ROW_SECONDS = 0.01  # constraints with a row that takes longer are named in the answer,
_SLOW_SUM_SECONDS = 0.02  # and those whose rows together take longer
_MESSAGE_SECONDS = 0.05  # after which the other rows of a message are left for the next one
_AHEAD_SECONDS = 0.003  # in a message, after which no further masks after draft tokens are computed
_PR_SET_PDEATHSIG = 1
_MAX_EXACT_INT = 2**53
# Whitespace allowed between JSON tokens: none, a space, or a newline and indentation. With more freedom, some models
# never stop producing whitespace.
_JSON_OPTIONS: Any = {
    "whitespace_pattern": r"( |\n( {0,16}|\t{0,8}))?",
    "item_separator": ",",  # a schema must not override these (`x-guidance`): the output would not be JSON
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
# A rule attribute in llguidance's Lark dialect that llguidance does not enforce: it leaves the temperature to the
# sampler.
_GUIDING_ATTRIBUTE = re.compile(r"^[?!]?\w+\s*\[[^\]]*?\b(temperature)\s*=", re.MULTILINE)


class Worker:
    """Follows the samples of some constraints.

    A message has `sources`, constraints by number; `rows`, each a row of the shared memory, the number of its
    constraint, whether it starts anew, and the tokens to consume; and `free` and `drop`, the rows and the constraints
    that are no longer needed. `ahead` are the draft tokens of each row. The answer has a state and an error for each
    row, how much processor time they took, and for each slow constraint the index of one of its rows and its time. If
    the first rows take long, the others have none. Its `ahead` are the states of each row after its first draft tokens,
    as many as the grammar allows and as there was time for.
    """

    def __init__(self, vocabulary: llguidance.LLTokenizer, settings: dict[str, Any], memory: mmap.mmap):
        self._vocabulary = vocabulary
        self._limits = llguidance.LLParserLimits(**settings["limits"], verbose_errors=False)
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mask_bytes: int = settings["mask_bytes"]
        self._num_masks: int = 1 + settings["num_ahead"]
        self._end_bits = sum(1 << token_id for token_id in settings["eos_token_ids"])
        self._mask_seconds = 0.0  # that the last mask took
        self._sources: dict[int, Constraint] = {}
        self._starts: dict[int, llguidance.LLMatcher] = {}
        self._matchers: dict[int, llguidance.LLMatcher] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Does what a message asks for."""
        began = time.process_time()  # not affected by what else the machine does
        process = (os.getpid(), int(began * 1e9))
        for row in message.get("free", ()):
            self._matchers.pop(row, None)
        for number in message.get("drop", ()):
            self._starts.pop(number, None)
        for number, (kind, text, choices) in message.get("sources", {}).items():
            self._sources[int(number)] = Constraint(kind=kind, text=text, choices=tuple(choices))
        rows: list[tuple[int, str]] = []
        spent: dict[int, list[float]] = {}  # by constraint: index of its last row, longest time of a row, and the sum
        last = began
        for index, (row, number, is_new, token_ids) in enumerate(message["rows"]):
            PROGRESS.pack_into(self._memory, 0, row + 1, *process)
            rows.append(self._advance(row, number, is_new, token_ids))
            now = time.process_time()
            _, longest, total = spent.get(number, (0, 0.0, 0.0))
            spent[number] = [index, max(longest, now - last), total + now - last]
            last = now
            if now - began > _MESSAGE_SECONDS:
                break
        seconds = time.process_time() - began
        ahead = self._look_ahead(message, rows, process)
        PROGRESS.pack_into(self._memory, 0, 0, *process)
        slow = [
            [index, max(longest, total if total > _SLOW_SUM_SECONDS else 0.0)]
            for index, longest, total in spent.values()
            if longest > _SLOW_ROW_SECONDS or total > _SLOW_SUM_SECONDS
        ]
        return {"rows": rows, "slow": slow, "ahead": ahead, "seconds": seconds, "mask_seconds": self._mask_seconds}

    def _advance(self, row: int, number: int, is_new: bool, token_ids: list[int]) -> tuple[int, str]:
        """Consumes tokens and writes the mask of the next one. Returns the row's state and its error."""
        if is_new:
            try:
                self._matchers[row] = self._start(number).deep_copy()
            except MemoryError:
                os.abort()  # as llguidance does where it lacks memory, so that the server knows what the cause is
            except (ValueError, RecursionError) as error:
                return HAS_FAILED, str(error) or type(error).__name__
        matcher = self._matchers[row]
        if token_ids and not matcher.consume_tokens(token_ids):
            return IS_REFUSED | HAS_FAILED, matcher.get_error()
        began = time.process_time()
        found = self._write_mask(matcher, row, 0)
        self._mask_seconds = time.process_time() - began
        return found

    def _look_ahead(
        self, message: dict[str, Any], rows: Sequence[tuple[int, str]], process: tuple[int, int]
    ) -> list[list[int]]:
        """Writes the masks after the draft tokens of the answered rows, and returns the states there."""
        began = time.process_time()
        found: list[list[int]] = [[] for _ in rows]
        for index, drafts in enumerate(message.get("ahead", ())[: len(rows)]):
            if not drafts or rows[index][0] & ~MAY_END or time.process_time() - began > _AHEAD_SECONDS:
                continue
            row = message["rows"][index][0]
            PROGRESS.pack_into(self._memory, 0, row + 1, *process)
            matcher = self._matchers[row].deep_copy()
            for token_id in drafts[: self._num_masks - 1]:  # a row has no memory for more
                if not matcher.consume_tokens([token_id]):
                    break
                state, _ = self._write_mask(matcher, row, 1 + len(found[index]))
                if state & ~MAY_END or time.process_time() - began > _AHEAD_SECONDS:
                    break
                found[index].append(state)
        return found

    def _write_mask(self, matcher: llguidance.LLMatcher, row: int, index: int) -> tuple[int, str]:
        """Writes a mask of a row to the shared memory. Returns the matcher's state and its error."""
        offset = HEADER_BYTES + (row * self._num_masks + index) * self._mask_bytes
        matcher.unsafe_compute_mask_ptr(self._address + offset, self._mask_bytes)
        if matcher.is_error():
            return HAS_FAILED, matcher.get_error()
        state = MAY_END if matcher.is_accepting() else 0
        if matcher.is_stopped():
            return state | IS_COMPLETE, ""
        mask = self._memory[offset : offset + self._mask_bytes]
        if len(mask) - mask.count(0) <= self._end_bits.bit_count():
            state |= 0 if int.from_bytes(mask, "little") & ~self._end_bits else MUST_END
        return state, ""

    def _start(self, number: int) -> llguidance.LLMatcher:
        """Returns the start of a constraint, compiled when its first sample comes.

        Raises:
          ValueError: The constraint is malformed or cannot be enforced.
        """
        if number in self._sources:
            source = _source(self._sources.pop(number))
            self._starts[number] = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=self._limits)
        start = self._starts[number]
        if start.is_error():
            raise ValueError(start.get_error())
        return start


def _source(constraint: Constraint) -> str:
    """Returns the grammar source that llguidance compiles.

    Raises:
      ValueError: The constraint is malformed.
    """
    if constraint.kind in ("json_schema", "json_object"):
        schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
        with contextlib.suppress(json.JSONDecodeError):  # llguidance reports the error
            _check_numbers(json.loads(schema), is_written=False)
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    if constraint.kind == "choice":  # as a regex they form one lexeme; as grammar alternatives, one parser item each
        return llguidance.grammar_from("regex", "|".join(map(re.escape, constraint.choices)))
    if constraint.kind == "regex":
        return llguidance.grammar_from("regex", constraint.text)
    if (found := _GUIDING_ATTRIBUTE.search(constraint.text)) is not None:
        raise ValueError(f"the rule attribute {found[1]} is not supported")
    return llguidance.grammar_from("grammar", constraint.text)


def _check_numbers(schema: Any, *, is_written: bool) -> None:
    """Checks that float64, which llguidance uses for numbers, represents the integers of `const` and `enum` exactly.

    Raises:
      ValueError: An integer is not represented exactly. The message names it.
    """
    if isinstance(schema, dict):
        for key, value in schema.items():
            _check_numbers(value, is_written=is_written or key in ("const", "enum"))
    elif isinstance(schema, list):
        for value in schema:
            _check_numbers(value, is_written=is_written)
    elif is_written and isinstance(schema, int) and abs(schema) > _MAX_EXACT_INT:
        raise ValueError(f"{schema} in const or enum is beyond 2^53, where integers are not represented exactly")


def _serve(connection: socket.socket, shared: int, memory_bytes: int, template: "_Template") -> NoReturn:
    """Runs a worker until the server closes its socket. Called in the fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the template
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # where memory runs out, this process goes first
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # crashes print stack traces
    _limit_resources(memory_bytes, template.settings["stack_bytes"])
    memory = mmap.mmap(shared, 0)
    os.close(shared)
    worker = Worker(template.vocabulary, template.settings, memory)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.sendall(encoded(worker.answer(receive(connection))))
    os._exit(0)


def _limit_resources(memory_bytes: int, stack_bytes: int) -> None:
    """Limits the memory that this process may allocate from now on, and its stack; a crash leaves no core file."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_STACK: stack_bytes}
    if sys.platform == "linux":
        with open("/proc/self/status", encoding="ascii") as status:
            [used_kib] = [int(line.split()[1]) for line in status if line.startswith("VmData:")]
        limits[resource.RLIMIT_DATA] = (used_kib << 10) + memory_bytes
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _tokenizer_within(path: Path, vocab_size: int) -> str:
    """Returns a tokenizer.json as llguidance takes it, without the tokens that a model's vocabulary does not have.

    That is the path, or the changed content if the tokenizer has more tokens than the model.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    added = content.get("added_tokens") or []
    if max([*vocabulary.values(), *(token["id"] for token in added)], default=0) < vocab_size:
        return str(path)
    kept = {token: token_id for token, token_id in vocabulary.items() if token_id < vocab_size}

    def is_kept(merge: str | list[str]) -> bool:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        return kept.keys() >= {*parts, "".join(parts)}

    content["model"] |= {"vocab": kept, "merges": [merge for merge in content["model"]["merges"] if is_kept(merge)]}
    content["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    return json.dumps(content)


class _Template:
    """The process that all workers are forked from."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]):
        self.settings = settings
        tokenizer = _tokenizer_within(Path(settings["tokenizer_file"]), settings["vocab_size"])
        self.vocabulary = llguidance.LLTokenizer(
            tokenizer, n_vocab=settings["vocab_size"], eos_token=settings["eos_token_ids"] or None
        )
        self._control = control
        self._workers: dict[int, int] = {}  # process id -> token
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def run(self) -> None:
        """Serves the control socket until the server closes it."""
        signal.set_wakeup_fd(self._waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when its workers end
            signal.signal(number, signal.SIG_IGN)
        gc.collect()
        gc.freeze()  # a collection in a worker would copy the pages of everything loaded before
        self._control.sendall(CONTROL.pack(READY, 0, 0))
        poller = select.poll()
        for descriptor in (self._control.fileno(), self._wake):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._wake in ready:
                os.read(self._wake, 4096)
                for token, status in self._ended():
                    self._control.sendall(CONTROL.pack(EXITED, token, status))
            if self._control.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Follows one command. Returns False if the server is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._control, CONTROL.size, 2)
        while data and len(data) < CONTROL.size:
            data += self._control.recv(CONTROL.size - len(data))
        if not data:
            return False
        operation, token, operand = CONTROL.unpack(data)
        if operation == FORK:
            connection, shared = socket.socket(fileno=descriptors[0]), descriptors[1]
            process_id = os.fork()
            if not process_id:
                self._leave()
                _serve(connection, shared, operand, self)
            connection.close()
            os.close(shared)
            self._workers[process_id] = token
            return True
        for process_id in [each for each, its_token in self._workers.items() if its_token == token]:
            if operation == SIGNAL:
                os.kill(process_id, operand)
            elif operation == RENICE:
                os.setpriority(os.PRIO_PROCESS, process_id, operand)
        return True

    def _leave(self) -> None:
        """Gives up, in a fork, what belongs to the template."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for descriptor in (self._wake, self._waker):
            os.close(descriptor)

    def _ended(self) -> Iterator[tuple[int, int]]:
        """Yields the workers that have ended: their tokens and exit statuses, negative for signals."""
        while self._workers:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if not process_id:
                return
            if (token := self._workers.pop(process_id, None)) is not None:
                yield token, os.waitstatus_to_exitcode(status)


def main(arguments: Sequence[str]) -> None:
    """Runs the template. `arguments` are the descriptor of the control socket, and the settings as JSON."""
    control = socket.socket(fileno=int(arguments[0]))
    with contextlib.suppress(ConnectionError, EOFError):
        _Template(control, json.loads(arguments[1])).run()
