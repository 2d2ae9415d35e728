"""What is kept on disk of files and batches: a JSON record for each, in a folder of its tenant.

    DIRECTORY/tenant-NAME/file-ID.json        a file as `GET /v1/files/ID` shows it
    DIRECTORY/tenant-NAME/file-ID.jsonl       its content
    DIRECTORY/tenant-NAME/batch_ID.json       a batch as `GET /v1/batches/ID` shows it

The records are read once, when the server starts, and then kept in memory beside the disk. One server uses a directory
at a time.
"""

import asyncio
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...api.errors import ConfigError
from ..api_errors import HttpError

_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_PREFIX = "tenant-"
_MAX_RECORD_BYTES = 2**20
UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_log = logging.getLogger(__name__)

Record = dict[str, Any]


@dataclass
class TenantRecords:
    """The records of a tenant, by id, oldest first."""

    folder: Path
    thread: ThreadPoolExecutor
    files: dict[str, Record] = field(default_factory=dict)
    batches: dict[str, Record] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The sizes of its files together."""
        return sum(record["bytes"] for record in self.files.values())

    def content(self, file_id: str) -> Path:
        """Returns the path of the content of a file, which may not exist."""
        return self.folder / f"{file_id}.jsonl"

    def found(self, record_id: str) -> Record:
        """Returns a file or batch.

        Raises:
          HttpError: The tenant has none with this id.
        """
        record = self.files.get(record_id) or self.batches.get(record_id)
        if record is None:
            raise HttpError(404, f"there is no {record_id[:80]!r}; it may have expired.", code="not_found")
        return record

    async def save(self, record: Record) -> None:
        """Adds or replaces a record."""
        records = self.files if record["object"] == "file" else self.batches
        records[record["id"]] = record
        await self.call(_write, self.folder / f"{record['id']}.json", json.dumps(record))

    async def remove(self, record: Record) -> None:
        """Removes a record, and its content."""
        records = self.files if record["object"] == "file" else self.batches
        records.pop(record["id"], None)
        for path in (self.folder / f"{record['id']}.json", self.content(record["id"])):
            await self.call(_unlink, path)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that uses the disk: in the one thread that does, so that later changes come later."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    def unfinished(self) -> Iterator[Record]:
        """Yields the batches that have not ended, oldest first."""
        return (record for record in list(self.batches.values()) if record["status"] in UNFINISHED)

    def is_used(self, file_id: str) -> bool:
        """Returns whether a batch that has not ended reads or writes a file."""
        keys = ("input_file_id", "_output", "_error")
        return any(file_id in [batch.get(key) for key in keys] for batch in self.unfinished())


class Records:
    """All records in a directory.

    Raises:
      ConfigError: The directory cannot be used, others may write to it, or another server uses it.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "batch records")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.stat()
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(
                    f"batch_dir {directory} must belong to this server's user, and be closed to all others: it has "
                    f"what callers have sent. Run chmod 700 {directory}, or name another directory."
                )
            self._lock = (directory / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another server uses batch_dir {directory}. Name another directory.") from None
        except OSError as error:
            raise ConfigError(f"batch_dir {directory} cannot be used: {error}. Name another directory.") from None
        self.tenants: dict[str, TenantRecords] = {}
        for folder in sorted(directory.glob(f"{_PREFIX}*")):
            self.tenants[folder.name.removeprefix(_PREFIX)] = _read(folder, self._thread)

    def of(self, tenant: str) -> TenantRecords:
        """Returns the records of a tenant."""
        found = self.tenants.get(tenant)
        if found is None:
            folder = self._directory / f"{_PREFIX}{tenant}"
            folder.mkdir(mode=0o700, exist_ok=True)
            found = self.tenants[tenant] = TenantRecords(folder, self._thread)
        return found

    def close(self) -> None:
        """Lets another server use the directory."""
        self._thread.shutdown()
        self._lock.close()


def new_id(prefix: str) -> str:
    """Returns an id for a record."""
    return f"{prefix}{secrets.token_hex(12)}"


def is_expired(record: Record) -> bool:
    """Returns whether a record is to be removed."""
    return record["_removed_at"] <= time.time()


def shown(record: Record) -> Record:
    """Returns a record as callers see it."""
    return {name: value for name, value in record.items() if not name.startswith("_")}


def page(records: dict[str, Record], query: Any, *, most: int) -> Record:
    """Returns a part of a list of records, the newest first unless the query asks for another order.

    Raises:
      HttpError: The query is not valid.
    """
    limit, after, order = query.get("limit", str(most)), query.get("after"), query.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit) <= 10_000:
        raise HttpError(400, f"limit is {limit!r:.40}; allowed is 1 to 10000.", field="limit")
    if order not in ("asc", "desc"):
        raise HttpError(400, f"order is {order!r:.40}; allowed are asc and desc.", field="order")
    found = list(records.values()) if order == "asc" else list(records.values())[::-1]
    ids = [record["id"] for record in found]
    if after is not None:
        if after not in ids:
            raise HttpError(400, f"after is {after!r:.80}, which is not in the list.", field="after")
        found = found[ids.index(after) + 1 :]
    part = [shown(record) for record in found[: int(limit)]]
    return {
        "object": "list", "data": part, "first_id": part[0]["id"] if part else None,
        "last_id": part[-1]["id"] if part else None, "has_more": len(part) < len(found),
    }  # fmt: skip


def _read(folder: Path, thread: ThreadPoolExecutor) -> TenantRecords:
    """Returns the records in a folder. What belongs to none of them, such as a part of an upload, is removed."""
    found = TenantRecords(folder, thread)
    records = []
    for path in folder.glob("*.json"):
        try:
            record = json.loads(path.read_bytes()[:_MAX_RECORD_BYTES])
            if not _ID.fullmatch(path.stem) or record["id"] != path.stem:
                raise ValueError("it has another id")
        except (ValueError, KeyError, TypeError) as error:
            _log.error("%s is left out: %s", path, error)
        else:
            records.append(record)
    for record in sorted(records, key=lambda each: (each["created_at"], each["id"])):
        (found.files if record["object"] == "file" else found.batches)[record["id"]] = record
    for path in [*folder.glob("*.jsonl"), *folder.glob("*.part"), *folder.glob("*.new")]:
        if path.suffix != ".jsonl" or (path.stem not in found.files and not found.is_used(path.stem)):
            path.unlink(missing_ok=True)
    return found


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
