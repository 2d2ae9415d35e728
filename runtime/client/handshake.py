"""Recognises connections that will never succeed, such as a TLS handshake that was refused. Does not import JAX.

gRPC reports them with the same status as a server that does not run yet, UNAVAILABLE, and tells the cause in the text
of the error only.
"""

import re

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..api.loopback import proxy_options

_PROBE_SECONDS = 2.0
_TRUST = "Pass the certificate of the authority that signed it (--tls-ca, or `credentials` in Python)."
_REASON = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")


def refusal(target: str, error: grpc.RpcError, *, is_secure: bool) -> str | None:
    """Returns why no connection to a server is possible and what to do, or None if one may still succeed.

    Args:
      target: Address of the server.
      error: An error of status UNAVAILABLE.
      is_secure: Whether the client uses TLS.
    """
    details = error.details() or ""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        reason = found[1] if (found := _REASON.search(details)) else "it is not trusted"
        return f"the certificate of the server at {target} was refused ({reason}). {_TRUST}"
    if "Hostname Verification" in details:
        return f"the certificate of the server at {target} is for another name. Connect to a name that it contains."
    if "WRONG_VERSION_NUMBER" in details:
        return f"the server at {target} does not use TLS. Leave the credentials out (--tls-ca), or correct the address."
    if "handshake failed" in details.lower():
        return f"the TLS handshake with {target} failed: {details}"
    if "Failed parsing HTTP/2" in details:
        return f"{target} does not answer as gRPC. Use the port of `meshserve serve --port`, 50051 by default."
    if is_secure and _is_closed(details) and "Handshake" not in details:
        advice = "it may require a certificate of the client (mutual TLS)"
        return f"the server at {target} closed the connection after the TLS handshake; {advice}."
    return None


def may_expect_tls(error: grpc.RpcError, *, is_secure: bool) -> bool:
    """Returns whether a server may have refused this client because it does not use TLS."""
    return not is_secure and _is_closed(error.details() or "")


def speaks_tls(target: str) -> bool:
    """Returns whether a server answers the first message of a TLS handshake. Blocks for up to two seconds."""
    with grpc.secure_channel(target, grpc.ssl_channel_credentials(), proxy_options(target)) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_SECONDS)
        except grpc.RpcError as error:
            details = error.details() or ""
            is_answered = error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return is_answered or "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details
        return True


def expects_tls(target: str) -> str:
    """Returns the message for a client without TLS whose server uses it."""
    return f"the server at {target} uses TLS, and this client does not. {_TRUST}"


def _is_closed(details: str) -> bool:
    return "Socket closed" in details or "reset by peer" in details
