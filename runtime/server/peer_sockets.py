"""The sockets of a gRPC server, found among the descriptors of this process, since gRPC gives no access to them."""

import contextlib
import ipaddress
import os
import socket
import stat
import struct
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from .packet_filter import Network

_DESCRIPTORS = Path("/proc/self/fd")
_DISCARD_BYTES = 1 << 20
_OPEN = (1, 8)  # states of a connection in Linux that is not closed at this end: established, and closed by the peer
_V6_BITS = 64  # of an address that tell callers apart; who has one can use all that begin like it


def connections(port: int) -> Iterator[tuple[socket.socket, str]]:
    """Yields the open connections of a local port with their peers, as gRPC names them. None outside of Linux."""
    for found in _sockets(port):
        with contextlib.suppress(OSError):  # it listens, or the caller has just closed it
            yield found, peer_name(found.getpeername())


def listeners(port: int) -> Iterator[socket.socket]:
    """Yields the sockets that listen on a local port. None outside of Linux."""
    for found in _sockets(port):
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield found


def close(connection: socket.socket) -> bool:
    """Closes a connection, whoever else has its descriptor. Returns whether it was open.

    What has been received and not read is discarded: gRPC would still make calls of it.
    """
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _OPEN:
        return False
    try:
        # With a reset once gRPC closes it: the system would keep it for a minute, as long as there is more to come.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        while connection.recv(_DISCARD_BYTES, socket.MSG_TRUNC | socket.MSG_DONTWAIT):
            pass
    except OSError:  # closed meanwhile
        return False
    return True


def peer_name(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Returns a peer's name as `context.peer()` has it."""
    host, port = address[:2]
    if host.startswith("::ffff:") and "." in host:
        host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def network_of(peer: str) -> Network | None:
    """Returns the address of a peer, given its name, or the network if it is one of IPv6. None: it has no address."""
    host = urllib.parse.unquote(peer.rpartition(":")[0].partition(":")[2]).strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return ipaddress.ip_network((address, _V6_BITS if address.version == 6 else 32), strict=False)


def _sockets(port: int) -> Iterator[socket.socket]:
    """Yields copies of this process's sockets of a local port: the owners of the others may close theirs any time."""
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.exists() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                yield found
