"""Requests that one tenant sends again and again while others are served.

To add one, add an entry to `FLOODS`. Each of its callers sends the request, reads the answer, and sends it again, until
the neighbour has been served for a while.
"""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto import vllm_engine_pb2

from meshserve.protos import inference_pb2 as pb
from tests.hostile.corpus import AMBIGUOUS, VERY_AMBIGUOUS, message
from tests.hostile.served import MAX_CONTEXT, Served, bearer
from tests.waiting import WAIT_SECONDS

# How any call may end. INTERNAL, UNKNOWN, UNAVAILABLE and CANCELLED would be the server's fault.
ALLOWED = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.NOT_FOUND,  # the health of an unknown service
        grpc.StatusCode.UNIMPLEMENTED,  # RPCs of the gateway protocol that meshserve does not have
    }
)
_SERVICE = "/meshserve.v1.InferenceService/"
_GATEWAY = "/vllm.grpc.engine.VllmEngine/"

Request = Any  # a protobuf message


@dataclass(frozen=True)
class Flood:
    """One request of many callers.

    Attributes:
      method: Name of a method of InferenceService, or the full name of another.
      request: What is sent; a function makes each request from its number.
      tenant: The callers' tenant; "" sends no token.
      num_callers: How many call at the same time.
      timeout_seconds: Deadline of each call.
      num_messages: After how many messages a call is cancelled.
      compression: How the messages are compressed.
    """

    method: str
    request: Request | Callable[[int], Request]
    tenant: str = "crowd"
    num_callers: int = 16
    timeout_seconds: float = WAIT_SECONDS
    num_messages: int | None = None
    compression: grpc.Compression | None = None

    @property
    def path(self) -> str:
        return self.method if self.method.startswith("/") else _SERVICE + self.method

    def data(self, number: int) -> bytes:
        """Returns the bytes of a request."""
        request = self.request(number) if callable(self.request) else self.request
        return request if isinstance(request, bytes) else request.SerializeToString()


def generate(**fields: Any) -> pb.GenerateRequest:
    """Returns a request; `constraint` is given as to the client, fields of SamplingParams by their names."""
    own = {name: fields.pop(name) for name in ("n", "priority", "cache_salt", "text", "request_id") if name in fields}
    token_ids = fields.pop("token_ids", None if "text" in own else [300])
    if "constraint" in fields:
        fields["constraint"] = message(fields["constraint"])
    prompt = {} if token_ids is None else {"token_ids": pb.TokenIds(token_ids=token_ids)}
    return pb.GenerateRequest(sampling=pb.SamplingParams(**fields), **own, **prompt)


def _new_regex(number: int) -> pb.GenerateRequest:
    return generate(max_tokens=20, constraint={"regex": f"[a-z]{{2}}{number}"})


def _wide_schema(number: int) -> pb.GenerateRequest:
    properties = {f"{number}-{i}": {"type": "string", "pattern": "^[a-z]{1,9}$"} for i in range(400)}
    return generate(max_tokens=2, constraint={"json_schema": json.dumps({"properties": properties})})


def _slow_schema(number: int) -> pb.GenerateRequest:
    return generate(max_tokens=2, constraint={"json_schema": f'{{"type":"integer","multipleOf":{3_000_017 + number}}}'})


def _gateway_generate(number: int) -> vllm_engine_pb2.GenerateRequest:
    request = vllm_engine_pb2.GenerateRequest(request_id=f"flood {number}", text="a", stream=True)
    request.sampling_params.max_tokens = 200
    return request


_LONG = {"max_tokens": MAX_CONTEXT - 1, "ignore_eos": True}
_FULL_PROMPT = {"token_ids": [300] * (MAX_CONTEXT - 2), "max_tokens": 1}
_CHAT = pb.ChatRequest(
    messages=[pb.ChatMessage(role="user", content="a")] * 60, sampling=pb.SamplingParams(max_tokens=1)
)
_TOOLS = pb.ChatRequest(
    messages=[pb.ChatMessage(role="user", content="a")],
    tools=[json.dumps({"type": "function", "function": {"name": "f", "parameters": {"a" * 99: [0] * 99}}})] * 128,
)
_WATCH = "/grpc.health.v1.Health/Watch"

