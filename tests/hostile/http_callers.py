"""Callers who send the requests of `http_floods` again and again."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from tests.hostile.http_floods import CLOSED, PIECE_BYTES, HttpFlood, Sizes
from tests.hostile.served import Served


@contextlib.asynccontextmanager
async def http_flooding(served: Served, flood: HttpFlood, sizes: Sizes) -> AsyncIterator[Counter[int]]:
    """Keeps a flood going while the block runs. Yields the counts of how the requests have ended, which go on."""
    ends: Counter[int] = Counter()
    is_over = asyncio.Event()
    host, port = (served.probes if flood.is_probe else served.openai).split(":")

    async def caller() -> None:
        while not is_over.is_set():
            await _connection(host, int(port), flood, sizes, ends, is_over)

    async def until_over() -> None:
        """Callers whose requests are in progress leave when the flood is over."""
        work, over = asyncio.create_task(caller()), asyncio.create_task(is_over.wait())
        await asyncio.wait([work, over], return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        over.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    callers = [asyncio.create_task(until_over()) for _ in range(min(flood.num_callers, sizes.most_callers))]
    try:
        yield ends
    finally:
        is_over.set()
        await asyncio.gather(*callers)


async def _connection(
    host: str, port: int, flood: HttpFlood, sizes: Sizes, ends: Counter[int], is_over: asyncio.Event
) -> None:
    """Makes requests over one connection, until the server or the flood ends it."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        ends[CLOSED] += 1
        return
    writer.transport.set_write_buffer_limits(PIECE_BYTES)
    try:
        while True:
            sending = asyncio.create_task(_send(writer, flood, sizes))
            try:
                status = await _status(reader, writer, flood, sending, is_over)
            except OSError:
                status = CLOSED
            finally:
                sending.cancel()
                await asyncio.wait([sending])
            ends[status] += 1
            assert status in flood.statuses, (status, flood.path)
            if not flood.is_kept or status == CLOSED or is_over.is_set():
                return
    finally:
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, flood: HttpFlood, sizes: Sizes) -> None:
    with contextlib.suppress(OSError):
        for piece in flood.pieces(sizes):
            writer.write(piece)
            await writer.drain()


async def _status(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flood: HttpFlood, sending: asyncio.Task[None],
    is_over: asyncio.Event,
) -> int:  # fmt: skip
    """Reads an answer as far as the flood does. Returns its status, CLOSED if there was none."""
    if flood.num_bytes == 0:
        await asyncio.wait([sending], timeout=None if flood.leaves else 1.0)  # the server may not read on
        if not flood.leaves:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await is_over.wait()
        return CLOSED
    status, length, num_bytes = CLOSED, None, 0
    async for line in _lines(reader):
        num_bytes += len(line)
        if line.startswith(b"HTTP/1.") and (status in (CLOSED, 100)):
            status = int(line.split()[1])
        elif line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
        elif line == b"\r\n" and status != 100:
            break
    if flood.num_bytes is not None:
        while num_bytes < flood.num_bytes and (piece := await reader.read(1000)):
            num_bytes += len(piece)
    elif length is not None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(length)
    else:
        while await reader.read(PIECE_BYTES):
            if is_over.is_set():
                break
    return status


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line
