"""How do clients of OpenAI's HTTP API reach this server?

The off-the-shelf gateway `smg` as a child process.
"""
