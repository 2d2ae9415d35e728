"""How the HTTP port ends; `test_rpcs.py` asks it things."""

import asyncio
import logging

from meshserve.runtime.telemetry.probe_server import HttpPort


def test_a_connection_that_has_not_asked_yet_ends_with_the_port_and_without_a_trace(caplog):
    async def serve_and_stop() -> bytes:
        port = HttpPort({"/livez": lambda: (200, "ok\n")})
        await port.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(b"GET /li")
        await asyncio.sleep(0.05)  # the port has it
        await port.stop()
        try:
            return await asyncio.wait_for(reader.read(), timeout=2)  # less than the port's own patience
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(serve_and_stop()) == b""
    assert caplog.records == []
