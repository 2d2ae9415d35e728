"""Benchmarks of single kernels and collectives."""
