"""The lines of OpenAI's batch files: what they ask, and what is written about each of them."""

import contextlib
import json
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...api.errors import InvalidRequestError, MeshserveError
from ...server.inference_service import MAX_MESSAGE_BYTES
from .. import json_text

MAX_CUSTOM_ID_CHARS = 512
_KEYS = ("custom_id", "method", "url", "body")
LONG_BYTES = 2**16  # of a line that takes more than a millisecond to read
_MAX_VALUES = 2**19  # of a line
_LOOK_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A line that asks something.

    Attributes:
      number: Of the line, from 1.
      custom_id: The caller's name of it.
      url: The route that answers it.
      body: What the route takes.
      num_bytes: Of the line.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    num_bytes: int


class LineError(MeshserveError):
    """A line that cannot be answered.

    Args:
      number: Of the line, from 1.
      code: For programs.
      message: For people.
      field: The key of the line that is wrong.
      custom_id: The caller's name of the line, if it has one.
    """

    def __init__(self, number: int, code: str, message: str, *, field: str | None = None, custom_id: str | None = None):
        super().__init__(f"line {number}: {message}")
        self.number, self.code, self.field, self.custom_id = number, code, field, custom_id

    def line(self) -> bytes:
        """Returns what is written about the line."""
        error = {"code": self.code, "message": str(self), "param": self.field, "line": self.number}
        answer = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": self.custom_id, "response": None, "error": error}
        return _encoded(answer)


def is_batch_file(path: Path) -> bool:
    """Returns whether a file has OpenAI's form: its first object has a `custom_id` or a `url`."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for _, data in numbered_lines(file):
            found = None if data is None else _json(data)
            if isinstance(found, dict):
                return "custom_id" in found or "url" in found
    return False  # also if it cannot be read, which its reader reports


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yields the lines that are not blank, with their numbers from 1; None for one that is too long."""
    number = 0
    while data := file.readline(MAX_MESSAGE_BYTES + 1):
        number += 1
        if len(data) <= MAX_MESSAGE_BYTES:
            if data.strip():
                yield number, data
            continue
        while data and not data.endswith(b"\n"):
            data = file.readline(_LOOK_BYTES)
        yield number, None


def asked_lines(file: BinaryIO, urls: Collection[str]) -> Iterator[BatchLine | LineError]:
    """Yields what each line asks, or why it cannot be answered. `urls` are those that can."""
    known: set[str] = set()
    for number, data in numbered_lines(file):
        try:
            line = _line(number, data, urls)
            if line.custom_id in known:
                raise LineError(
                    number, "duplicate_custom_id", f"an earlier line has the custom_id {line.custom_id!r:.80}, too.",
                    field="custom_id", custom_id=line.custom_id,
                )  # fmt: skip
        except LineError as error:
            yield error
        else:
            known.add(line.custom_id)
            yield line


def _line(number: int, data: bytes | None, urls: Collection[str]) -> BatchLine:
    if data is None:
        raise LineError(number, "line_too_long", f"it is too long; allowed are {MAX_MESSAGE_BYTES} bytes.")
    found = _json(data)
    if not isinstance(found, dict):
        raise LineError(number, "invalid_json_line", "it is no JSON object.")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id is {custom_id!r:.80}; allowed is a text of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise LineError(number, "invalid_custom_id", message, field="custom_id")
    if unknown := sorted(found.keys() - set(_KEYS)):
        message = f"{unknown[0][:80]} is no key of a line; there are {', '.join(_KEYS)}."
        raise LineError(number, "unknown_key", message, field=unknown[0][:80], custom_id=custom_id)
    if found.get("method") != "POST":
        message = f"method is {found.get('method')!r:.80}; allowed is POST."
        raise LineError(number, "invalid_method", message, field="method", custom_id=custom_id)
    url, body = found.get("url"), found.get("body")
    if not isinstance(url, str) or url not in urls:
        message = f"url is {url!r:.80}; allowed is {' or '.join(urls)}."
        raise LineError(number, "invalid_url", message, field="url", custom_id=custom_id)
    if not isinstance(body, dict):
        raise LineError(number, "invalid_body", "body is no object.", field="body", custom_id=custom_id)
    return BatchLine(number=number, custom_id=custom_id, url=url, body=body, num_bytes=len(data))


def answer_line(line: BatchLine, request_id: str, status: int, body: bytes) -> bytes:
    """Returns what is written about a line that a route has answered with this status and JSON."""
    response = {"status_code": status, "request_id": request_id, "body": json.loads(body)}
    answer = {
        "id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": response, "error": None,
    }  # fmt: skip
    return _encoded(answer)


def key_of(answer: Any) -> str | int | None:
    """Returns the line about which something was written: by its custom_id or its number; None if it is no answer."""
    if not isinstance(answer, dict) or not {"custom_id", "response", "error"} <= answer.keys():
        return None
    error = answer["error"]
    key = error.get("line") if isinstance(error, dict) and "line" in error else answer["custom_id"]
    return key if isinstance(key, str | int) else None


def _encoded(answer: dict[str, Any]) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can express
        return json.dumps(answer, separators=(",", ":")).encode() + b"\n"


def _json(data: bytes) -> Any:
    """Returns the JSON of a line, parsed as bodies are; None if it is none."""
    try:
        if json_text.takes_long(data, LONG_BYTES):
            return json_text.parsed_in_pieces(data, _MAX_VALUES)
        return json_text.parsed(data)
    except InvalidRequestError:
        return None