FLOODS: Mapping[str, Flood] = {
    # What one tenant may take from another.
    "the largest priority": Flood("Generate", generate(priority=100, **_LONG), "urgent", 8),
    "a priority above the limit": Flood("Generate", generate(priority=1, **_LONG)),
    "a full queue": Flood("Generate", generate(max_tokens=60, ignore_eos=True), num_callers=300),
    "requests over the quota": Flood("Generate", generate(**_LONG), "attacker", 64, num_messages=40),
    "prompts that fill the context": Flood("Generate", generate(**_FULL_PROMPT), num_callers=8),
    "prompts that are not cached": Flood(
        "Generate", lambda number: generate(cache_salt=str(number), **_FULL_PROMPT), num_callers=8
    ),
    "64 samples": Flood("Generate", generate(n=64, **_LONG), num_callers=2, num_messages=300),
    "the same request id": Flood("Generate", generate(request_id="same", max_tokens=9)),
    # Fields at their limits.
    "log-probabilities": Flood(
        "Generate", generate(n=16, max_tokens=60, logprobs=20, prompt_logprobs=20, token_ids=[300] * 300), num_callers=2
    ),
    "a bias of 1,024 tokens": Flood(
        "Generate", generate(n=16, max_tokens=20, logit_bias={i: -1.0 for i in range(1_024)}), num_callers=4
    ),
    "bans of 1,024 tokens": Flood(
        "Generate", generate(n=16, max_tokens=20, bad_token_ids=list(range(1_024))), num_callers=4
    ),
    "stop strings": Flood(
        "Generate", generate(n=8, max_tokens=200, stop=[f"{'a' * 255}{i:x}" for i in range(16)]), num_callers=4
    ),
    "penalties": Flood(
        "Generate", generate(n=8, max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.5), num_callers=4
    ),
    # Text.
    "Tokenize of 150 kB": Flood("Tokenize", pb.TokenizeRequest(text="the sea and the sky " * 7_500), num_callers=32),
    "Detokenize of 300,000 tokens": Flood("Detokenize", pb.DetokenizeRequest(token_ids=[300] * 300_000)),
    "prompts of 150 kB": Flood("Generate", generate(text="the sea and the sky " * 7_500)),
    "prompts of 2,000 characters": Flood("Generate", generate(text="the sea and the sky " * 100), num_callers=200),
    "chats of 60 messages": Flood("Chat", _CHAT, num_callers=8),
    "chats with 128 tools": Flood("Chat", _TOOLS, num_callers=8),
    # Constraints.
    "masks of an ambiguous grammar": Flood(
        "Generate", generate(n=16, constraint={"grammar": AMBIGUOUS}, temperature=1.0, **_LONG), num_callers=2
    ),
    "masks of a very ambiguous grammar": Flood(
        "Generate", generate(n=8, constraint={"grammar": VERY_AMBIGUOUS}, temperature=1.0, **_LONG), num_callers=2
    ),
    "constraints that are new": Flood("Generate", _new_regex),
    "constraints of many parts": Flood("Generate", _wide_schema, num_callers=100),
    "constraints that never compile": Flood("Generate", _slow_schema, num_callers=32, timeout_seconds=1.0),
    # Other RPCs, which no quota counts.
    "Abort of 1,024 ids": Flood("Abort", pb.AbortRequest(request_ids=[f"{i}" for i in range(1_024)])),
    "GetLoad": Flood("GetLoad", pb.GetLoadRequest()),
    "GetServerInfo": Flood("GetServerInfo", pb.GetServerInfoRequest()),
    "GetModelInfo": Flood("GetModelInfo", pb.GetModelInfoRequest()),
    "health without a token": Flood("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(), ""),
    "watching the health": Flood(_WATCH, health_pb2.HealthCheckRequest(), "", 300, num_messages=2, timeout_seconds=1.0),
    "reflection": Flood(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="meshserve.v1.InferenceService"),
    ),
    "calls without a token": Flood("Generate", generate(), ""),
    "calls with a wrong token": Flood("Generate", generate(), "nobody"),
    "methods that do not exist": Flood(_SERVICE + "Nothing", b"", "operator"),
    # Calls and messages.
    "calls that are cancelled": Flood("Generate", generate(**_LONG), "attacker", num_messages=1),
    "deadlines of 5 ms": Flood("Generate", generate(**_LONG), "attacker", timeout_seconds=0.005),
    "messages of 15 MB": Flood("Generate", generate(text="a" * 15_000_000), num_callers=2),
    "messages of 40 MB": Flood("Generate", generate(text="a" * 40_000_000), num_callers=2),
    "messages of a million strings": Flood("Abort", pb.AbortRequest(request_ids=[""] * 1_000_000), num_callers=2),
    "compressed messages of 64 MB": Flood(
        "Generate", b"\x0a\x80\x80\x80\x20" + b"a" * (64 << 20), num_callers=2, compression=grpc.Compression.Gzip
    ),
    # The gateway port.
    "the gateway's requests": Flood(_GATEWAY + "Generate", _gateway_generate, "", 32),
    "the gateway's tokenizer": Flood(_GATEWAY + "GetTokenizer", b"", ""),
    "the gateway's cache events": Flood(_GATEWAY + "SubscribeKvEvents", b"", "", 32),
    "the gateway's embeddings": Flood(_GATEWAY + "Embed", b"", "", 32),
    "the gateway's aborts": Flood(_GATEWAY + "Abort", vllm_engine_pb2.AbortRequest(request_ids=[""] * 100_000), "", 2),
    "flushes of the cache": Flood(_GATEWAY + "FlushCache", b"", "", 8),
}


@contextlib.asynccontextmanager
async def flooding(served: Served, flood: Flood) -> Any:
    """Keeps a flood going while the block runs. Yields the counts of how the calls have ended, which go on."""
    ends: Counter[str] = Counter()
    numbers = itertools.count()
    is_over = asyncio.Event()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]

    target = served.gateway if flood.method.startswith(_GATEWAY) else served.target
    async with grpc.aio.insecure_channel(target, options=options, compression=flood.compression) as channel:
        method = channel.unary_stream(flood.path)

        async def caller() -> None:
            while not is_over.is_set():
                code = await end_of(method, flood, next(numbers), is_over)
                ends[code.name] += 1
                assert code in ALLOWED, (flood.method, code)

        callers = [asyncio.create_task(caller()) for _ in range(flood.num_callers)]
        try:
            yield ends
        finally:
            is_over.set()
            await asyncio.gather(*callers)


async def end_of(method: Any, flood: Flood, number: int, is_over: asyncio.Event) -> grpc.StatusCode:
    """Makes one call and returns its status, OK if it was cancelled here."""
    call = method(flood.data(number), metadata=bearer(flood.tenant), timeout=flood.timeout_seconds)
    num_messages = 0
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            num_messages += 1
            if is_over.is_set() or num_messages == flood.num_messages:
                call.cancel()
    code = await call.code()
    return grpc.StatusCode.OK if code is grpc.StatusCode.CANCELLED and call.cancelled() else code
