"""Runs the batches of each tenant one after the other, with what other requests leave of the server."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from meshserve.protos import inference_pb2 as pb

from ...api.errors import EngineStoppedError, MeshserveError, UnauthenticatedError
from ...api.request import MAX_PRIORITY
from ...server.edge import Edge
from ...text.work_pool import Paced, WorkPool
from ..bodies import Apart
from ..http_call import HttpCall
from ..routes import Route
from .answer_file import AnswerFile
from .batch_lines import LONG_BYTES
from .batch_run import BatchCounts, BatchRun, num_lines
from .file_routes import FileRoutes
from .records import UNFINISHED, Record, Records, TenantRecords, is_expired, new_id

MAX_LINES = 50_000  # OpenAI's limit
_MAX_OPEN = 256
_MAX_WAITING = 4  # requests in the queue beside which no other line is begun
_POLL_SECONDS = 0.05
_SWEEP_SECONDS = 1.0
_SHARE = 0.2  # of the time, for long lines
_log = logging.getLogger(__name__)


class BatchJobs:
    """The batches that have not ended. All methods run on the event loop, but for what the supervisor calls.

    Args:
      edge: The edge.
      routes: What answers lines, by path.
      records: Where batches and files are kept.
      files: Makes the records of files of answers.
    """

    def __init__(self, edge: Edge, routes: Mapping[str, Route], records: Records, files: FileRoutes):
        self._edge, self._routes, self._records, self._files = edge, routes, records, files
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by tenant
        self._running: dict[str, asyncio.Task[None]] = {}  # by batch
        self._is_stopping = False
        self._pool = WorkPool("long lines of batches", num_threads=1, max_calls=1_024, max_size=2**34)
        self._paced = Paced(_SHARE)

    def start(self) -> None:
        """Goes on with the batches that an earlier server has left, once the server is ready."""
        sweep = partial(self._sweep, asyncio.get_running_loop())
        self._edge.supervisor.every(_SWEEP_SECONDS, "batches", sweep)

    async def stop(self) -> None:
        """Ends what runs. Another server goes on with it."""
        self._is_stopping = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def begin(self, tenant: str) -> None:
        """Sees to it that the batches of a tenant are run, and that what has expired is removed."""
        task = self._tasks.get(tenant)
        if (task is None or task.done()) and not self._is_stopping:
            self._tasks[tenant] = asyncio.create_task(self._run_all(tenant))

    async def cancel(self, tenant: TenantRecords, batch: Record) -> None:
        """Ends a batch. What has been answered is kept."""
        batch["status"], batch["cancelling_at"] = "cancelling", int(time.time())
        await tenant.save(batch)
        if (task := self._running.get(batch["id"])) is not None:
            task.cancel()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins what is left to do, in a thread of the supervisor."""
        if self._edge.state == pb.SERVER_STATE_STARTING or self._is_stopping:
            return
        for name, tenant in list(self._records.tenants.items()):
            if any(tenant.unfinished()) or any(_expired(tenant)):
                loop.call_soon_threadsafe(self.begin, name)

    async def _run_all(self, name: str) -> None:
        try:
            await self._run_each(name)
        except Exception:  # of the disk, say: the next sweep tries again
            _log.exception("the batches of %s are interrupted", name)

    async def _run_each(self, name: str) -> None:
        tenant = self._records.of(name)
        for record in [*_expired(tenant)]:
            await tenant.remove(record)
        while (batch := next(tenant.unfinished(), None)) is not None:
            task = self._running[batch["id"]] = asyncio.create_task(self._run(name, tenant, batch))
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait([task])
                raise
            finally:
                del self._running[batch["id"]]
            if task.cancelled():  # by `cancel`
                await self._finish(tenant, batch, "cancelled")
            elif (error := task.exception()) is not None:
                if isinstance(error, EngineStoppedError | UnauthenticatedError):
                    return  # the next sweep, or server, tries again
                await self._fail(tenant, batch, error)

    async def _run(self, name: str, tenant: TenantRecords, batch: Record) -> None:
        """Answers the lines of a batch that have no answer yet."""
        if batch["status"] == "cancelling":
            return await self._finish(tenant, batch, "cancelled")
        source, batch_id = tenant.content(batch["input_file_id"]), batch["id"]
        if batch["status"] == "validating":
            total = await asyncio.to_thread(num_lines, source)
            if not 1 <= total <= MAX_LINES:
                raise MeshserveError(f"the file has {total} lines; allowed are 1 to {MAX_LINES}.")
            batch |= {"status": "in_progress", "in_progress_at": int(time.time()), "_output": new_id("file-")}
            batch |= {"_error": new_id("file-")}
            await tenant.save(batch)
        answers = await asyncio.to_thread(AnswerFile, tenant.content(batch["_output"]))
        with answers, await asyncio.to_thread(AnswerFile, tenant.content(batch["_error"])) as errors:
            limits = self._edge.access.named(name)
            most = _MAX_OPEN if limits.max_requests is None else max(1, limits.max_requests // 2)
            run = BatchRun(
                {batch["endpoint"]: self._routes[batch["endpoint"]]}, partial(self._call, name), answers, errors,
                max_open=most, before=self._room, defaults={"priority": -MAX_PRIORITY},
                on_answer=lambda counts: batch.update(request_counts=_counts(counts)),
            )  # fmt: skip
            status = "completed"
            try:
                async with asyncio.timeout(batch["expires_at"] - time.time()):
                    await run.run(source)
            except TimeoutError:
                status = "expired"
                await run.give_up(source, "batch_expired", "it was not answered in time.")
            batch["request_counts"] = _counts(run.counts)
        _log.info("batch %s %s: %s", batch_id, status, batch["request_counts"])
        await self._finish(tenant, batch, status)

    def _call(self, name: str, num_bytes: int) -> HttpCall:
        """Returns the call of a line. What takes long for a long line is done in a thread, as for bodies."""
        call = HttpCall({}, on_behalf_of=name)
        if num_bytes > LONG_BYTES:
            call.apart = Apart(self._pool, self._paced, name, num_bytes)
        return call

    async def _room(self) -> None:
        """Waits until few requests wait, so that the lines of batches keep nobody from the queue."""
        while True:
            backend, _ = self._edge.serving()
            if backend.engine.load().num_waiting < _MAX_WAITING:
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _finish(self, tenant: TenantRecords, batch: Record, status: str) -> None:
        """Ends a batch, whose answers become files."""
        batch |= {"status": "finalizing", "finalizing_at": int(time.time())} if status == "completed" else {}
        for key, kept, shown_as in (("_output", "output", "output_file_id"), ("_error", "error", "error_file_id")):
            if (file_id := batch.get(key)) is None:
                continue
            path = tenant.content(file_id)
            size = await asyncio.to_thread(_size, path)
            if size:
                expiry = batch["_output_expires_after"]
                record = self._files.new_record(file_id, f"{batch['id']}_{kept}.jsonl", "batch_output", size, expiry)
                await tenant.save(record)
                batch[shown_as] = file_id
        batch |= {"status": status, f"{status}_at": int(time.time())}
        await tenant.save(batch)

    async def _fail(self, tenant: TenantRecords, batch: Record, error: BaseException) -> None:
        message = str(error)
        if not isinstance(error, MeshserveError | OSError):
            _log.error("batch %s failed", batch["id"], exc_info=error)
            message = f"internal error ({type(error).__name__}); the server's log has the details"
        found = {"code": "batch_failed", "message": message, "param": None, "line": None}
        batch["errors"] = {"object": "list", "data": [found]}
        await self._finish(tenant, batch, "failed")


def _counts(counts: BatchCounts) -> dict[str, int]:
    return {"total": counts.total, "completed": counts.completed, "failed": counts.failed}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _expired(tenant: TenantRecords) -> Iterator[Record]:
    """Yields what is to be removed."""
    for record in [*tenant.files.values(), *tenant.batches.values()]:
        if is_expired(record) and not tenant.is_used(record["id"]) and record["status"] not in UNFINISHED:
            yield record
