"""Renders and encodes in processes of limited time and memory, for templates and tokenizers that are not known to end.

The server's side of `text_worker`. docs/decisions/094-limited-text.md has the reasons.
"""

import atexit
import functools
import queue
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..api.errors import InvalidRequestError, UnsupportedModelError
from .worker_processes import WorkerLostError, WorkerProcess, WorkerTemplate

# As those of constraints by default: --constraint-seconds, --constraint-memory-mib.
SECONDS = 10.0
MEMORY_BYTES = 512 << 20
STACK_BYTES = 16 << 20
_MAX_WORKERS = 4  # as many threads render and encode prompts


class LimitedText:
    """Renders and encodes in other processes, which are started when they are first needed. Thread-safe.

    Args:
      tokenizer_file: The tokenizer.json.
      template_folder: Made by `template_files`.
    """

    def __init__(self, tokenizer_file: Path, template_folder: str):
        self._files = {"tokenizer_file": str(tokenizer_file), "template_folder": template_folder}
        self._idle: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(_MAX_WORKERS):
            self._idle.put(None)  # a worker that is not started yet

    def render(self, what: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Renders a conversation; `what` names the template in errors.

        Raises:
          InvalidRequestError: The template refuses the messages.
          UnsupportedModelError: It exceeds a limit.
        """
        answer = self._call(what, {"render": [[dict(message) for message in messages], dict(options)]})
        if "error" in answer:
            raise InvalidRequestError("messages", f"the chat template refused them: {answer['error']}")
        return str(answer["result"])

    def encode(self, what: str, text: str, *, is_completed: bool) -> list[int]:
        """Encodes a text; `what` names the tokenizer in errors.

        Raises:
          UnsupportedModelError: The tokenizer fails or exceeds a limit.
        """
        answer = self._call(what, {"encode": [text, is_completed]})
        if "error" in answer:
            raise UnsupportedModelError(f"{what} cannot encode this text: {answer['error']}.")
        token_ids: list[int] = answer["result"]
        return token_ids

    def _call(self, what: str, message: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            if worker is None or worker.is_lost:
                worker = _forked()
            worker.send({**self._files, **message})
            while not worker.wait(SECONDS / 10):
                if worker.has_used(SECONDS):
                    worker.kill()
                    raise UnsupportedModelError(f"{what} took more than {SECONDS:g} s, and was stopped. {_ADVICE}")
                _template().check()
            answer = worker.receive()
            if "limit" in answer:
                raise UnsupportedModelError(f"{what} {answer['limit']}. {_ADVICE}")
            return answer
        except WorkerLostError:
            status = worker.exit_status if worker is not None else None
            if status in (-signal.SIGABRT, -signal.SIGKILL):
                reason = f"needed more than {MEMORY_BYTES >> 20} MiB of memory, and was stopped"
            else:
                reason = f"ended its process (status {status})"
            raise UnsupportedModelError(f"{what} {reason}. {_ADVICE}") from None
        except TypeError as error:  # no JSON
            raise InvalidRequestError("messages", f"this template takes only what JSON can express: {error}.") from None
        finally:
            self._idle.put(None if worker is None or worker.is_lost or worker.busy_since is not None else worker)


def _forked() -> WorkerProcess:
    with _STARTING:
        template = _template()
    template.check()
    template.wait_until_ready()
    return template.fork()


@functools.cache
def _template() -> WorkerTemplate:
    """Returns the template of all workers of this process, which takes a second to start. It knows of no model."""
    template = WorkerTemplate(_SETTINGS, MEMORY_BYTES, "text_worker", _is_answer)
    atexit.register(template.close)
    return template


_STARTING = threading.Lock()
_SETTINGS = {"stack_bytes": STACK_BYTES, "mask_bytes": 4, "num_ahead": 0}
_ADVICE = "It is run in a process of limited time and memory; use the file that the model was published with."


def _is_answer(message: Any) -> bool:
    """Returns whether a message makes sense as the answer of a worker, which may send anything once it is corrupted."""
    if not isinstance(message, dict) or len(message) != 1:
        return False
    [(name, value)] = message.items()
    if name == "result" and isinstance(value, list):
        return set(map(type, value)) <= {int} and (not value or 0 <= min(value) <= max(value) < 2**31)
    return name in ("result", "error", "limit") and isinstance(value, str)
