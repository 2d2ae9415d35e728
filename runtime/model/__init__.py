"""The model classes, written per shard with flax.nnx."""
