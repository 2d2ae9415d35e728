"""A call over HTTP, as the edge sees calls: the counterpart of a gRPC context."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..api.errors import InvalidRequestError
from ..server.auth import OnBehalf
from ..server.edge import checked_request_id
from .bodies import Apart

REQUEST_ID = "X-Request-Id"
_TIMEOUT = "X-Request-Timeout"  # seconds
_MAX_TIMEOUT_SECONDS = 1e6


class HttpCall:
    """One request to the port. See `edge.Call`.

    Args:
      headers: The headers of the request.
      on_behalf_of: The name of the tenant for which the server itself makes the call; None if a caller makes it.

    Raises:
      InvalidRequestError: The request's id or its time limit is not valid.
    """

    def __init__(self, headers: Mapping[str, str], *, on_behalf_of: str | None = None):
        self.began = time.monotonic()
        self.request_id = checked_request_id(headers.get(REQUEST_ID))
        self._metadata: tuple[tuple[str, Any], ...] = tuple(metadata(headers))
        if on_behalf_of is not None:
            self._metadata = (("authorization", OnBehalf(on_behalf_of)),)
        self._end = _end_of(headers, self.began)
        self.apart = Apart()  # runs functions that read the body

    def time_remaining(self) -> float | None:
        """Seconds until the caller's time limit; None without one."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        """The headers, with names in lower case."""
        return self._metadata


def metadata(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields headers as gRPC's metadata. Anthropic's clients send the token in a header of another name."""
    has_token = False
    for name, value in headers.items():
        has_token |= name.lower() == "authorization"
        yield name.lower(), value
    if not has_token and (key := headers.get("X-Api-Key")):
        yield "authorization", f"Bearer {key}"


def _end_of(headers: Mapping[str, str], began: float) -> float | None:
    text = headers.get(_TIMEOUT)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= _MAX_TIMEOUT_SECONDS:
        raise InvalidRequestError(_TIMEOUT, f"got {text!r:.40}; allowed is a number of seconds above 0.")
    return began + seconds
