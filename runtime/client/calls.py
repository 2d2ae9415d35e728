"""Opens channels and calls for both clients, and reads their streams."""

from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import grpc

from ..api.errors import ConfigError
from . import resume
from .messages import Chunk, call_errors, chunk

Options = tuple[tuple[str, Any], ...]
CHANNEL_OPTIONS: Options = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # gRPC's default is 2 minutes, too slow to notice that a server is back
)
BALANCED_OPTIONS: Options = (*CHANNEL_OPTIONS, *resume.BALANCED_CHANNEL_OPTIONS)


def credentials_from(tls_ca: Path | None, token_file: Path | None) -> tuple[grpc.ChannelCredentials | None, str | None]:
    """Reads the `credentials` and `token` arguments of a client from files.

    Args:
      tls_ca: PEM file with the certificate of the authority that signed the server's certificate. None disables TLS.
      token_file: File that contains only the token. None sends no token.

    Returns:
      The channel credentials and the token, each None if its file was not given.

    Raises:
      ConfigError: A file cannot be read.
    """
    try:
        credentials = grpc.ssl_channel_credentials(tls_ca.read_bytes()) if tls_ca is not None else None
        return credentials, token_file.read_text().strip() if token_file is not None else None
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{token_file} is not a text file; it must contain the token and nothing else.") from None


def streamed(
    method: Any, request: Any, timeout_seconds: float | None, metadata: Any, wait: resume.Wait
) -> Generator[Chunk, None, None]:
    call = method(request, timeout=wait(timeout_seconds), metadata=metadata)
    try:
        with call_errors():
            for response in call:
                yield chunk(response)
    finally:
        call.cancel()  # no effect on a call that has ended


async def streamed_async(
    method: Any, request: Any, timeout_seconds: float | None, metadata: Any, wait: resume.WaitAsync
) -> AsyncGenerator[Chunk, None]:
    call = method(request, timeout=await wait(timeout_seconds), metadata=metadata)
    try:
        with call_errors():
            async for response in call:
                yield chunk(response)
    finally:
        call.cancel()
