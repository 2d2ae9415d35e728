"""Which addresses are those of this machine, and connections to them, which never go through a proxy.

The environment's proxy (HTTP_PROXY and others) serves other machines: for it, 127.0.0.1 is itself.
"""

import ipaddress
import ssl
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urllib.request import Request

_EVERY_ADDRESS = ("0.0.0.0", "[::]", "::")  # a client that connects to them reaches this machine


def is_loopback(host: str) -> bool:
    """Returns whether only callers on this machine can reach the host. An IPv6 address may be in brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_host_allowed(header: str | None, bound: str, allowed: Collection[str] = ()) -> bool:
    """Returns whether an HTTP request with this header Host may be meant for the server.

    A web page can have its own name resolved to a loopback address, and then read from browsers on this machine what
    the server answers. Such a request names the page's host. Requests without the header are not from browsers.

    Args:
      header: The header; None without one.
      bound: The host that the server binds. Where other machines can reach it, any name may lead to it.
      allowed: Other names by which the server may be addressed; "*" allows any.
    """
    from urllib.parse import urlsplit  # not at module level: most importers of this module check no names

    if header is None or "*" in allowed or not is_loopback(bound):
        return True
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name in {bound.lower(), *(each.lower() for each in allowed)}


def proxy_options(target: str) -> tuple[tuple[str, int], ...]:
    """Returns options of a gRPC channel to `target`, such as 127.0.0.1:50051 or dns:///localhost:50051.

    They keep gRPC from asking the environment's proxy for a server of this machine.
    """
    scheme, colon, rest = target.partition(":")
    addresses = rest.rpartition("/")[2] if colon and scheme in ("dns", "ipv4", "ipv6") else target
    hosts = [address.rpartition(":")[0] or address for address in addresses.split(",")]
    is_here = all(is_loopback(host) or host in _EVERY_ADDRESS for host in hosts)
    return (("grpc.enable_http_proxy", 0),) if is_here else ()


def open_url(url: "str | Request", *, timeout_seconds: float, context: ssl.SSLContext | None = None) -> Any:
    """Opens a URL, like `urllib.request.urlopen`, but that of a server of this machine without a proxy."""
    import urllib.request  # not at module level: most importers of this module open no URLs
    from urllib.parse import urlsplit

    text = url if isinstance(url, str) else url.full_url
    host = urlsplit(text).hostname or ""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if is_loopback(host) or host in _EVERY_ADDRESS:
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers).open(url, timeout=timeout_seconds)
