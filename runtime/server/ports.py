"""Addresses of this machine, and whether their ports are in use."""

import errno
import socket
from typing import Any

from ..api.errors import ConfigError


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int, option: str = "port") -> None:
    """Raises ConfigError if the port is in use; gRPC accepts it if one of a name's addresses is free. 0 is free."""
    if is_taken(host, port):
        flag = option.replace("_", "-")
        raise ConfigError(f"cannot bind {address_of(host, port)}: it is in use. Free it, or choose another --{flag}.")


def is_taken(host: str, port: int) -> bool:
    """Returns whether a port of any address of `host` is in use. False if `host` is no address of this machine."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        return False
    return any(_is_in_use(family, address) for family, _, _, _, address in found)


def _is_in_use(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:  # the machine may also have no such address, or no such family
        return error.errno == errno.EADDRINUSE
    return False
