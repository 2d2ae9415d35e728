"""Tells which addresses a process listens on, from /proc."""

import contextlib
import ipaddress
import re
import socket
from pathlib import Path

_LISTENING = "0A"


def listening_addresses(pid: int) -> dict[int, str]:
    """Returns the address of each TCP port that a process of this machine listens on, in its own network namespace."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if (found := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))) is not None:
                sockets.add(found[1])
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    local = [row[1].split(":") for row in rows if row[3] == _LISTENING and row[9] in sockets]
    return {int(port, 16): _address(address) for address, port in local}


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _address(text: str) -> str:
    """Converts the kernel's form, little-endian words in hexadecimal digits."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
