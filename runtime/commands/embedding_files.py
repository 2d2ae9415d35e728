"""The files of `meshserve embed`: texts that are read as a stream, and results that survive a kill.

Results are appended to OUTPUT.partial in the order of the input, beside OUTPUT.partial.json, which says what they are
results of. A run that finds both continues after the last whole line or row; the last run gives the file its name.
"""

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from ..api.errors import ConfigError, MeshserveError

_BLOCK_BYTES = 2**22
_ROWS_PER_BATCH = 1_024  # in a Parquet file that is being written


class Text(NamedTuple):
    """One line of the input: a text, or its token ids."""

    number: int  # the line's number, from 1
    content: str | tuple[int, ...]
    given_id: Any = None  # copied to the output


class InputSummary(NamedTuple):
    """What a first pass over the input has found."""

    path: Path
    num_texts: int
    sha256: str


def inspect(path: Path) -> InputSummary:
    """Counts the texts of a file.

    Raises:
      MeshserveError: The file cannot be read.
    """
    digest, num_texts = hashlib.sha256(), 0
    with _reading(path) as file:
        for line in file:
            digest.update(line)
            num_texts += bool(line.strip())
    return InputSummary(path, num_texts, digest.hexdigest())


def read_texts(source: InputSummary, first: int) -> Iterator[Text]:
    """Yields the texts from index `first` on, a line at a time. Each line of a .txt file is a text.

    Other files are JSONL: each line is an object with `text` or `token_ids`, and optionally `id`, which may be any
    value and is copied to a JSONL output. Blank lines are skipped.

    Raises:
      MeshserveError: The file cannot be read, or a line is invalid. The message gives the line number.
    """
    is_plain = source.path.suffix == ".txt"
    with _reading(source.path) as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        for number, line in itertools.islice(lines, first, None):
            try:
                text = line.decode("utf-8")
                yield Text(number, text.rstrip("\r\n")) if is_plain else _text(number, json.loads(text))
            except (ValueError, RecursionError) as error:
                raise MeshserveError(f"--input {source.path}, line {number}: {error}") from None


def _text(number: int, raw: Any) -> Text:
    if not isinstance(raw, dict):
        raise ValueError(f"got {type(raw).__name__}; each line must be a JSON object.")
    unknown = sorted(raw.keys() - {"text", "token_ids", "id"})
    if unknown:
        raise ValueError(f"unknown fields {', '.join(unknown)}; allowed are text, token_ids, id.")
    text, token_ids = raw.get("text"), raw.get("token_ids")
    if (text is None) == (token_ids is None):
        raise ValueError("give exactly one of text and token_ids.")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"text is {text!r}; it must be a string.")
    if token_ids is not None and not (isinstance(token_ids, list) and all(type(item) is int for item in token_ids)):
        raise ValueError("token_ids must be a list of integers.")
    return Text(number, text if text is not None else tuple(token_ids or ()), raw.get("id"))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise MeshserveError(f"--input {path} cannot be read: {error.strerror}.") from None


class Result(NamedTuple):
    """The embedding of a text, or why there is none."""

    place: int  # the text's index in the input
    text: Text
    embedding: np.ndarray | None  # [dimensions] float32
    num_tokens: int = 0
    error: str = ""


class Form(Protocol):
    """How results are written."""

    def head(self) -> bytes:
        """Returns what the file begins with."""

    def encoded(self, results: Sequence[Result]) -> bytes:
        """Returns the bytes of some results."""

    def whole(self, file: IO[bytes], end: int) -> tuple[int, int]:
        """Returns how many whole results follow the head in a file of `end` bytes, and where they end."""

    def finish(self, partial: Path, target: Path) -> None:
        """Makes `target` of the complete file."""


class Lines:
    """JSONL: index, the text's id if it has one, embedding and num_tokens, or error."""

    def head(self) -> bytes:
        return b""

    def encoded(self, results: Sequence[Result]) -> bytes:
        """See `Form`. Nine digits identify a float32."""
        lines = io.StringIO()
        for result in results:
            named = {} if result.text.given_id is None else {"id": result.text.given_id}
            line = json.dumps({"index": result.place, **named, "num_tokens": result.num_tokens}, ensure_ascii=False)
            if result.embedding is None:
                line = line[:-1] + f', "error": {json.dumps(result.error, ensure_ascii=False)}}}'
            else:
                line = line[:-1] + f', "embedding": [{", ".join(map("%.9g".__mod__, result.embedding.tolist()))}]}}'
            lines.write(line + "\n")
        return lines.getvalue().encode()

    def whole(self, file: IO[bytes], end: int) -> tuple[int, int]:
        """See `Form`."""
        num_lines = place = last = 0
        while block := file.read(_BLOCK_BYTES):
            num_lines += block.count(b"\n")
            if (found := block.rfind(b"\n")) >= 0:
                last = place + found + 1
            place += len(block)
        return num_lines, last

    def finish(self, partial: Path, target: Path) -> None:
        os.replace(partial, target)


