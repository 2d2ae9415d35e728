"""OpenAI's HTTP API: the off-the-shelf gateway `smg` as a child process of the server."""
