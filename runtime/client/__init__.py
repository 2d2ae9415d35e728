"""Python client: synchronous and asyncio APIs, with streams that survive server restarts."""
