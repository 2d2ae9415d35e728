"""`/v1/files`: takes files of requests, and gives out those of answers."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ...api.errors import InvalidRequestError
from ...api.tenants import Tenant
from ...server.edge import Edge
from ..api_errors import HttpError
from ..http_call import HttpCall
from .records import Record, Records, TenantRecords, new_id, page, shown

if TYPE_CHECKING:
    from aiohttp import BodyPartReader, web

_MAX_FILE_BYTES = 200 << 20  # OpenAI's limit
_MAX_FILES = 10_000  # of a tenant
_MAX_UPLOADS = 8  # at a time
_MAX_FIELD_BYTES = 1_024
_CHUNK_BYTES = 2**18
_CHUNK_SECONDS = 30.0  # for a client to send another part
_UPLOAD_SECONDS = 1_800.0
MIN_EXPIRY_SECONDS = 3_600


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Where files and batches are kept, and how much of them.

    Attributes:
      directory: Of this server alone.
      max_bytes: Of each tenant's files together.
      seconds: Until a file or batch is removed.
    """

    directory: Path
    max_bytes: int
    seconds: float


class FileRoutes:
    """The routes of one edge."""

    def __init__(self, edge: Edge, records: Records, limits: BatchLimits):
        self._edge, self._records, self._limits = edge, records, limits
        self._uploads = asyncio.Semaphore(_MAX_UPLOADS)

    async def list(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /v1/files`."""
        from aiohttp import web

        files, purpose = self._of(call).files, request.query.get("purpose")
        if purpose is not None:
            files = {name: record for name, record in files.items() if record["purpose"] == purpose}
        return web.json_response(page(files, request.query, most=10_000))

    async def get(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /v1/files/ID`."""
        from aiohttp import web

        return web.json_response(shown(self._of(call).found(id_of(request, "file-"))))

    async def content(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /v1/files/ID/content`."""
        from aiohttp import web

        tenant = self._of(call)
        record = tenant.found(id_of(request, "file-"))
        headers = {"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"}
        return web.FileResponse(tenant.content(record["id"]), headers=headers)

    async def delete(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`DELETE /v1/files/ID`."""
        from aiohttp import web

        tenant = self._of(call)
        record = tenant.found(id_of(request, "file-"))
        if tenant.is_used(record["id"]):
            raise HttpError(409, f"a batch that has not ended uses {record['id']}; cancel it first.")
        await tenant.remove(record)
        return web.json_response({"id": record["id"], "object": "file", "deleted": True})

    async def upload(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /v1/files`: a form with `purpose`, `file`, and perhaps `expires_after`."""
        from aiohttp import web

        tenant = self._of(call)
        if len(tenant.files) >= _MAX_FILES:
            raise HttpError(429, f"there are {len(tenant.files)} files; allowed are {_MAX_FILES}. Remove some.")
        if not request.content_type.startswith("multipart/"):
            raise InvalidRequestError("body", f"is {request.content_type[:80]}; allowed is multipart/form-data.")
        file_id = new_id("file-")
        path = tenant.folder / f"{file_id}.part"
        try:
            async with self._uploads, asyncio.timeout(_UPLOAD_SECONDS):
                record = await self._received(request, tenant, file_id, path)
            await tenant.call(path.replace, tenant.content(file_id))
            await tenant.save(record)
        finally:
            path.unlink(missing_ok=True)
        return web.json_response(shown(record))

    async def _received(self, request: "web.Request", tenant: TenantRecords, file_id: str, path: Path) -> Record:
        fields: dict[str, str] = {}
        name, size = None, 0
        parts = await request.multipart()
        while (part := await _within(parts.next())) is not None:
            if part.name == "file" and name is None:
                name = (part.filename or "file.jsonl")[:255]
                size = await self._write(part, tenant, path)
            elif part.name in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
                fields[part.name] = (await _field(part)).decode(errors="replace")
            else:
                raise InvalidRequestError(str(part.name)[:80], "is no field of this method, or is there twice.")
        if name is None:
            raise InvalidRequestError("file", "is missing.")
        if fields.get("purpose") != "batch":
            raise InvalidRequestError("purpose", f"got {fields.get('purpose')!r:.40}; allowed is batch.")
        anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
        expiry = None if anchor is seconds is None else {"anchor": anchor, "seconds": _whole(seconds)}
        return self.new_record(file_id, name, "batch", size, expiry)

    async def _write(self, part: "BodyPartReader", tenant: TenantRecords, path: Path) -> int:
        """Writes a file as it comes, and returns its size."""
        size, room = 0, self._limits.max_bytes - tenant.num_bytes
        with await asyncio.to_thread(path.open, "xb") as file:
            while chunk := await _within(part.read_chunk(_CHUNK_BYTES)):
                size += len(chunk)
                if size > _MAX_FILE_BYTES:
                    raise HttpError(413, f"the file is too large; allowed are {_MAX_FILE_BYTES} bytes.", field="file")
                if size > room:
                    raise HttpError(
                        413, f"all files together may have {self._limits.max_bytes} bytes (batch_gib). Remove some.",
                        field="file", code="storage_limit_exceeded",
                    )  # fmt: skip
                await asyncio.to_thread(_write_all, file, bytes(chunk))
        return size

    def new_record(self, file_id: str, name: str, purpose: str, size: int, expiry: Any) -> Record:
        """Returns the record of a file. `expiry` is what `expires_after` says, if anything."""
        created = int(time.time())
        removed = created + int(checked_expiry(expiry, self._limits.seconds))
        return {
            "id": file_id, "object": "file", "bytes": size, "created_at": created, "expires_at": removed,
            "filename": name, "purpose": purpose, "status": "processed", "_removed_at": removed,
        }  # fmt: skip

    def _of(self, call: HttpCall) -> TenantRecords:
        tenant: Tenant = self._edge.access.tenant(call.invocation_metadata())
        return self._records.of(tenant.name)


def id_of(request: "web.Request", prefix: str) -> str:
    """Returns the id in a path."""
    found = request.path.split("/")[3]
    if not found.startswith(prefix):
        raise HttpError(404, f"there is no {found[:80]!r}; ids begin with {prefix}", code="not_found")
    return found


def checked_expiry(value: Any, most: float, field: str = "expires_after") -> float:
    """Returns for how many seconds something is kept.

    Raises:
      InvalidRequestError: `value`, in OpenAI's form, is not valid.
    """
    if value is None:
        return most
    if not isinstance(value, dict) or value.get("anchor") != "created_at" or type(value.get("seconds")) is not int:
        raise InvalidRequestError(field, f"got {value!r:.80}; allowed is an anchor, created_at, and seconds.")
    if not MIN_EXPIRY_SECONDS <= value["seconds"] <= most:
        message = f"got {value['seconds']}; allowed is {MIN_EXPIRY_SECONDS} to {most:.0f} (batch_days)."
        raise InvalidRequestError(f"{field}.seconds", message)
    return float(value["seconds"])


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 12 else None


async def _field(part: "BodyPartReader") -> bytes:
    data = b""
    while chunk := await _within(part.read_chunk(_MAX_FIELD_BYTES)):
        data += chunk
        if len(data) > _MAX_FIELD_BYTES:
            raise InvalidRequestError(str(part.name)[:80], "is too long.")
    return data


async def _within(awaitable: Any) -> Any:
    async with asyncio.timeout(_CHUNK_SECONDS):
        return await awaitable
