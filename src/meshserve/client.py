"""The Python client of a meshserve server: `from meshserve.client import Client`. Imports no jax."""

from meshserve.runtime.client.client import AsyncClient, Client
from meshserve.runtime.client.messages import CallError, Chunk, Completion, Finish, Usage

__all__ = ["AsyncClient", "CallError", "Chunk", "Client", "Completion", "Finish", "Usage"]
