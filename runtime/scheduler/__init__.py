"""Pure decisions about queues, pages and limits; no jax, no clock, no I/O."""
