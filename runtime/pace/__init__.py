"""Times that a server learns while it runs: of steps, of prompts by length, of requests that leave. Pure Python."""
