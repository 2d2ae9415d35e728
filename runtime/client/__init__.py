"""How does a Python program call a server?

Synchronous and asyncio clients, with streams that survive restarts of a server.
"""
