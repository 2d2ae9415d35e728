"""Reads stored tensors straight into device shards, and writes shards as checkpoints."""
