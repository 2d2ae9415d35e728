"""The Python client: synchronous and asyncio, with streams that survive restarts."""
