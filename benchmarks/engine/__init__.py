"""Benchmarks of the engine without a server."""
