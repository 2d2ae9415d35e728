"""Answers the lines of a batch file, many at a time, with the code that answers requests to the port."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...api.errors import EngineStoppedError, InvalidRequestError, QueueFullError, QuotaExceededError
from ..api_errors import error_answer
from ..http_call import HttpCall
from ..routes import Route
from .answer_file import AnswerFile
from .batch_lines import BatchLine, LineError, answer_line, asked_lines, numbered_lines

_MAX_WAIT_SECONDS = 600.0  # for room in the queue or in a quota
_MAX_RETRY_SECONDS = 30.0

_Call = Callable[..., "asyncio.Future[Any]"]  # calls a function with arguments


@dataclass
class BatchCounts:
    """What is known of the lines of a file, in this run and before it."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def num_open(self) -> int:
        """The lines about which nothing has been written."""
        return self.total - self.completed - self.failed


def num_lines(path: Path) -> int:
    """Returns how many lines of a file are not blank. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return sum(1 for _ in numbered_lines(file))


class BatchRun:
    """Answers the lines of a file about which nothing has been written yet.

    Args:
      routes: What answers, by the `url` of a line.
      call: Makes the call of a line of a number of bytes.
      answers: Takes the answers with status 200.
      errors: Takes the others, and what is wrong with lines that cannot be answered.
      max_open: The number of lines that are answered at a time.
      before: Awaited before each line is begun.
      defaults: Fields of bodies that lack them.
      on_answer: Receives the counts when something has been written.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        call: Callable[[int], HttpCall],
        answers: AnswerFile,
        errors: AnswerFile,
        *,
        max_open: int,
        before: Callable[[], Awaitable[None]] | None = None,
        defaults: Mapping[str, object] | None = None,
        on_answer: Callable[[BatchCounts], None] = lambda counts: None,
    ):
        self._routes, self._call, self._before, self._defaults = routes, call, before, defaults or {}
        self._answers, self._errors, self._on_answer = answers, errors, on_answer
        self._slots = asyncio.Semaphore(max_open)
        self._stopped: EngineStoppedError | None = None  # why the server answers no more
        self._done = answers.answered | errors.answered  # the lines about which something has been written
        self.counts = BatchCounts(completed=len(answers.answered), failed=len(errors.answered))

    async def run(self, source: Path) -> None:
        """Answers the lines of `source`. When the server stops, those that have begun are awaited.

        Raises:
          EngineStoppedError: The server stops, or its engine has failed. What is not answered is left to another run.
          MeshserveError: An answer cannot be written.
          OSError: The file cannot be read.
        """
        with source.open("rb") as file:
            async with _own_thread() as call:
                self.counts.total = await call(num_lines, source)
                lines = self._open_lines(asked_lines(file, self._routes))
                try:
                    async with asyncio.TaskGroup() as tasks:
                        while (line := await call(next, lines, None)) is not None and await self._may_begin():
                            tasks.create_task(self._finish(line, call))
                except* Exception as errors:
                    raise errors.exceptions[0] from None
        if self._stopped is not None:
            raise self._stopped

    async def give_up(self, source: Path, code: str, message: str) -> None:
        """Writes that the lines that are left have not been answered. Raises as `run`."""
        with source.open("rb") as file:
            async with _own_thread() as call:
                lines = self._open_lines(asked_lines(file, self._routes))
                while (line := await call(next, lines, None)) is not None:
                    if not isinstance(line, LineError):
                        line = LineError(line.number, code, message, custom_id=line.custom_id)
                    await self._write(line, False, line.line(), call)

    def _open_lines(self, lines: Iterator[BatchLine | LineError]) -> Iterator[BatchLine | LineError]:
        """Yields the lines about which nothing has been written."""
        return (line for line in lines if _key(line) not in self._done)

    async def _may_begin(self) -> bool:
        """Waits for the turn of another line. Returns whether the server can still answer it."""
        await self._slots.acquire()
        try:
            if self._before is not None:
                await self._before()
        except EngineStoppedError as error:
            self._stopped = error  # what has begun may still end
        return self._stopped is None

    async def _finish(self, line: BatchLine | LineError, call: _Call) -> None:
        try:
            is_answer, text = (False, line.line()) if isinstance(line, LineError) else await self._answered(line)
            await self._write(line, is_answer, text, call)
        except EngineStoppedError as error:
            self._stopped = error
        finally:
            self._slots.release()

    async def _write(self, line: BatchLine | LineError, is_answer: bool, text: bytes, call: _Call) -> None:
        def write() -> None:
            (self._answers if is_answer else self._errors).add(text)
            self._done.add(_key(line))
            self.counts.completed += is_answer
            self.counts.failed += not is_answer

        await call(write)
        self._on_answer(self.counts)

    async def _answered(self, line: BatchLine) -> tuple[bool, bytes]:
        """Returns whether a line has been answered as it asks, and what to write about it."""
        route, began = self._routes[line.url], time.monotonic()
        while True:
            call = self._call(line.num_bytes)
            try:
                if line.body.get("stream"):
                    raise InvalidRequestError("stream", "is true; the answers of a batch are whole. Leave it out.")
                body = {**self._defaults, **line.body}
                response = await route.answer(None, body, call)  # type: ignore[arg-type]  # streams need the request
                assert isinstance(response.body, bytes)  # type: ignore[attr-defined]
                return True, answer_line(line, call.request_id, response.status, response.body)  # type: ignore[attr-defined]
            except EngineStoppedError:
                raise
            except Exception as failure:
                if isinstance(failure, QueueFullError | QuotaExceededError):
                    if time.monotonic() - began < _MAX_WAIT_SECONDS:
                        await asyncio.sleep(min(failure.retry_seconds, _MAX_RETRY_SECONDS))
                        continue
                error = error_answer(failure)
                shown = json.dumps(route.error_form(error)).encode()
                return False, answer_line(line, call.request_id, error.status, shown)


def _key(line: BatchLine | LineError) -> str | int:
    """Returns what names a line; see `batch_lines.key_of`."""
    return line.number if isinstance(line, LineError) else line.custom_id


@contextlib.asynccontextmanager
async def _own_thread() -> AsyncIterator[_Call]:
    """Yields a function that calls others in a thread of their own, one at a time, because file systems may hang.

    When the block ends, so has all that was called.
    """
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "batch")

    def call(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return loop.run_in_executor(thread, function, *arguments)

    try:
        yield call
    finally:
        await asyncio.wait([call(int)])
        thread.shutdown(wait=False)
