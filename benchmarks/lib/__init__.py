"""Shared parts of the benchmarks: workloads, timing, power readings."""
