"""Serves the files of the page: a fixed list, read from the package once. Nothing on the page comes from elsewhere."""

import hashlib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..http_call import HttpCall

if TYPE_CHECKING:
    from aiohttp import web

# The path at the port, the file, and its type.
FILES = (
    ("/", "index.html", "text/html"),
    ("/page.css", "page.css", "text/css"),
    ("/page.js", "page.js", "text/javascript"),
    ("/icon.svg", "icon.svg", "image/svg+xml"),
)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Cache-Control": "no-cache",  # ask each time, so that a newer server has its own page
    }
)


class PageFile:
    """One file of the page."""

    def __init__(self, name: str, content_type: str):
        self._data = (resources.files(__package__) / "files" / name).read_bytes()
        self._content_type = content_type
        self._tag = hashlib.sha256(self._data).hexdigest()[:32]

    async def answer(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """Answers a request. See `openai_port`."""
        from aiohttp import web

        known = request.if_none_match or ()
        if any(tag.value in (self._tag, "*") for tag in known):
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(body=self._data, content_type=self._content_type, charset="utf-8", headers=HEADERS)
        response.etag = self._tag
        return response
