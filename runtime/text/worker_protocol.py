"""How the server and the processes of limited work talk to each other; see `worker_template`."""

import json
import socket
import struct
from typing import Any

# Between the server and the template: operation, token of the worker, and an operand. FORK comes with two descriptors,
# the worker's socket and its shared memory; its operand is the memory limit in bytes. PING is answered with PONG.
CONTROL = struct.Struct("<cqq")
READY, FORK, SIGNAL, RENICE, EXITED, PING, PONG = b"R", b"F", b"S", b"N", b"X", b"P", b"A"
LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 64 << 20
# Start of the shared memory: one more than the row that the worker is busy with, 0 between rows; its process id; and
# the processor time in nanoseconds that it had used when it began with the present message.
PROGRESS = struct.Struct("<qqq")
HEADER_BYTES = 4096

# How a row of an answer stands.
MAY_END, IS_COMPLETE, MUST_END, IS_REFUSED, HAS_FAILED = 1, 2, 4, 8, 16


def receive(connection: socket.socket) -> Any:
    """Returns the next message.

    Raises:
      EOFError: The other side is gone, or the message makes no sense.
      OSError: As of the socket.
    """
    data = bytearray()
    num_bytes = LENGTH.size
    while len(data) < num_bytes:
        chunk = connection.recv(max(num_bytes - len(data), 65_536))
        if not chunk:
            raise EOFError("the other side is gone")
        data += chunk
        if len(data) >= LENGTH.size:
            num_bytes = LENGTH.size + LENGTH.unpack_from(data)[0]
            if num_bytes > _MAX_MESSAGE_BYTES:
                raise EOFError(f"a message has {num_bytes} bytes")
    try:
        return json.loads(data[LENGTH.size : num_bytes])
    except (ValueError, RecursionError) as error:
        raise EOFError(f"a message makes no sense: {error}") from None


def is_answer(message: Any) -> bool:
    """Returns whether a message is a worker's answer. A worker whose memory is corrupted may send anything."""
    return (
        isinstance(message, dict)
        and all(isinstance(message.get(name), float) for name in ("seconds", "mask_seconds"))
        and all(isinstance(message.get(name), list) for name in ("rows", "slow"))
        and all(isinstance(row, list) and list(map(type, row)) == [int, str] for row in message["rows"])
        and all(isinstance(row, list) and list(map(type, row)) == [int, float] for row in message["slow"])
        and isinstance(message.get("ahead"), list)
        and all(isinstance(states, list) and set(map(type, states)) <= {int} for states in message["ahead"])
    )


def encoded(message: Any) -> bytes:
    """Returns a message as it is sent."""
    data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data
