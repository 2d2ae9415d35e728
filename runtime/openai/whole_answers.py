"""Answers that are sent at once."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import json_text
from .http_call import HttpCall

if TYPE_CHECKING:
    from aiohttp import web


async def answered(call: HttpCall, whole: Callable[[], dict[str, Any]], *, is_long: bool) -> "web.Response":
    """Returns the answer of a call.

    Args:
      call: The call.
      whole: Makes the answer.
      is_long: Whether it may have so many values that making it and writing it would keep other callers waiting. It is
        then made in the thread for large bodies.

    Raises:
      QuotaExceededError, QueueFullError: Too much is being read or written in that thread.
    """
    from aiohttp import web

    if not is_long:
        return web.json_response(text=json.dumps(whole()))
    return web.json_response(text=await call.apart.run_long(lambda: json_text.in_pieces(whole())))
