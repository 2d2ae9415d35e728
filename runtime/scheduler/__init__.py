"""Schedules requests: queues, pages and limits. Uses no jax, no clock and no I/O."""
