"""Model implementations, written per shard with flax.nnx."""
