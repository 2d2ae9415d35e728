"""Benchmarks that load a server through gRPC."""
