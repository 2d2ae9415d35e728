"""Requests of HTTP that callers send again and again while others are served.

To add one, add an entry to `HTTP_FLOODS`, in which those of a kind are together. What is sent on connections that stay
open is in `connections`.
"""

import functools
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.served import MAX_CONTEXT

CLOSED = 0  # instead of a status: the connection was closed
PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Sizes:
    """How long an attack is.

    Attributes:
      large_bytes: Of a body that is too large.
      many_bytes: Of a body that may be read.
      most_callers: Of one flood.
    """

    large_bytes: int
    many_bytes: int
    most_callers: int


SHORT = Sizes(20_000_000, 100_000, 1)
LONG = Sizes(400_000_000, 10_000_000, 64)

Body = bytes | Callable[[Sizes], Iterator[bytes]]  # or its pieces


@dataclass(frozen=True)
class HttpFlood:
    """One request of many callers.

    Attributes:
      path: The path, of the OpenAI port unless `is_probe`.
      body: The body, or a function that makes its pieces.
      method: The method; "" sends no head at all.
      headers: Headers beside Host, the token and those of the body.
      framing: How the body's end is told: "length", "chunked", "none", or a length that may be wrong.
      tenant: The callers' tenant; "" sends no token.
      num_callers: How many call at the same time.
      statuses: How requests may end.
      num_bytes: After how many bytes of the answer a caller leaves; 0 is before the first.
      leaves: Whether it closes the connection then, or stays and does not read.
      after: What is sent behind the request.
      is_kept: Whether a connection is used again.
    """

    path: str
    body: Body = b""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    framing: str | int = "length"
    tenant: str = "crowd"
    num_callers: int = 8
    statuses: frozenset[int] = frozenset({400})
    num_bytes: int | None = None
    leaves: bool = True
    after: bytes = b""
    is_kept: bool = False
    is_probe: bool = False

    def pieces(self, sizes: Sizes) -> Iterator[bytes]:
        """Yields the request."""
        pieces = [self.body] if isinstance(self.body, bytes) else self.body(sizes)
        head = f"{self.method} {self.path} HTTP/1.1\r\nHost: localhost\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        if self.tenant:
            head += f"Authorization: Bearer {self.tenant}\r\n"
        if isinstance(self.framing, int):
            head += f"Content-Length: {self.framing}\r\n"
        elif self.framing == "chunked":
            head += "Transfer-Encoding: chunked\r\n"
            pieces = itertools.chain((b"%x\r\n%b\r\n" % (len(each), each) for each in pieces if each), [b"0\r\n\r\n"])
        elif self.framing == "length" and isinstance(self.body, bytes):
            head += f"Content-Length: {len(self.body)}\r\n"
        elif self.framing == "length":
            head += f"Content-Length: {sum(map(len, self.body(sizes)))}\r\n"
        yield (head + "\r\n").encode()
        yield from pieces
        yield self.after


