"""`/v1/batches`: takes files of requests that are answered when the server has time."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...api.errors import InvalidRequestError
from ...server.edge import Edge
from ..api_errors import HttpError
from ..fields import Field, Kind, checked_body, honoured, neutral, required
from ..http_call import HttpCall
from ..routes import Route, line_routes
from .batch_jobs import BatchJobs
from .file_routes import BatchLimits, FileRoutes, checked_expiry, id_of
from .records import Record, Records, TenantRecords, new_id, page, shown

if TYPE_CHECKING:
    from aiohttp import web

_MAX_UNFINISHED = 100  # batches of a tenant
_WINDOW_SECONDS = 24 * 3_600
BATCHES: dict[str, Field] = {
    "input_file_id": honoured(Kind.TEXT),
    "endpoint": honoured(Kind.TEXT, "the url of all lines"),
    "completion_window": honoured(Kind.TEXT, "24h"),
    "metadata": neutral("is returned with the batch"),
    "output_expires_after": honoured(Kind.OBJECT, "anchor created_at, seconds"),
}


class BatchRoutes:
    """Files and batches of one edge.

    Raises:
      ConfigError: The directory cannot be used; see `Records`.
    """

    def __init__(self, edge: Edge, limits: BatchLimits):
        self._edge, self._limits = edge, limits
        self._endpoints = line_routes(edge)
        self._records = Records(limits.directory)
        self._files = FileRoutes(edge, self._records, limits)
        self._jobs = BatchJobs(edge, self._endpoints, self._records, self._files)

    def routes(self) -> Mapping[str, Route]:
        """Returns what answers, by path; with a method before it, that of this method."""

        def route(answer: Any, method: str = "GET", *, reads_body: bool = False) -> Route:
            return Route(method=method, like="Generate", answer=answer, reads_body=reads_body)

        files = self._files
        return {
            "/v1/files": route(files.list),
            "POST /v1/files": route(files.upload, "POST", reads_body=True),
            "/v1/files/ID": route(files.get),
            "DELETE /v1/files/ID": route(files.delete, "DELETE"),
            "/v1/files/ID/content": route(files.content),
            "/v1/batches": route(self.list),
            "POST /v1/batches": route(self.create, "POST"),
            "/v1/batches/ID": route(self.get),
            "/v1/batches/ID/cancel": route(self.cancel, "POST", reads_body=True),
        }

    def start(self) -> None:
        """Goes on with the batches that an earlier server has left."""
        self._jobs.start()

    async def stop(self) -> None:
        """Ends what runs; another server goes on with it."""
        await self._jobs.stop()
        self._records.close()

    async def list(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /v1/batches`."""
        from aiohttp import web

        return web.json_response(page(self._of(call)[1].batches, request.query, most=20))

    async def get(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /v1/batches/ID`."""
        from aiohttp import web

        return web.json_response(shown(self._of(call)[1].found(id_of(request, "batch_"))))

    async def cancel(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /v1/batches/ID/cancel`."""
        from aiohttp import web

        _, tenant = self._of(call)
        batch = tenant.found(id_of(request, "batch_"))
        if batch["status"] not in ("validating", "in_progress", "cancelling"):
            raise HttpError(409, f"{batch['id']} is {batch['status']} and cannot be cancelled.")
        if batch["status"] != "cancelling":
            await self._jobs.cancel(tenant, batch)
        return web.json_response(shown(batch))

    async def create(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /v1/batches`."""
        from aiohttp import web

        name, tenant = self._of(call)
        batch = self._new(checked_body(body, BATCHES), body, tenant)
        await tenant.save(batch)
        self._jobs.begin(name)
        return web.json_response(shown(batch))

    def _new(self, fields: Mapping[str, Any], body: Any, tenant: TenantRecords) -> Record:
        file_id, endpoint = required(fields, "input_file_id"), required(fields, "endpoint")
        if file_id not in tenant.files or tenant.files[file_id]["purpose"] != "batch":
            raise InvalidRequestError("input_file_id", f"there is no file {file_id!r:.80} with the purpose batch.")
        if endpoint not in self._endpoints:
            raise InvalidRequestError("endpoint", f"got {endpoint!r:.80}; allowed are {', '.join(self._endpoints)}.")
        if required(fields, "completion_window") != "24h":
            raise InvalidRequestError("completion_window", f"got {fields['completion_window']!r:.40}; allowed is 24h.")
        if len(list(tenant.unfinished())) >= _MAX_UNFINISHED:
            raise HttpError(429, f"{_MAX_UNFINISHED} batches have not ended; wait for some of them.")
        expiry, metadata = fields.get("output_expires_after"), fields.get("metadata")
        checked_expiry(expiry, self._limits.seconds, "output_expires_after")
        if metadata is not None and not _is_metadata(metadata):
            raise InvalidRequestError("metadata", "has up to 16 texts of up to 512 characters.")
        created = int(time.time())
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": new_id("batch_"), "object": "batch", "endpoint": endpoint, "errors": None, "input_file_id": file_id,
            "completion_window": "24h", "status": "validating", "output_file_id": None, "error_file_id": None,
            "created_at": created, "expires_at": created + _WINDOW_SECONDS, **{f"{each}_at": None for each in times},
            "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": metadata,
            "_removed_at": created + int(self._limits.seconds) + _WINDOW_SECONDS, "_output_expires_after": expiry,
        }  # fmt: skip

    def _of(self, call: HttpCall) -> tuple[str, TenantRecords]:
        name = self._edge.access.tenant(call.invocation_metadata()).name
        return name, self._records.of(name)


def _is_metadata(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > 16:
        return False
    return all(isinstance(text, str) and len(text) <= 512 for pair in value.items() for text in pair)
