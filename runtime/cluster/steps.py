"""What both ends of the step stream share: channel options, security, the wording of differences."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc

_MAX_MESSAGE_BYTES = 64 * 2**20
OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not shared in silence
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # while process 0 is starting
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True, kw_only=True)
class Security:
    """How the step stream is protected: credentials of either end, and a secret that followers show. Either may be
    left out."""

    server: grpc.ServerCredentials | None = None
    channel: grpc.ChannelCredentials | None = None
    token: str = ""


def bearer(token: str) -> str:
    """As it stands in the metadata; empty for none."""
    return f"Bearer {token}" if token else ""


def differences(name: str, facts: Mapping[int, Mapping[str, str]]) -> str:
    """In which facts processes differ from process 0, in words; empty if in none."""
    lines = []
    for process_id in sorted(facts.keys() - {0}):
        for key in sorted(facts[0].keys() | facts[process_id].keys()):
            ours, theirs = facts[0].get(key, "absent"), facts[process_id].get(key, "absent")
            if ours != theirs:
                lines.append(f"{key} is {theirs} on process {process_id} and {ours} on process 0")
    if not lines:
        return ""
    return f"the processes differ in their {name}: {'; '.join(lines)}. Start them all with the same."
