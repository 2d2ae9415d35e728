"""Stored tensors read straight into shards, and shards written as checkpoints."""
