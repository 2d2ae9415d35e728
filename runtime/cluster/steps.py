"""Definitions shared by both ends of the step stream: options, methods, security, and the report of differences."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc

_MAX_MESSAGE_BYTES = 64 * 2**20
OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error instead of being shared silently
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # process 0 may still be starting
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
OPTIONS_MEETING = "options"  # the first thing that every process reports, at once
# Methods of a runner that process 0 sends and followers replay.
REPLAYED_METHODS = (
    "set_page_row", "run", "propose", "run_drafted", "set_slot_adjustments", "sample", "prompt_logprobs", "copy_pages",
    "stage_adapter", "load_staged_adapter", "set_adapter_slots",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Security:
    """Protection of the step stream: TLS credentials and a token that followers send. Each is optional."""

    server: grpc.ServerCredentials | None = None
    channel: grpc.ChannelCredentials | None = None
    token: str = ""


def bearer(token: str) -> str:
    """Returns the authorization metadata value of a token; empty without a token."""
    return f"Bearer {token}" if token else ""


def differences(name: str, facts: Mapping[int, Mapping[str, str]]) -> str:
    """Describes the facts in which processes differ from process 0. Empty if there are no differences."""
    lines = []
    for process_id in sorted(facts.keys() - {0}):
        for key in sorted(facts[0].keys() | facts[process_id].keys()):
            ours, theirs = facts[0].get(key, "absent"), facts[process_id].get(key, "absent")
            if ours != theirs:
                lines.append(f"{key} is {theirs} on process {process_id} and {ours} on process 0")
    if not lines:
        return ""
    return f"the processes differ in their {name}: {'; '.join(lines)}. Start them all with the same."