class Rows:
    """An array file (.npy) of float32 [texts, dimensions]. Texts without an embedding have a row of NaN."""

    def __init__(self, num_texts: int, dimensions: int):
        self._shape = num_texts, dimensions
        self._row_bytes = 4 * dimensions

    def head(self) -> bytes:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": self._shape})
        return head.getvalue()

    def encoded(self, results: Sequence[Result]) -> bytes:
        missing = np.full(self._shape[1], np.nan, "<f4")
        rows = [missing if result.embedding is None else result.embedding for result in results]
        return np.stack(rows).astype("<f4").tobytes()

    def whole(self, file: IO[bytes], end: int) -> tuple[int, int]:
        """See `Form`."""
        head = len(self.head())
        num_rows = max(0, end - head) // self._row_bytes
        return num_rows, head + num_rows * self._row_bytes

    def finish(self, partial: Path, target: Path) -> None:
        os.replace(partial, target)


class ParquetRows(Rows):
    """A Parquet file with the columns index and embedding, which is made of an array file at the end.

    Raises:
      ConfigError: pyarrow is not installed.
    """

    def __init__(self, num_texts: int, dimensions: int):
        super().__init__(num_texts, dimensions)
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise ConfigError(
                "--output with .parquet needs meshserve with the extra [parquet]. Install it, or write .npy or .jsonl."
            ) from None

    def finish(self, partial: Path, target: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        rows = np.load(partial, mmap_mode="r")
        kind = pyarrow.list_(pyarrow.float32(), self._shape[1])
        schema = pyarrow.schema([("index", pyarrow.int64()), ("embedding", kind)])
        unfinished = target.with_name(target.name + ".tmp")
        with parquet.ParquetWriter(unfinished, schema) as writer:
            for first in range(0, len(rows), _ROWS_PER_BATCH):
                part = np.array(rows[first : first + _ROWS_PER_BATCH])
                values = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.reshape(-1)), self._shape[1])
                index = pyarrow.array(np.arange(first, first + len(part)))
                writer.write_batch(pyarrow.record_batch([index, values], schema=schema))
        os.replace(unfinished, target)
        partial.unlink()


def form_of(target: Path, num_texts: int, dimensions: int) -> Form:
    """Returns the form that the name of the output asks for.

    Raises:
      ConfigError: The form is not known, or its library is missing.
    """
    if target.suffix in (".jsonl", ".json", ".ndjson"):
        return Lines()
    if target.suffix in (".npy", ".parquet"):
        return (Rows if target.suffix == ".npy" else ParquetRows)(num_texts, dimensions)
    raise ConfigError(f"--output {target}: the name must end in .jsonl, .npy or .parquet, which decides the format.")


class ResumableFile:
    """Appends results to the partial file of an output. Use as a context manager.

    Args:
      target: The output.
      form: The form of the output.
      settings: What the results depend on; a run continues another one only if they are equal.

    Raises:
      MeshserveError: The output cannot be written, another process writes it, or it was begun with other settings.
    """

    def __init__(self, target: Path, form: Form, settings: Mapping[str, Any]):
        self._target, self._form, self._settings = target, form, dict(settings)
        self._partial = target.with_name(target.name + ".partial")
        self._settings_file = target.with_name(target.name + ".partial.json")
        with self._writing():
            self._file = self._partial.open("a+b")
            try:
                self.num_done = self._resume()  # results that earlier runs have written
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def append(self, results: Sequence[Result]) -> None:
        """Writes results, the next ones in order, so that they survive the end of this process."""
        with self._writing():
            self._file.write(self._form.encoded(results))
            self._file.flush()

    def finish(self) -> None:
        """Gives the complete file its name."""
        with self._writing():
            self._file.close()
            self._form.finish(self._partial, self._target)
            self._settings_file.unlink()

    def _resume(self) -> int:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeshserveError(f"{self._partial} is being written by another process. Wait until it ends.") from None
        end, head = self._file.seek(0, os.SEEK_END), self._form.head()
        if not end:
            self._settings_file.write_text(json.dumps(self._settings, indent=1) + "\n", encoding="utf-8")
        self._check_settings()
        num_done, whole = 0, 0
        if end >= len(head):
            self._file.seek(0)
            num_done, whole = self._form.whole(self._file, end)
        self._file.truncate(whole)
        if whole < len(head):
            self._file.truncate(0)
            self._file.write(head)
            self._file.flush()
        return num_done

    def _check_settings(self) -> None:
        try:
            begun = json.loads(self._settings_file.read_text(encoding="utf-8"))
            changed = [name for name in self._settings if begun.get(name) != self._settings[name]]
        except (OSError, ValueError, AttributeError):
            raise MeshserveError(
                f"{self._partial} exists, but {self._settings_file} does not say what it holds. Delete both to begin "
                "anew."
            ) from None
        if changed:
            differences = ", ".join(f"{name} {begun.get(name)!r} (now {self._settings[name]!r})" for name in changed)
            raise MeshserveError(
                f"{self._partial} was begun with {differences}. Repeat the command with the same input and options to "
                "continue, or delete the file to begin anew."
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MeshserveError(f"--output {self._target} cannot be written: {error.strerror}.") from None
