"""The Python client of a meshserve server: `from meshserve.client import Client`. Imports no jax."""

from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.client.answers import Answer, ToolCall, answered
from meshserve.runtime.client.client import AsyncClient, Client
from meshserve.runtime.client.messages import CallError, Chunk, Completion, Finish, Usage
from meshserve.runtime.text.answers.answer_parts import ArgumentsPart, CallPart, ContentPart, ReasoningPart

__all__ = [
    "Answer", "ArgumentsPart", "AsyncClient", "CallError", "CallPart", "Chunk", "Client", "Completion", "ContentPart",
    "Finish", "InvalidRequestError", "ReasoningPart", "ToolCall", "Usage", "answered",
]  # fmt: skip
