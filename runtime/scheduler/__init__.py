"""Which requests does the next step compute?

Queues, pages and limits. Uses no jax, no clock and no I/O.
"""