def _repeated(piece: bytes, total: int) -> Iterator[bytes]:
    whole = piece * max(1, PIECE_BYTES // len(piece))
    for _ in range(max(1, total // len(whole))):
        yield whole


def large(before: bytes = b'{"prompt": "', piece: bytes = b"a", after: bytes = b'"}') -> Body:
    """Returns a body that is too large."""
    return lambda sizes: itertools.chain([before], _repeated(piece, sizes.large_bytes), [after])


def of_many(before: bytes, piece: bytes, last: bytes = b"", after: bytes = b"]}") -> Body:
    """Returns a body of 10 MB, or of one in `make test`."""
    return lambda sizes: itertools.chain([before], _repeated(piece, sizes.many_bytes), [last, after])


@functools.cache
def _gzip(total: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    pieces = [packer.compress(piece) for piece in itertools.chain([b'{"prompt": "'], _repeated(b"a", total))]
    return b"".join(pieces) + packer.flush()


@functools.cache
def _biases() -> bytes:
    return _asked(prompt="a", logit_bias={str(token_id): 1 for token_id in range(700_000)})


@functools.cache
def _unknown_fields() -> bytes:
    return _asked(**{f"field {number}": number for number in range(500_000)})


def _asked(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


_PROMPT = {"prompt": [300], "ignore_eos": True}
_LONG = _PROMPT | {"max_tokens": MAX_CONTEXT - 1}
_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "ignore_eos": True}
_COMPLETIONS, _CHATS, _RESPONSES, _MESSAGES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
)  # fmt: skip
_TOO_LARGE = frozenset({408, 413, CLOSED})
_BAD = frozenset({400, 408, CLOSED})
_REFUSED = frozenset({400, 408, 413, 429})
_GZIP = {"Content-Encoding": "gzip"}
_EXPECTING = {"Expect": "100-continue"}
_leaving = functools.partial(HttpFlood, tenant="attacker", num_callers=16, statuses=frozenset({200, 429, CLOSED}))
_DEEP = 100_000
_SURROGATE = '"\\ud800"'
# Requests with a text that is no text, by the field that has it.
_TEXTS = {
    "a prompt": (_COMPLETIONS, '{"prompt": %s, "max_tokens": 1}'),
    "a message": (_CHATS, '{"messages": [{"role": "user", "content": %s}], "max_tokens": 1}'),
    "a role": (_CHATS, '{"messages": [{"role": %s, "content": "a"}], "max_tokens": 1}'),
    "a model": (_CHATS, '{"model": %s, "messages": [{"role": "user", "content": "a"}]}'),
    "a stop string": (_COMPLETIONS, '{"prompt": "a", "stop": [%s], "max_tokens": 1}'),
    "a salt": (_COMPLETIONS, '{"prompt": "a", "cache_salt": %s, "max_tokens": 1}'),
    "an expression": (_COMPLETIONS, '{"prompt": "a", "regex": %s, "max_tokens": 1}'),
    "a field": (_COMPLETIONS, '{"prompt": "a", %s: 1}'),
    "a tool": (_CHATS, '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1,'
               ' "tools": [{"function": {"name": %s}}]}'),
    "an input": (_RESPONSES, '{"input": %s, "max_output_tokens": 1}'),
    "an instruction": (_MESSAGES, '{"system": %s, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'),
    "a text": ("/tokenize", '{"prompt": %s}'),
    "an argument of the template": (_CHATS, '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1,'
                                    ' "chat_template_kwargs": {"x": %s}}'),
}  # fmt: skip
# Numbers in every field that takes one.
_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "seed", "min_tokens", "n",
    "priority", "max_tokens", "logprobs", "prompt_logprobs",
)  # fmt: skip


def _numbers(number: str) -> Body:
    return (
        f'{{"prompt": [{number}, 3], {", ".join(f"{chr(34)}{name}{chr(34)}: {number}" for name in _NUMBERS)}}}'.encode()
    )


HTTP_FLOODS: Mapping[str, Mapping[str, HttpFlood]] = {
    "large bodies": {  # each statement about their size may be a lie
        "large bodies": HttpFlood(_COMPLETIONS, large(), num_callers=3, statuses=_TOO_LARGE),
        "large bodies without a token": HttpFlood(
            _COMPLETIONS, large(), tenant="", num_callers=3, statuses=frozenset({401, CLOSED})
        ),
        "large bodies in chunks": HttpFlood(
            _COMPLETIONS, large(), framing="chunked", num_callers=3, statuses=_TOO_LARGE
        ),
        "large bodies that are announced": HttpFlood(
            _COMPLETIONS, large(), headers=_EXPECTING, num_callers=3, statuses=_TOO_LARGE
        ),
        "large bodies without a length": HttpFlood(_COMPLETIONS, large(), framing="none", num_callers=3, statuses=_BAD),
        "a length that is too short": HttpFlood(_COMPLETIONS, large(), framing=10, num_callers=3, statuses=_BAD),
        "a length that is too long": HttpFlood(
            _COMPLETIONS, b"{" * 1000, framing=10**6, num_bytes=0, statuses=frozenset({CLOSED})
        ),
        "a length of 30 digits": HttpFlood(_COMPLETIONS, b"{" * 1000, framing=10**29, statuses=_REFUSED | _BAD),
        "large answers to a GET": HttpFlood(
            "/v1/models", large(), method="GET", num_callers=3, statuses=frozenset({200, CLOSED}), framing="chunked"
        ),
        "a large body to a path that is none": HttpFlood(
            "/none", large(), num_callers=3, statuses=frozenset({404, CLOSED})
        ),
        "gzip": HttpFlood(
            _COMPLETIONS,
            lambda sizes: iter([_gzip(sizes.large_bytes)]),
            headers=_GZIP,
            framing="chunked",
            num_callers=3,
            statuses=_TOO_LARGE | {400, 415},
        ),
        "gzip of many members": HttpFlood(
            _COMPLETIONS,
            lambda sizes: itertools.repeat(_gzip(1), sizes.large_bytes // 1_000),
            headers=_GZIP,
            framing="chunked",
            num_callers=3,
            statuses=_TOO_LARGE | {400, 415},
        ),
        "what is no gzip": HttpFlood(_COMPLETIONS, b"abc" * 100, headers=_GZIP, statuses=frozenset({400, 415, CLOSED})),
        "zstd": HttpFlood(
            _COMPLETIONS, b"abc", headers={"Content-Encoding": "zstd"}, statuses=frozenset({400, 415, CLOSED})
        ),
    },
    "many values": {
        "nested arrays": HttpFlood(_COMPLETIONS, of_many(b'{"prompt": [', b"[", b""), statuses=_REFUSED),
        "nested objects": HttpFlood(_CHATS, of_many(b'{"tools": [', b'{"a":', b"1"), statuses=_REFUSED),
        "900 levels": HttpFlood(_COMPLETIONS, b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", statuses=_REFUSED),
        "900 levels in a refused field": HttpFlood(_CHATS, b'{"audio":' + b"[" * 900 + b"]" * 900 + b"}"),
        "empty arrays": HttpFlood(_COMPLETIONS, of_many(b'{"prompt": [', b"[],", b"[]"), statuses=_REFUSED),
        "objects": HttpFlood(_CHATS, of_many(b'{"messages": [', b"{},", b"{}"), statuses=_REFUSED),
        "messages": HttpFlood(
            _CHATS,
            of_many(b'{"messages": [', b'{"role":"user"},', b'{"role":"user"}'),
            statuses=_REFUSED,
        ),
        "responses' messages": HttpFlood(
            _RESPONSES,
            of_many(b'{"input": [', b'{"role":"user","content":"a"},', b'{"role":"user","content":"a"}'),
            statuses=_REFUSED,
        ),
        "anthropic's messages": HttpFlood(
            _MESSAGES,
            of_many(b'{"messages": [', b'{"role":"user","content":"a"},', b'{"role":"user","content":"a"}'),
            statuses=_REFUSED,
        ),
        "anthropic's messages to count": HttpFlood(
            _MESSAGES + "/count_tokens",
            of_many(b'{"messages": [', b'{"role":"user","content":"a"},', b'{"role":"user","content":"a"}'),
            statuses=_REFUSED,
        ),
        "parts of a message": HttpFlood(
            _CHATS, of_many(b'{"messages": [{"role":"user","content":[', b'"a",', b'"a"', b"]}]}"), statuses=_REFUSED
        ),
        "tools": HttpFlood(
            _CHATS,
            of_many(b'{"messages": [], "tools": [', b'{"function":{"name":"f"}},', b'{"function":{"name":"f"}}'),
            statuses=_REFUSED,
        ),
        "prompts": HttpFlood(_COMPLETIONS, of_many(b'{"prompt": [', b'"a",', b'"a"'), statuses=_REFUSED),
        "token ids": HttpFlood(_COMPLETIONS, of_many(b'{"prompt": [', b"3,", b"3"), statuses=_REFUSED),
        "stop strings": HttpFlood(
            _COMPLETIONS, of_many(b'{"prompt": "a", "stop": [', b'"a",', b'"a"'), statuses=_REFUSED
        ),
        "allowed tokens": HttpFlood(
            _COMPLETIONS, of_many(b'{"prompt": "a", "allowed_token_ids": [', b"3,", b"3"), statuses=_REFUSED
        ),
        "biases": HttpFlood(
            _COMPLETIONS,
            lambda _: iter([_biases()]),
            statuses=_REFUSED,
        ),
        "one field again and again": HttpFlood(
            _COMPLETIONS, of_many(b'{"prompt": "a"', b',"n":1', b"", b', "temperature": "hot"}'), statuses=_REFUSED
        ),
        "fields that are none": HttpFlood(_COMPLETIONS, lambda _: iter([_unknown_fields()]), statuses=_REFUSED),
        "a field with a long name": HttpFlood(
            _COMPLETIONS, of_many(b'{"', b"tempera", b"", b'": 1}'), statuses=_REFUSED
        ),
        "a field with a name of 60 kB": HttpFlood(_COMPLETIONS, _asked(**{"temperatur" * 6_000: 1}), statuses=_REFUSED),
        "one long string": HttpFlood(_COMPLETIONS, of_many(b'{"prompt": "', b"a ", b"", b'"}'), statuses=_REFUSED),
        "one long message": HttpFlood(
            _CHATS, of_many(b'{"messages": [{"role":"user","content":"', b"a ", b"", b'"}]}'), statuses=_REFUSED
        ),
        "a long string of escapes": HttpFlood(
            _COMPLETIONS, of_many(b'{"prompt": "', b"\\ud83d\\ude00", b"", b'"}'), statuses=_REFUSED
        ),
        "a text to tokenise": HttpFlood(
            "/tokenize",
            _asked(prompt="the sea " * 18_000, return_token_strs=True),
            num_callers=32,
            statuses=frozenset({200, 400, 429}),
        ),
        "tokens to detokenise": HttpFlood(
            "/detokenize", _asked(tokens=[300] * 300_000), statuses=frozenset({200, 400, 429})
        ),
        "a million tokens to detokenise": HttpFlood(
            "/detokenize", of_many(b'{"tokens": [', b"300,", b"300"), statuses=_REFUSED | {200}
        ),
        "prompts of 150 kB": HttpFlood(
            _COMPLETIONS, _asked(prompt="the sea " * 18_000), statuses=frozenset({400, 429})
        ),
    },
    "what is no JSON": {  # or what Python takes for something else
        "a number of 100,000 digits": HttpFlood(_COMPLETIONS, b'{"seed": %b}' % (b"9" * 100_000)),
        "numbers of 4,000 digits": HttpFlood(_COMPLETIONS, _numbers("9" * 4_000)),
        "numbers that are infinite": HttpFlood(_COMPLETIONS, _numbers("1e400")),
        "numbers that are none": HttpFlood(_COMPLETIONS, _numbers("NaN")),
        "a bias of 4,000 digits": HttpFlood(_COMPLETIONS, b'{"prompt": "a", "logit_bias": {"1": %b}}' % (b"9" * 4_000)),
        "a bias of a token of 4,000 digits": HttpFlood(_COMPLETIONS, _asked(prompt="a", logit_bias={"9" * 4_000: 1})),
        "a bias of a token of 5,000 digits": HttpFlood(_COMPLETIONS, _asked(prompt="a", logit_bias={"9" * 5_000: 1})),
        "bytes that are no UTF-8": HttpFlood(_COMPLETIONS, b'{"prompt": "\xff\xfe\xed\xa0\x80"}'),
        "surrogates in UTF-8": HttpFlood(_COMPLETIONS, b'{"prompt": "\xed\xa0\x80"}'),
        "UTF-16": HttpFlood(_COMPLETIONS, '{"prompt": "a"}'.encode("utf-16")),
        "an empty body": HttpFlood(_COMPLETIONS),
        "zeros": HttpFlood(_COMPLETIONS, b"\0" * 60_000),
        **{
            f"half a character in {name}": HttpFlood(path, (body % _SURROGATE).encode())
            for name, (path, body) in _TEXTS.items()
        },
    },
    "callers who leave": {  # at once, after the first bytes, with something behind their request
        "leaving a stream at once": _leaving(_COMPLETIONS, _asked(**_LONG, stream=True), num_bytes=0),
        "leaving a stream": _leaving(_COMPLETIONS, _asked(**_LONG, stream=True), num_bytes=500),
        "leaving a whole answer": _leaving(_COMPLETIONS, _asked(**_LONG), num_bytes=0),
        "leaving a chat": _leaving(_CHATS, _asked(**_CHAT, stream=True), num_bytes=500),
        "leaving a chat at once": _leaving(_CHATS, _asked(**_CHAT), num_bytes=0),
        "leaving responses": _leaving(_RESPONSES, _asked(input="a", max_output_tokens=100, stream=True), num_bytes=300),
        "leaving messages": _leaving(
            _MESSAGES, _asked(messages=_CHAT["messages"], max_tokens=100, stream=True), num_bytes=300
        ),
        "leaving four samples": _leaving(_COMPLETIONS, _asked(**_LONG, stream=True, n=4), num_bytes=500),
        "leaving eight prompts": _leaving(
            _COMPLETIONS, _asked(**_LONG | {"prompt": [[300 + i] for i in range(8)]}, stream=True), num_bytes=500
        ),
        "leaving eight prompts of four samples": _leaving(
            _COMPLETIONS, _asked(**_LONG | {"prompt": [[300 + i] for i in range(8)]}, n=4), num_bytes=0
        ),
        "leaving half a body": _leaving(_COMPLETIONS, _asked(**_LONG), framing=1_000, num_bytes=0),
        "leaving texts to tokenise": _leaving(
            _COMPLETIONS, _asked(prompt="the sea " * 18_000), num_callers=64, num_bytes=0
        ),
        "leaving large bodies": _leaving(_COMPLETIONS, of_many(b'{"prompt": [', b"[],", b"[]"), num_bytes=0),
        "leaving with more requests behind": _leaving(
            _COMPLETIONS, _asked(**_LONG), num_bytes=0, after=b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5_000
        ),
        "leaving with rubbish behind": _leaving(_COMPLETIONS, _asked(**_LONG), num_bytes=0, after=b"a" * 500_000),
        "leaving an upgrade": _leaving(
            _COMPLETIONS,
            _asked(**_LONG),
            num_bytes=0,
            after=b"a" * 500_000,
            headers={"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="},
        ),
    },
    "again and again": {  # and readers who do not read
        "answers that are not read": _leaving(
            _COMPLETIONS, _asked(**_LONG, stream=True, n=16, logprobs=5), num_callers=2, num_bytes=0, leaves=False
        ),
        "whole answers that are not read": _leaving(
            _COMPLETIONS, _asked(**_LONG, n=16, logprobs=20), num_callers=2, num_bytes=0, leaves=False
        ),
        "wrong tokens": HttpFlood(
            _COMPLETIONS,
            _asked(**_LONG),
            tenant="nobody",
            num_callers=32,
            statuses=frozenset({401, CLOSED}),
            is_kept=True,
        ),
        "no tokens": HttpFlood(
            "/v1/models", method="GET", tenant="", num_callers=32, statuses=frozenset({401}), is_kept=True
        ),
        "the page": HttpFlood("/", method="GET", tenant="", num_callers=16, statuses=frozenset({200}), is_kept=True),
        "the status": HttpFlood(
            "/status.json", method="GET", tenant="operator", num_callers=16, statuses=frozenset({200}), is_kept=True
        ),
        "short chats": HttpFlood(
            _CHATS, _asked(**_CHAT | {"max_tokens": 1}), num_callers=32, statuses=frozenset({200, 429}), is_kept=True
        ),
        "log-probabilities": HttpFlood(
            _COMPLETIONS,
            _asked(
                **_PROMPT | {"prompt": [300] * 240}, n=16, max_tokens=10, logprobs=20, prompt_logprobs=20, echo=True
            ),
            num_callers=2,
            statuses=frozenset({200, 429}),
        ),
    },
    "probes": {
        "scrapes": HttpFlood("/metrics", method="GET", tenant="", statuses=frozenset({200, CLOSED}), is_probe=True),
        "scrapes that are left": HttpFlood(
            "/metrics",
            method="GET",
            tenant="",
            num_callers=16,
            statuses=frozenset({CLOSED}),
            num_bytes=0,
            is_probe=True,
        ),
        "large bodies to probes": HttpFlood(
            "/metrics", large(), num_callers=3, statuses=frozenset({405, CLOSED}), is_probe=True
        ),
        "large bodies to scrapes": HttpFlood(
            "/livez",
            large(),
            method="GET",
            framing="chunked",
            num_callers=3,
            statuses=frozenset({200, CLOSED}),
            is_probe=True,
        ),
    },
}
